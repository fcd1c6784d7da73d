"""RMSNorm with residual, weight gradient, Gemma's offset, and the LoRA columns, against float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, exhaustive_in_interpreter, poisoned, strided
from lorakernels.ops.concat_operand import LoraColumns, ScaledS
from lorakernels.ops.quantize_rows import FP8, Quantized, quantize_rows
from lorakernels.ops.rms_norm import Norm, NormInput, forward_into, forward_lora_into, rms_norm, rms_norm_reference
from lorakernels.runtime import TILES


def run(function, x, weight, residual, offset, dy, dh):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) + (() if residual is None else (residual,))]
    out = function(leaves[0], leaves[1], 1e-5, offset, leaves[2] if residual is not None else None)
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(outs, leaves, [g.to(o.dtype) for g, o in zip((dy, dh), outs, strict=False)])
    return outs, grads


@pytest.mark.parametrize(
    "shape", [(5, 48), (2, 3, 65), exhaustive_in_interpreter((1, 3)), exhaustive_in_interpreter((40, 1030))]
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(shape, offset, with_residual, device, dtype):
    x, residual, dy, dh = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1], device=device).to(dtype)
    residual = residual if with_residual else None
    outs, grads = run(rms_norm, x, weight, residual, offset, dy, dh)
    wide = [None if t is None else t.float() for t in (x, weight, residual)]
    wanted, wanted_grads = run(rms_norm_reference, wide[0], wide[1], wide[2], offset, dy, dh)
    for got, want in zip(outs + grads, wanted + wanted_grads, strict=True):
        assert got.dtype == dtype
        assert_close(got, want, dtype, 2)


@pytest.mark.parametrize("p", [1, exhaustive_in_interpreter(16), 70])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_lora_columns(p, with_residual, tile, device, dtype):
    m, n = 35, 90
    x, residual = (strided(torch.randn(m, n, device=device).to(dtype)) for _ in range(2))
    residual = residual if with_residual else None
    weight, a = torch.randn(n, device=device).to(dtype), torch.randn(p, n, device=device).to(dtype)
    buffer = poisoned(m, n + p, dtype=dtype, device=device)
    h = poisoned(m, n, dtype=dtype, device=device)
    h_copy = strided(poisoned(m, n, dtype=dtype, device=device)) if with_residual else None
    scaled_s = ScaledS(poisoned(m, p, dtype=dtype, device=device), torch.randn(p, device=device))
    inputs = NormInput(x, weight, Norm(1e-5), residual, h if with_residual else None, h_copy)
    rstd = forward_lora_into(inputs, buffer, LoraColumns(a, None, scaled_s), tile)
    wanted = rms_norm_reference(x, weight, 1e-5, 0.0, residual)
    wanted_y, wanted_h = wanted if with_residual else (wanted, x)
    assert_close(buffer[:, :n], wanted_y, dtype, 2)
    assert_close(buffer[:, n:], buffer[:, :n].float() @ a.float().t(), dtype, 2)
    assert_close(scaled_s.out, buffer[:, :n].float() @ a.float().t() * scaled_s.scales, dtype, 3)
    before = buffer.clone()
    forward_lora_into(inputs, buffer, LoraColumns(a), tile)
    assert torch.equal(buffer, before), "the same without sS"
    assert_close(rstd, torch.rsqrt(wanted_h.float().pow(2).mean(-1) + 1e-5), dtype)
    if with_residual:
        assert_close(h, wanted_h, dtype)
        assert torch.equal(h_copy, h)


def test_the_sum_is_written_twice_where_asked_for(device, dtype):
    x, residual = (torch.randn(5, 48, device=device).to(dtype) for _ in range(2))
    y, h, h_copy = (poisoned(5, 48, dtype=dtype, device=device) for _ in range(3))
    weight = torch.ones(48, device=device, dtype=dtype)
    forward_into(NormInput(x, weight, Norm(1e-5), residual, h, h_copy), y)
    assert_close(h, x.float() + residual.float(), dtype)
    assert torch.equal(h_copy, h) and h_copy.data_ptr() != h.data_ptr()


def test_inputs_are_left_alone(device, dtype):
    x, weight = torch.randn(6, 24, device=device).to(dtype), torch.randn(24, device=device).to(dtype)
    before = x.clone(), weight.clone()
    leaf = x.requires_grad_()
    rms_norm(leaf, weight).sum().backward()
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])


def test_strides(device, dtype):
    x = torch.randn(24, 6, device=device).to(dtype).t()
    weight = torch.randn(24, device=device).to(dtype)
    assert_close(rms_norm(x, weight), rms_norm_reference(x, weight), dtype)


def test_empty_and_mixed_dtypes(device):
    assert rms_norm(torch.zeros(0, 4, device=device), torch.ones(4, device=device)).shape == (0, 4)
    x, weight = torch.randn(3, 8, device=device).half(), torch.randn(8, device=device)
    residual = torch.randn(3, 8, device=device)
    y, h = rms_norm(x, weight, residual=residual)
    assert y.dtype == torch.float16 and h.dtype == torch.float32
    wanted = rms_norm_reference(x, weight, residual=residual)
    assert_close(y, wanted[0], torch.float16)
    assert_close(h, wanted[1], torch.float32)


@given(m=st.integers(1, 5), n=st.integers(1, 70), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_any_shape(m, n, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(m, n), torch.randn(n)
    assert_close(rms_norm(x, weight), rms_norm_reference(x, weight), torch.float32, 2)


def test_gradcheck():
    x, w, r = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (3, 5)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, 1.0), (x, w))
    assert torch.autograd.gradcheck(lambda x, w, r: rms_norm(x, w, 1e-5, 0.0, r), (x, w, r))


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4,\)"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="residual"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3), residual=torch.zeros(3, 3))


@pytest.mark.parametrize("shape", [(5, 32), (3, 130), (1, 1), (0, 16), (2, 4096)], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_y_in_e4m3_has_the_bits_of_quantizing_y_afterwards(shape, with_residual, device, dtype):
    m, k = shape
    x, weight = strided(torch.randn(shape, device=device).to(dtype)), torch.randn(k, device=device).to(dtype)
    x[:1], x[1:2, 0] = 0, float("inf")  # zeros stay zeros; what is not finite is NaN in its own row alone
    residual = torch.randn(shape, device=device).to(dtype) if with_residual else None
    h = torch.empty(shape, dtype=dtype, device=device) if with_residual else None
    inputs = NormInput(x, weight, Norm(1e-6), residual, h)
    y, alone = (strided(poisoned(*shape, dtype=dtype, device=device)) for _ in range(2))
    got = Quantized(poisoned(m, k + 2, dtype=torch.float32, device=device).to(FP8)[:, :k], torch.empty(m, 1).to(device))
    rstd = forward_into(inputs, y, got)
    assert torch.equal(rstd, forward_into(inputs, alone)) or not rstd.isfinite().all()
    wanted = quantize_rows(y)
    assert torch.equal(y.nan_to_num(1), alone.nan_to_num(1)), "the norm itself has changed"
    assert torch.equal(got.q.float(), wanted.q.float()) and torch.equal(
        got.scale.nan_to_num(1), wanted.scale.nan_to_num(1)
    )
    with pytest.raises(ValueError, match="quantized does not fit"):
        forward_into(inputs, y, Quantized(got.q[:, 1:], got.scale))
