"""The frozen GEMM in FP8, with the quantization of both operands, against the compute dtype. Run: python -m pytest
benchmarks/micro/bench_fp8.py
"""

import pytest
from lorakernels.nodes.fp8 import FrozenFp8, supported


@pytest.mark.parametrize("form", ["ours", "torch"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_frozen_gemm(form, direction, time, tensor, shapes):
    wide, hidden = shapes["wide"], shapes["hidden"]
    weight, x = tensor(wide, hidden), tensor(shapes["tokens"], hidden if direction == "forward" else wide)
    if form == "ours" and (reason := supported(x.device)):
        pytest.skip(reason)
    frozen = FrozenFp8()
    forms = {
        ("ours", "forward"): lambda: frozen.forward(x, weight),
        ("ours", "backward"): lambda: frozen.backward(x, weight),
        ("torch", "forward"): lambda: x @ weight.t(),
        ("torch", "backward"): lambda: x @ weight,
    }
    time(forms[form, direction], flops=2 * x.shape[0] * weight.numel())
