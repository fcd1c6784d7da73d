"""A and scale · B into the operand buffer. Run: python -m pytest benchmarks/micro/bench_adapter.py"""

import torch
from lorakernels.adapter import load_adapter


def test_load_adapter(time, tensor, shapes):
    n, k, r = shapes["wide"], shapes["hidden"], shapes["rank"]
    buffer, a, b = tensor(n + r, k + r), tensor(r, k).float(), tensor(n, r).float()
    with torch.no_grad():
        time(lambda: load_adapter(a, b, 2.0, buffer[n:, :k], buffer[:n, k:]), 6 * r * (n + k))
