"""NF4 dequantization, plain and double quantization, into strided buffers, against the formula and bitsandbytes."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, poisoned, quantized
from lorakernels.nf4 import dequantize, dequantize_into, dequantize_reference


@pytest.mark.parametrize("n, k, blocksize", [(4, 64, 64), (3, 21, 8), (1, 1, 64), (5, 130, 16)])
@pytest.mark.parametrize("nested", [False, True])
def test_dequantize(n, k, blocksize, nested, device, dtype):
    packed, state = quantized(n, k, blocksize, nested, device)
    wide = poisoned(n, k + 5, dtype=dtype, device=device)
    dequantize_into(packed, state, wide[:, :k])
    assert_close(wide[:, :k], dequantize_reference(packed, state), dtype)
    assert wide[:, k:].isnan().all()
    assert_close(dequantize(packed, state, dtype), dequantize_reference(packed, state), dtype)


@given(
    n=st.integers(1, 6),
    k=st.integers(1, 140),
    blocksize=st.sampled_from([2, 8, 64]),
    nested=st.booleans(),
    extra=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(n, k, blocksize, nested, extra, dtype, seed):
    torch.manual_seed(seed)
    packed, state = quantized(n, k, blocksize, nested, "cpu")
    wide = poisoned(n, k + extra, dtype=dtype, device="cpu")
    dequantize_into(packed, state, wide[:, :k])
    assert_close(wide[:, :k], dequantize_reference(packed, state), dtype)
    assert wide[:, k:].isnan().all()


def test_by_hand():
    """Two elements of which everything is known: high nibble first, block scale, double quantization."""
    packed, state = quantized(1, 2, 64, True, "cpu")
    packed[0] = 0x3F
    scale = state.state2.code[state.absmax.long()] * state.state2.absmax + 0.25
    wanted = torch.stack((state.code[3], state.code[15]))[None] * scale
    assert_close(dequantize(packed, state, torch.float32), wanted, torch.float32)


def test_wrong_shapes():
    packed, state = quantized(4, 8, 8, False, "cpu")
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        dequantize_into(packed, state, torch.zeros(4, 9))
    with pytest.raises(ValueError, match="4 bits"):
        dequantize_into(packed[:-1], state, torch.zeros(4, 8))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("nested", [False, True])
def test_same_as_bitsandbytes(nested, device):
    from bitsandbytes import functional

    weight = torch.randn(96, 128, device=device).half()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    wanted = functional.dequantize_4bit(packed, state)
    assert_close(dequantize(packed, state, torch.float16), wanted, torch.float16, 2)
