"""Seeded dropout: the same mask in forward and backward, the right share, and another mask for another seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, exhaustive_in_interpreter, poisoned, strided
from lorakernels.ops.dropout import (
    add_product_into,
    draw_seed,
    dropout,
    dropout_into,
    dropped,
    of_rows,
    product_into,
)
from lorakernels.ops.lora_grad import a_gradient
from lorakernels.ops.rms_norm import Norm, NormFactors
from lorakernels.runtime import TILES, tensor_cores


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 50), (1, 1), (0, 4)])
def test_forward_and_backward_share_a_mask(p, shape, device, dtype):
    x = torch.rand(shape, device=device).to(dtype) + 1
    seed = draw_seed(x.device)
    leaf = x.clone().requires_grad_()
    y = dropout(leaf, seed, p)
    mask = y != 0
    assert_close(y, torch.where(mask, x.float() / (1 - p if p < 1 else 1), 0), dtype)
    y.sum().backward()
    assert_close(leaf.grad, mask.float() / (1 - p if p < 1 else 1), dtype)
    assert torch.equal(dropout(x, seed, p), y), "the same seed must give the same mask"


def test_share_and_seeds(device):
    x = torch.ones(64, 200, device=device)
    masks = [dropout(x, torch.tensor([s], device=device), 0.3) != 0 for s in (1, 2)]
    for mask in masks:
        assert abs(mask.float().mean().item() - 0.7) < 0.02
    assert abs((masks[0] & masks[1]).float().mean().item() - 0.49) < 0.02, "two seeds must be independent"


def test_neighbours_are_independent(device):
    """Eight elements share one call of the generator; none of them may follow from another."""
    mask = (dropout(torch.ones(256, 64, device=device), torch.tensor([3], device=device), 0.5) != 0).float() - 0.5
    mask = mask.view(-1, 8) * 2
    correlation = mask.t() @ mask / len(mask)
    assert (correlation - torch.eye(8, device=device)).abs().max() < 0.1


@pytest.mark.parametrize("p", [exhaustive_in_interpreter(0.0), 0.1, exhaustive_in_interpreter(1.0)])
@pytest.mark.parametrize("m, n, rank", [(1, 1, 1), (37, 75, 5), exhaustive_in_interpreter(70, 200, 64), (9, 30, 65)])
def test_products(p, m, n, rank, device, dtype):
    """Every product sees the mask that `dropout_into` makes."""
    x, a = strided(torch.randn(m, n, device=device).to(dtype)), torch.randn(rank, n, device=device).to(dtype)
    seed, dropped = draw_seed(x.device), torch.empty(m, n, device=device)
    dropout_into(x.float(), seed, p, dropped)
    for tile in (*TILES, None):
        wide = poisoned(m, rank + 3, dtype=dtype, device=device)
        product_into(x, a, seed, p, wide[:, :rank], tile)
        assert_close(wide[:, :rank], dropped @ a.float().t(), dtype, 4)
        assert wide[:, rank:].isnan().all()
    ds, before = strided(torch.randn(m, rank, device=device).to(dtype)), torch.randn(m, n, device=device).to(dtype)
    added = torch.empty(m, n, device=device)
    dropout_into(ds.float() @ a.float(), seed, p, added)
    for fused in (True, False):
        dx = before.clone()
        add_product_into(ds, a, seed, p, dx, fused=fused)
        assert_close(dx, before.float() + added, dtype, 4)
    if tensor_cores(x, ds):
        rstd, weight = torch.rand(m, device=device) + 0.1, torch.randn(n, device=device).to(dtype)
        assert_close(a_gradient(ds, x, seed=seed, dropout=p), ds.float().t() @ dropped, torch.float32, 10)
        behind_norm = a_gradient(ds, x, NormFactors(rstd, weight, Norm(1e-6, 1.0)), "one_read_narrow", seed, p)
        wanted = ds.float().t() @ (dropped * rstd[:, None] * (weight.float() + 1))
        assert_close(behind_norm, wanted, dtype, 10)


def test_add_and_strides(device, dtype):
    x, seed = torch.randn(6, 30, device=device).to(dtype), torch.tensor([5], device=device)
    out = torch.ones(6, 30, device=device).to(dtype)
    dropout_into(strided(x), seed, 0.4, out, add=True)
    assert_close(out, 1 + dropout(x, seed, 0.4).float(), dtype)
    assert_close(dropout(x.t().contiguous().t(), seed, 0.4), dropout(x, seed, 0.4), dtype)


@pytest.mark.parametrize("first", [1, 5, 37])
def test_a_tile_of_rows_has_the_mask_of_the_whole(first, device):
    x, seed = torch.ones(41, 70, device=device), torch.tensor([2**31 - 7], device=device)
    whole = dropped(x, seed, 0.4)
    assert torch.equal(dropped(x[first:], of_rows(seed, first), 0.4), whole[first:])
    assert not torch.equal(dropped(x[first:], seed, 0.4), whole[first:])
    a = torch.randn(16, 70, device=device)
    s = torch.empty(41 - first, 16, device=device)
    product_into(x[first:], a, of_rows(seed, first), 0.4, s)
    assert_close(s, whole[first:] @ a.t(), torch.float32, 10)
    assert of_rows(None, first) is None and of_rows(seed, 0) is seed


def test_seed_follows_manual_seed(device):
    torch.manual_seed(3)
    a = draw_seed(torch.device(device))
    torch.manual_seed(3)
    assert a == draw_seed(torch.device(device))


@given(
    m=st.integers(0, 6),
    n=st.integers(1, 140),
    rank=st.integers(1, 70),
    extra=st.integers(0, 5),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31 - 2),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(m, n, rank, extra, p, dtype, seed):
    """Forward, gradient and both products, all with the one mask of this shape and seed."""
    torch.manual_seed(seed)
    x, grad, dx = (strided(torch.randn(m, n).to(dtype), extra) for _ in range(3))
    a, ds = strided(torch.randn(rank, n).to(dtype), extra), strided(torch.randn(m, rank).to(dtype), extra)
    seed = torch.tensor([seed])
    mask = (dropped(torch.ones(m, n), seed, p) != 0) / (1 - p)
    y = dropout(x.requires_grad_(), seed, p)
    assert_close(y, x.float() * mask, dtype)
    assert_close(torch.autograd.grad(y, x, grad)[0], grad.float() * mask, dtype)
    s, before = poisoned(m, rank, dtype=dtype, device="cpu"), dx.clone()
    product_into(x.detach(), a, seed, p, s)
    assert_close(s, x.float() * mask @ a.float().t(), dtype, 4)
    add_product_into(ds, a, seed, p, dx)
    assert_close(dx, before.float() + ds.float() @ a.float() * mask, dtype, 4)


def test_gradcheck():
    x, seed = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([7])
    assert 0 < (dropout(x, seed, 0.4) == 0).sum() < 15
    assert torch.autograd.gradcheck(lambda x: dropout(x, seed, 0.4), (x,))


def test_wrong_arguments():
    for call in (product_into, add_product_into):
        with pytest.raises(ValueError, match="do not fit"):
            call(torch.zeros(2, 3), torch.zeros(1, 4), torch.tensor([1]), 0.5, torch.zeros(2, 1))
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(torch.zeros(1, 1), torch.tensor([1]), 1.5)
    with pytest.raises(ValueError, match="seed"):
        dropout(torch.zeros(1, 1), torch.tensor([1, 2]), 0.5)
