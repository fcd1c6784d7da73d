"""The activation between products in FP8: the bits of quantizing afterwards, and LoRA's parts as in float32."""

import pytest
import torch
from kernel_checks import assert_close, exhaustive_in_interpreter, poisoned, strided
from lorakernels.ops import glu, quantized_glu
from lorakernels.ops.concat_operand import LoraColumns, ScaledS
from lorakernels.ops.glu import GluBackward
from lorakernels.ops.quantize_rows import quantize_rows

ACTIVATIONS = ["silu", *(exhaustive_in_interpreter(act) for act in glu.ACTIVATIONS if act != "silu")]
SHAPES = [(37, 75, 5), (70, 130, 16), (1, 1, 1)]


def assert_quantized(got, x, factor=None):
    """got is x (M, K) in e4m3, bit for bit. Two kernels that a GPU's compiler made may contract a product and a sum
    differently, which moves few elements to a neighbouring number."""
    wanted = quantize_rows(x, factor)
    assert torch.equal(got.scale.isnan(), wanted.scale.isnan())
    (q, scale), (wanted_q, wanted_scale) = ((t.q.float(), t.scale.nan_to_num(-1)) for t in (got, wanted))
    if x.is_cuda:
        torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0)
        assert not x.numel() or (q == wanted_q).float().mean() > 0.99
    else:
        assert torch.equal(q, wanted_q) and torch.equal(scale, wanted_scale)


def with_odd_rows(x):
    """A row of zeros, and one that has an infinity, where there are so many."""
    x[2:3] = 0
    x[3:4, -1] = float("inf")
    return x


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("m, n, r", SHAPES)
def test_forward(act, m, n, r, device, dtype):
    p = 2 * r + 3
    frozen = with_odd_rows(torch.randn(m, 2 * n, device=device).to(dtype))
    s, sb = torch.randn(m, p, device=device).to(dtype), torch.randn(2 * n, p, device=device).to(dtype)
    s[:, 2 * r :], s[2:3] = 0, 0
    a, t = torch.randn(r + 2, n, device=device).to(dtype), poisoned(m, r + 2, dtype=dtype, device=device)
    scaled_s = ScaledS(torch.empty_like(t), torch.randn(r + 2, device=device))
    gate_up = strided(frozen)
    got = quantized_glu.forward(gate_up, s, sb, act, LoraColumns(a, None, scaled_s), t, 2 * r)
    fine = torch.ones(m, dtype=torch.bool, device=device)
    fine[3:4] = False
    assert_close(gate_up[fine], (frozen.float() + s.float() @ sb.float().t())[fine], dtype, 2)
    # Of the very gate and up that it has left behind, which a library's sum would round elsewhere.
    h = torch.empty(m, n, dtype=dtype, device=device)
    glu.forward_into(gate_up[:, :n], gate_up[:, n:], h, act)
    assert_quantized(got, h)
    assert_close(t[fine], h.float()[fine] @ a.float().t(), dtype, 3)
    assert_close(scaled_s.out[fine], h.float()[fine] @ a.float().t() * scaled_s.scales, dtype, 4)
    if m > 3:
        assert not got.q.float()[2:4].any() and got.scale[3].isnan() and got.scale[2].isfinite()


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("tile", glu.WHOLE_TILES)
@pytest.mark.parametrize("m, n, r", SHAPES)
def test_backward(act, tile, m, n, r, device, dtype):
    p = 2 * r + 3
    assert quantized_glu.backward_fits(r, [r, r], [n, n])
    both = strided(torch.randn(m, 2 * n, device=device).to(dtype))
    frozen = with_odd_rows(torch.randn(m, n, device=device).to(dtype))
    ds, a = strided(torch.randn(m, r, device=device).to(dtype)), torch.randn(r, n, device=device).to(dtype)
    ds[2:3] = 0
    sb, scaled_s = torch.zeros(2 * n, p, device=device), torch.zeros(m, p, device=device)
    for i in range(2):
        sb[i * n :][:n, i * r :][:, :r] = torch.randn(n, r, device=device)
        scaled_s[:, i * r :][:, :r] = torch.randn(m, r, device=device)
    sb, scaled_s = sb.to(dtype), scaled_s.to(dtype)
    scaled_s[3:4], ds[3:4] = 0, 0  # an infinity is to be seen in its own row of dX, and not looked for in sums of rows
    factor, grad = torch.rand(2 * n, device=device) + 0.1, frozen.clone()
    out = poisoned(m, p + 2, dtype=dtype, device=device)[:, :p]
    inputs = GluBackward(both[:, :n], both[:, n:], grad, act)
    got, da, db = quantized_glu.backward(inputs, ds, a, factor, sb, scaled_s, out, tile)
    fine = torch.ones(m, dtype=torch.bool, device=device)
    fine[3:4] = False
    assert_close(grad[fine], (frozen.float() + ds.float() @ a.float())[fine], dtype, 2)
    dy = torch.empty(m, 2 * n, dtype=dtype, device=device)
    glu.backward_into(inputs, dy[:, :n], dy[:, n:])
    assert_quantized(got, dy, factor)
    h = glu.reference(both[:, :n], both[:, n:], act)
    assert_close(da, ds.float().t() @ h, dtype, 2)
    assert_close(out[fine], dy.float()[fine] @ sb.float(), dtype, 3)
    for i in range(2):
        wanted = dy[fine].float()[:, i * n :][:, :n].t() @ scaled_s[fine].float()[:, i * r :][:, :r]
        assert_close(db[i * n :][:n][db[i * n :][:n].isfinite()], wanted[db[i * n :][:n].isfinite()], dtype, 3)
    if m > 3:
        assert not got.q.float()[2:4].any() and got.scale[3].isnan() and got.scale[2].isfinite()


def test_what_does_not_fit():
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="gate_up, S, sB and A do not fit"):
        quantized_glu.forward(x, torch.zeros(3, 2), torch.zeros(8, 3), "silu", LoraColumns(torch.zeros(2, 4)), x[:, :2])
    inputs = GluBackward(x[:, :4], x[:, 4:], x[:, :4], "silu")
    with pytest.raises(ValueError, match="grad, dS, A, factor, sB and S do not fit"):
        quantized_glu.backward(
            inputs, torch.zeros(3, 2), torch.zeros(2, 4), torch.zeros(7), torch.zeros(8, 4), torch.zeros(3, 4), x[:, :4]
        )
    assert not quantized_glu.backward_fits(2, [2, 3], [4, 4]) and not quantized_glu.backward_fits(2, [2], [8])
