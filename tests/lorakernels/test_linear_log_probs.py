"""The head's log-probabilities, row by row, against torch's over all logits in float32."""

import pytest
import torch
from kernel_checks import assert_close
from lorakernels.ops.linear_log_probs import linear_log_probs, linear_log_probs_reference
from test_linear_cross_entropy import data


@pytest.mark.parametrize("m, v, h, chunk", [(7, 33, 16, None), (9, 50, 8, 4), (1, 5, 3, 1), (6, 4100, 8, None)])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_log_probs_statistics_and_gradients(m, v, h, chunk, softcap, bias, device, dtype):
    """Each row's loss is another function of its log-probability."""
    x, weight, target = data(m, v, h, device, dtype)
    b = torch.randn(v, device=device).to(dtype) if bias else None
    target[-1] = (x[-1].float() @ weight.float().t() + (0 if b is None else b.float())).argmax()
    leaf, wide = x.clone().requires_grad_(), x.float().clone().requires_grad_()
    got = linear_log_probs(leaf, weight, target, b, softcap=softcap, chunk=chunk)
    wanted = linear_log_probs_reference(wide, weight, target, b, softcap=softcap)
    assert_close(got.log_probs, wanted.log_probs, dtype, 2)
    assert_close(got.entropy, wanted.entropy, dtype, 2)
    assert got.is_top1.dtype == torch.bool and got.is_top1[-1]
    if dtype == torch.float32:
        assert torch.equal(got.is_top1, wanted.is_top1)
    assert not got.entropy.requires_grad
    rows = torch.randn(m, device=device)
    grads = [torch.autograd.grad((o.log_probs * rows).sum(), i)[0] for o, i in ((got, leaf), (wanted, wide))]
    assert grads[0].dtype == dtype
    assert_close(*grads, dtype, 4)
    with torch.no_grad():
        again = linear_log_probs(x, weight, target, b, softcap=softcap)
    assert_close(again.entropy, got.entropy, dtype)


def test_ties_ignored_rows_and_infinities(device):
    """The first of equal logits is the top one, as argmax has it; a logit of -inf is no token."""
    weight = torch.tensor([[0.0], [1.0], [1.0], [-float("inf")]], device=device)
    x = torch.ones(4, 1, device=device)
    target = torch.tensor([1, 2, 0, -100], device=device)
    got = linear_log_probs(x, weight, target)
    assert got.is_top1.tolist() == [True, False, False, False]
    p = torch.tensor([0.0, 1.0, 1.0], device=device).softmax(-1)
    assert_close(got.entropy[:3], (-(p * p.log()).sum()).expand(3), torch.float32)
    assert got.log_probs[3] == got.entropy[3] == 0


def test_what_does_not_fit():
    x, weight, target = data(3, 7, 4, "cpu", torch.float32)
    with pytest.raises(ValueError, match="head that learns"):
        linear_log_probs(x, weight.requires_grad_(), target)
    with pytest.raises(ValueError, match="one entry a row"):
        linear_log_probs(x, weight.detach(), target[:2])
