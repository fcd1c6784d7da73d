"""SwiGLU against float32: forward, gradients, strides, edges. Triton itself: test_interpreter.py and -m gpu."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, exhaustive_in_interpreter, gradients, poisoned, strided
from lorakernels.ops import glu
from lorakernels.ops.concat_operand import LoraColumns, ScaledS
from lorakernels.ops.glu import GluBackward
from lorakernels.ops.swiglu import swiglu, swiglu_reference
from lorakernels.runtime import TILES, tensor_cores


@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 129), (1, 1), (1, 1100), (0, 8)])
def test_swiglu(shape, device, dtype):
    gate, up = (3 * torch.randn(shape, device=device).to(dtype) for _ in range(2))
    out, grads = gradients(swiglu, (gate, up))
    wanted, wanted_grads = gradients(swiglu_reference, (gate, up))
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    for got, want in zip(grads, wanted_grads, strict=True):
        assert_close(got, want, dtype, 2)


def test_strided_inputs_are_read_right_and_left_alone(device, dtype):
    gate, up = (strided(torch.randn(7, 33, device=device).to(dtype)) for _ in range(2))
    before = gate.clone(), up.clone()
    assert_close(swiglu(gate, up), swiglu_reference(*before), dtype)
    assert_close(swiglu(gate.t(), up.t()), swiglu_reference(*before).t(), dtype)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


# Of kernels whose activation is the one that the forward's and the plain backward's cases have tried.
ONE_ACTIVATION = ["silu", *(exhaustive_in_interpreter(act) for act in glu.ACTIVATIONS if act != "silu")]


@pytest.mark.parametrize("act", glu.ACTIVATIONS)
@pytest.mark.parametrize("p", [1, exhaustive_in_interpreter(5), 64])
@pytest.mark.parametrize("tile", TILES)
def test_lora_columns(act, p, tile, device, dtype):
    m, n = 37, 75
    gate, up = (torch.randn(m, n, device=device).to(dtype) for _ in range(2))
    a = torch.randn(p, n, device=device).to(dtype)
    buffer = poisoned(m, n + p, dtype=dtype, device=device)
    scaled_s = ScaledS(poisoned(m, p, dtype=dtype, device=device), torch.randn(p, device=device))
    glu.forward_lora_into(gate, up, buffer, LoraColumns(a, None, scaled_s), act, tile)
    h = glu.reference(gate, up, act)
    assert_close(buffer[:, :n], h, dtype)
    assert_close(buffer[:, n:], buffer[:, :n].float() @ a.float().t(), dtype, 2)
    assert_close(scaled_s.out, buffer[:, :n].float() @ a.float().t() * scaled_s.scales, dtype, 3)
    if p == 64:  # rows of A that are zero anyway, and need not be read
        a[3:], buffer[:] = 0, float("nan")
        glu.forward_lora_into(gate, up, buffer, LoraColumns(a, 3), act, tile)
        assert_close(buffer[:, n:], buffer[:, :n].float() @ a.float().t(), dtype, 2)


@pytest.mark.parametrize("act", glu.ACTIVATIONS)
def test_backward_leaves_h_in_the_gradient(act, device, dtype):
    m, n = 9, 70
    gate, up, grad = (torch.randn(m, n, device=device).to(dtype) for _ in range(3))
    leaves = [t.float().clone().requires_grad_() for t in (gate, up)]
    wanted = torch.autograd.grad(glu.reference(*leaves, act), leaves, grad.float())
    both = poisoned(m, 2 * n + 4, dtype=dtype, device=device)
    glu.backward_into(GluBackward(gate, up, grad, act), both[:, :n], both[:, n : 2 * n], h_into_grad=True)
    assert_close(both[:, :n], wanted[0], dtype, 2)
    assert_close(both[:, n : 2 * n], wanted[1], dtype, 2)
    assert_close(grad, glu.reference(gate, up, act), dtype)
    assert both[:, 2 * n :].isnan().all()


@pytest.mark.parametrize("act", ONE_ACTIVATION)
@pytest.mark.parametrize("tile", glu.A_TILES)
@pytest.mark.parametrize("m, n, rank, in_place", [(1, 1, 1, False), (300, 130, 16, True), (9, 30, 65, True)])
def test_backward_with_a(act, tile, m, n, rank, in_place, device, dtype):
    wide, grad = torch.randn(m, 2 * n + 4, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    gate, up, ds = wide[:, :n], wide[:, n : 2 * n], strided(torch.randn(m, rank, device=device).to(dtype))
    wanted, h = poisoned(m, 2 * n, dtype=dtype, device=device), grad.clone()
    glu.backward_into(GluBackward(gate.clone(), up.clone(), h, act), wanted[:, :n], wanted[:, n:], h_into_grad=True)
    out = wide if in_place else poisoned(m, 2 * n, dtype=dtype, device=device)
    before = grad.clone()
    da = glu.backward_a_into(GluBackward(gate, up, grad, act), out[:, :n], out[:, n : 2 * n], ds, tile)
    assert_close(out[:, : 2 * n], wanted, dtype)
    assert_close(da, ds.float().t() @ h.float(), torch.float32, 10)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("act", ONE_ACTIVATION)
@pytest.mark.parametrize("tile", glu.WHOLE_TILES)
@pytest.mark.parametrize(
    "m, n, rank, p, in_place",
    [(1, 1, 1, 2, False), exhaustive_in_interpreter(300, 130, 16, 48, True), (70, 150, 5, 16, True)],
)
def test_backward_with_everything_of_lora(act, tile, m, n, rank, p, in_place, device, dtype):
    """d gate, d up, dA of down, dS and dB of gate and up from one pass."""
    wide, grad = torch.randn(m, 2 * n + p, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    gate, up, ds = wide[:, :n], wide[:, n : 2 * n], strided(torch.randn(m, rank, device=device).to(dtype))
    if not glu.whole_fits(ds, [rank, rank], [n, n]):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")
    sb, s = torch.zeros(2 * n, p, device=device, dtype=dtype), strided(torch.randn(m, p, device=device).to(dtype))
    sb[:n, :rank] = torch.randn(n, rank, device=device)
    sb[n:, rank : 2 * rank] = torch.randn(n, rank, device=device)
    wanted, h = poisoned(m, 2 * n, dtype=dtype, device=device), grad.clone()
    glu.backward_into(GluBackward(gate.clone(), up.clone(), h, act), wanted[:, :n], wanted[:, n:], h_into_grad=True)
    into, before = wide if in_place else poisoned(m, 2 * n + p, dtype=dtype, device=device), grad.clone()
    da, db = glu.backward_whole_into(GluBackward(gate, up, grad, act), into, ds, sb, s, tile)
    assert_close(into[:, : 2 * n], wanted, dtype)
    assert_close(da, ds.float().t() @ h.float(), torch.float32, 10)
    dy = into[:, : 2 * n].float()
    assert_close(into[:, 2 * n :], dy @ sb.float(), dtype, 4)
    both = torch.cat((dy[:, :n].t() @ s[:, :rank].float(), dy[:, n:].t() @ s[:, rank : 2 * rank].float()))
    assert_close(db, both, torch.float32, 10)
    assert torch.equal(grad, before)


def test_whole_is_for_two_members_alike(device):
    ds = torch.randn(4, 3, device=device, dtype=torch.float16)
    possible = tensor_cores(ds)
    assert glu.whole_fits(ds, [3, 3], [8, 8]) == possible
    for ranks, widths in (([3], [16]), ([3, 4], [8, 8]), ([2, 2], [8, 8]), ([3, 3], [8, 9]), ([3, 3, 3], [8, 8, 8])):
        assert not glu.whole_fits(ds, ranks, widths)
    with pytest.raises(ValueError, match="do not fit"):
        x = torch.randn(4, 8)
        glu.backward_whole_into(GluBackward(x, x, x, "silu"), x, ds, torch.zeros(16, 6), torch.zeros(4, 6))


@pytest.mark.parametrize("act", glu.ACTIVATIONS)
def test_backward_over_its_own_inputs(act, device, dtype):
    m, n = 9, 70
    wide, grad = torch.randn(m, 2 * n + 4, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    gate, up = wide[:, :n], wide[:, n : 2 * n]
    apart = poisoned(m, 2 * n, dtype=dtype, device=device)
    h = grad.clone()
    glu.backward_into(GluBackward(gate.clone(), up.clone(), h, act), apart[:, :n], apart[:, n:], h_into_grad=True)
    glu.backward_into(GluBackward(gate, up, grad, act), gate, up, h_into_grad=True)
    assert_close(wide[:, : 2 * n], apart, dtype)
    assert_close(grad, h, dtype)


def test_extreme_values_stay_finite(device, dtype):
    gate = torch.tensor([[-1e4, -90.0, -1e-6, 0.0, 90.0, 3e2]], device=device).to(dtype)
    for act in glu.ACTIVATIONS:
        leaves = [gate.clone().requires_grad_(), torch.ones_like(gate).requires_grad_()]
        out = glu.gated(*leaves, act)
        out.sum().backward()
        assert all(t.isfinite().all() for t in (out, leaves[0].grad, leaves[1].grad))


@given(m=st.integers(0, 5), n=st.integers(1, 70), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_any_shape(m, n, seed):
    torch.manual_seed(seed)
    gate, up = torch.randn(m, n), torch.randn(m, n)
    assert_close(swiglu(gate, up), swiglu_reference(gate, up), torch.float32)


def test_gradcheck():
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for act in glu.ACTIVATIONS:
        assert torch.autograd.gradcheck(lambda a, b, act=act: glu.gated(a, b, act), (gate, up))


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="dtype"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float16))
