"""The chunked head and loss against torch's cross-entropy over all logits in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, poisoned
from lorakernels.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    loss_and_gradient_,
)
from lorakernels.runtime import use_triton


def data(m, v, h, device, dtype, ignored=0.3):
    x, weight = torch.randn(m, h, device=device).to(dtype), torch.randn(v, h, device=device).to(dtype) / h**0.5
    target = torch.randint(v, (m,), device=device)
    target[torch.rand(m, device=device) < ignored] = -100
    if m:
        target[0] = v - 1
    return x, weight, target


@pytest.mark.parametrize("m, v, h, chunk", [(7, 33, 16, None), (9, 50, 8, 4), (1, 5, 3, 1), (6, 4100, 8, None)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_loss_and_gradients(m, v, h, chunk, softcap, device, dtype):
    x, weight, target = data(m, v, h, device, dtype)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = linear_cross_entropy(*leaves, target, softcap=softcap, chunk=chunk)
    wide = [t.float().clone().requires_grad_() for t in (x, weight)]
    wanted = linear_cross_entropy_reference(*wide, target, softcap=softcap)
    assert loss.dtype == torch.float32
    assert_close(loss, wanted, dtype)
    got = torch.autograd.grad(loss * 3, leaves)
    for a, b in zip(got, torch.autograd.grad(wanted * 3, wide), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, dtype, 4)


def test_bias_num_items_and_leading_shape(device):
    x, weight, target = data(6, 11, 5, device, torch.float32)
    bias = torch.randn(11, device=device)
    for n in (4, torch.tensor(4, device=device)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        loss = linear_cross_entropy(leaves[0].view(2, 3, 5), leaves[1], target.view(2, 3), leaves[2], num_items=n)
        wide = [t.clone().requires_grad_() for t in (x, weight, bias)]
        wanted = linear_cross_entropy_reference(wide[0], wide[1], target, wide[2], num_items=n)
        assert_close(loss, wanted, torch.float32)
        pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, wide), strict=True)
        assert all((a - b).abs().max() < 1e-5 for a, b in pairs)


def test_frozen_head_gets_no_gradient_and_nothing_is_overwritten(device):
    x, weight, target = data(5, 9, 4, device, torch.float32)
    before = x.clone(), weight.clone(), target.clone()
    leaf = x.clone().requires_grad_()
    loss = linear_cross_entropy(leaf, weight, target)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, leaf)[0]), "a second backward must give the same"
    assert all(torch.equal(a, b) for a, b in zip((x, weight, target), before, strict=True))


def test_all_ignored_and_empty(device):
    x, weight, _ = data(3, 9, 4, device, torch.float32)
    x.requires_grad_()
    target = torch.full((3,), -100, device=device)
    assert linear_cross_entropy(x, weight, target).isnan(), "as torch: 0 / 0"
    loss = linear_cross_entropy(x, weight, target, num_items=2)
    assert loss == 0 and torch.autograd.grad(loss, x)[0].abs().max() == 0
    assert linear_cross_entropy(x[:0], weight, target[:0], num_items=1) == 0


def test_a_target_that_is_no_token(device):
    """torch stops there, on a GPU too; the kernel's loss and gradient are NaN, in these rows alone."""
    z = torch.randn(3, 9, device=device)
    target = torch.tensor([9, 3, -7], device=device)
    if not use_triton(z):
        with pytest.raises((RuntimeError, IndexError), match="index"):
            loss_and_gradient_(z, target)
        return
    loss = loss_and_gradient_(z, target)
    assert loss.isnan().tolist() == [True, False, True]
    assert z.isnan().all(1).tolist() == [True, False, True]


def test_large_logits_and_infinite_ignored_rows(device):
    z = torch.tensor([[1e4, -1e4, 0.0], [float("inf"), 0.0, 0.0], [3e4, 3e4, -3e4]], device=device)
    target = torch.tensor([0, -100, 1], device=device)
    loss = loss_and_gradient_(z, target)
    assert_close(loss, torch.tensor([0.0, 0.0, 0.6931472]), torch.float32)
    assert z.isfinite().all() and z[1].abs().max() == 0


def test_rows_of_a_wide_buffer(device, dtype):
    buffer = poisoned(4, 40, dtype=dtype, device=device)
    buffer[:, :33] = torch.randn(4, 33, device=device)
    wide = buffer[:, :33].float().clone().requires_grad_()
    target = torch.tensor([0, 32, -100, 5], device=device)
    wanted = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    loss = loss_and_gradient_(buffer[:, :33], target)
    assert_close(loss, wanted, dtype)
    assert_close(buffer[:, :33], torch.autograd.grad(wanted.sum(), wide)[0], dtype)
    assert buffer[:, 33:].isnan().all()


def test_float16_gradients_do_not_underflow(device):
    """(softmax - onehot) / n of many rows is below float16; scaled by a GradScaler it must still be right."""
    x, weight, target = data(4, 3000, 16, device, torch.float16, ignored=0)
    leaf = x.clone().requires_grad_()
    got = torch.autograd.grad(linear_cross_entropy(leaf, weight, target, num_items=100000) * 65536, leaf)[0]
    wide = x.float().clone().requires_grad_()
    loss = linear_cross_entropy_reference(wide, weight.float(), target, num_items=100000) * 65536
    assert_close(got, torch.autograd.grad(loss, wide)[0], torch.float16, 2)


def test_no_synchronization():
    """Nothing on the way may ask the device for a value: a meta tensor has none to give."""
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    loss = linear_cross_entropy(x, torch.empty(9, 8, device="meta"), torch.empty(4, dtype=torch.int64, device="meta"))
    assert torch.autograd.grad(loss, x)[0].shape == (4, 8)


@given(m=st.integers(1, 9), v=st.integers(2, 40), chunk=st.integers(1, 10), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_any_shape(m, v, chunk, seed):
    torch.manual_seed(seed)
    x, weight, target = data(m, v, 4, "cpu", torch.float32, 0)
    assert_close(
        linear_cross_entropy(x, weight, target, chunk=chunk),
        linear_cross_entropy_reference(x, weight, target),
        torch.float32,
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    x, weight, target = data(4, 6, 3, "cpu", torch.float64)
    leaves = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, target, softcap=softcap, chunk=3), leaves)


def test_wrong_shapes():
    x, weight, target = data(4, 6, 3, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(3, 6\)"):
        linear_cross_entropy(x, weight.t(), target)
    with pytest.raises(ValueError, match="target"):
        linear_cross_entropy(x, weight, target[:3])
