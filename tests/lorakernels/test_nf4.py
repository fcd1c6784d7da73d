"""NF4 dequantization, plain and double quantization, into strided buffers, against the formula and bitsandbytes."""

import importlib.util

import lorakernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, exhaustive_in_interpreter, poisoned, quantized
from lorakernels.ops.nf4 import dequantize, dequantize_into, dequantize_reference, is_repacked
from tiny_models import batch, build, step, worst


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


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("nested", [False, True])
def test_repacked_for_a_cpu(nested):
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(torch.randn(96, 128), quant_type="nf4", compress_statistics=nested)
    wanted = functional.dequantize_4bit(packed, state)
    packed, state = functional._convert_weight_packed_for_cpu(packed, state)
    torch.testing.assert_close(dequantize(packed, state, torch.float32), wanted.float(), rtol=2**-8, atol=0)


def nf4_model():
    """A tiny model of NF4 linears in bfloat16 that compute in float32, with LoRA."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    model = build("llama", sizes={"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 1})
    for module in list(model.modules()):
        if hasattr(module, "base_layer"):
            old = module.base_layer
            new = bitsandbytes.nn.Linear4bit(
                old.in_features, old.out_features, False, quant_type="nf4", compute_dtype=torch.float32
            )
            new.weight = bitsandbytes.nn.Params4bit(old.weight.detach(), False, quant_type="nf4", module=new)
            module.base_layer = new.to("cpu")
    return model


def repack(model):
    """What bitsandbytes does in a forward of evaluation on a CPU with AVX512-BF16."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    for module in model.modules():
        if hasattr(module, "base_layer") and not is_repacked(module.base_layer.weight.quant_state):
            weight = module.base_layer.weight
            weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)


@pytest.mark.parametrize(
    "when",
    [exhaustive_in_interpreter(when) for when in ("before", "after", "between forward and backward")],
)
def test_weights_that_are_repacked_for_a_cpu(when):
    """Repacking rounds the scales to bfloat16, so that is how far the results may move."""
    model = nf4_model()
    data = batch()
    wanted, gradients = step(model, data)
    if when == "before":
        repack(model)
    lorakernels.apply(model)
    assert step(model, data)[0].item() == pytest.approx(wanted.item(), rel=3e-3)
    if when == "after":
        repack(model)
    model.zero_grad()
    loss = model(**data).loss
    if when == "between forward and backward":
        repack(model)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=3e-3)
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert worst(got, gradients) < 0.03
