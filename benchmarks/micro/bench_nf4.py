"""NF4 into a strided operand buffer, against bitsandbytes, which writes a contiguous weight. Run: python -m pytest
benchmarks/micro/bench_nf4.py
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from lorakernels.ops.nf4 import dequantize_into, dequantize_reference

BLOCK = 64  # elements that share a scale


@pytest.mark.parametrize("form", ["ours", "torch", "bitsandbytes"])
def test_dequantize(form, time, tensor, shapes):
    if form == "bitsandbytes" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    n, k = shapes["hidden"], shapes["hidden"]
    out = tensor(n, k + 64)[:, :k]
    moved = n * k // 2 + 4 * n * k // BLOCK + n * k * out.element_size()
    if form == "bitsandbytes":
        from bitsandbytes import functional

        quantized = functional.quantize_4bit(out.contiguous(), quant_type="nf4", blocksize=BLOCK)
        time(lambda: functional.dequantize_4bit(*quantized), moved=moved)
        return
    state = SimpleNamespace(
        shape=(n, k), code=torch.linspace(-1, 1, 16, device=out.device), blocksize=BLOCK, state2=None, offset=None,
        absmax=torch.rand(n * k // BLOCK, device=out.device),
    )  # fmt: skip
    packed = torch.randint(256, (n * k // 2, 1), dtype=torch.uint8, device=out.device)
    by_torch = form == "torch"
    time(
        lambda: out.copy_(dequantize_reference(packed, state)) if by_torch else dequantize_into(packed, state, out),
        moved=moved,
    )
