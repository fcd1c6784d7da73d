"""NF4 into a strided operand buffer (and by bitsandbytes, where it is). Run: python -m pytest benchmarks/micro/bench_nf4.py"""  # noqa: E501

from types import SimpleNamespace

import torch
from lorakernels.nf4 import dequantize_into


def test_dequantize(time, tensor, shapes):
    n, k = shapes["hidden"], shapes["hidden"]
    out = tensor(n, k + 64)[:, :k]
    state = SimpleNamespace(
        shape=(n, k), code=torch.linspace(-1, 1, 16, device=out.device), blocksize=64, state2=None, offset=None,
        absmax=torch.rand(n * k // 64, device=out.device),
    )  # fmt: skip
    packed = torch.randint(256, (n * k // 2, 1), dtype=torch.uint8, device=out.device)
    time(lambda: dequantize_into(packed, state, out), n * k // 2 + n * k * out.element_size())
