"""The frozen GEMM in FP8, with the quantization of X and W, against the compute dtype. Run: python -m pytest
benchmarks/micro/bench_fp8.py
"""

import pytest
from lorakernels.nodes.fp8 import FrozenFp8, supported
from lorakernels.nodes.member import Member
from torch import nn


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_frozen_gemm(form, time, tensor, shapes):
    weight, x = tensor(shapes["wide"], shapes["hidden"]), tensor(shapes["tokens"], shapes["hidden"])
    if form == "ours" and (reason := supported(x.device)):
        pytest.skip(reason)
    flops = 2 * x.shape[0] * weight.numel()
    if form == "torch":
        time(lambda: x @ weight.t(), flops=flops)
        return
    frozen = FrozenFp8([Member("w", nn.Parameter(weight, requires_grad=False))])
    time(lambda: frozen.forward(x), flops=flops)
