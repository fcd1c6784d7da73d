"""The frozen GEMM in FP8, with the quantization of X, against the compute dtype. Run: python -m pytest benchmarks/micro/bench_fp8.py"""  # noqa: E501

import pytest
from lorakernels.fp8 import FrozenFp8, supported
from lorakernels.member import Member
from torch import nn


@pytest.mark.parametrize("form", ["fp8", "compute dtype"])
def test_frozen_gemm(form, time, tensor, shapes):
    weight, x = tensor(shapes["wide"], shapes["hidden"]), tensor(shapes["tokens"], shapes["hidden"])
    if reason := supported(x.device):
        pytest.skip(reason)
    frozen = FrozenFp8([Member("w", nn.Parameter(weight, requires_grad=False))])
    time((lambda: frozen.forward(x)) if form == "fp8" else (lambda: x @ weight.t()))
