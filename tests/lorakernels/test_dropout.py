"""Seeded dropout: the same mask in forward and backward, the right share, and another mask for another seed."""

import pytest
import torch
from kernel_checks import assert_close, strided
from lorakernels.dropout import draw_seed, dropout, dropout_into


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 50), (1, 1), (0, 4)])
def test_forward_and_backward_share_a_mask(p, shape, device, dtype):
    x = torch.rand(shape, device=device).to(dtype) + 1
    seed = draw_seed(x.device)
    leaf = x.clone().requires_grad_()
    y = dropout(leaf, seed, p)
    kept = y != 0
    assert_close(y, torch.where(kept, x.float() / (1 - p if p < 1 else 1), 0), dtype)
    y.sum().backward()
    assert_close(leaf.grad, kept.float() / (1 - p if p < 1 else 1), dtype)
    assert torch.equal(dropout(x, seed, p), y), "the same seed must give the same mask"


def test_share_and_seeds(device):
    x = torch.ones(64, 200, device=device)
    masks = [dropout(x, torch.tensor([s], device=device), 0.3) != 0 for s in (1, 2)]
    for mask in masks:
        assert abs(mask.float().mean().item() - 0.7) < 0.02
    assert abs((masks[0] & masks[1]).float().mean().item() - 0.49) < 0.02, "two seeds must be independent"


def test_add_and_strides(device, dtype):
    x, seed = torch.randn(6, 30, device=device).to(dtype), torch.tensor([5], device=device)
    out = torch.ones(6, 30, device=device).to(dtype)
    dropout_into(strided(x), seed, 0.4, out, add=True)
    assert_close(out, 1 + dropout(x, seed, 0.4).float(), dtype)
    assert_close(dropout(x.t().contiguous().t(), seed, 0.4), dropout(x, seed, 0.4), dtype)


def test_seed_follows_manual_seed(device):
    torch.manual_seed(3)
    a = draw_seed(torch.device(device))
    torch.manual_seed(3)
    assert a == draw_seed(torch.device(device))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(torch.zeros(1, 1), torch.tensor([1]), 1.5)
    with pytest.raises(ValueError, match="seed"):
        dropout(torch.zeros(1, 1), torch.tensor([1, 2]), 0.5)
