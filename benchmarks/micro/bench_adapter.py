"""A and scale · B into the operand buffer, against torch's copy and product. Run: python -m pytest
benchmarks/micro/bench_adapter.py
"""

import pytest
import torch
from lorakernels.ops.adapter import Loader, load_adapter


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_load_adapter(form, time, tensor, shapes):
    n, k, r = shapes["wide"], shapes["hidden"], shapes["rank"]
    buffer, a, b = tensor(n + r, k + r), tensor(r, k).float(), tensor(n, r).float()
    out_a, out_b = buffer[n:, :k], buffer[:n, k:]

    def apart():
        out_a.copy_(a)
        torch.mul(b, 2.0, out=out_b)

    time(
        apart if form == "torch" else lambda: load_adapter(a, b, 2.0, out_a, out_b),
        moved=r * (n + k) * (a.element_size() + buffer.element_size()),
    )


def test_load_layer(time, tensor, shapes):
    """All adapters of a layer in one launch."""
    h, wide, r = shapes["hidden"], shapes["wide"], shapes["rank"]
    linears = [(h, h), (h // 4, h), (h // 4, h), (h, h), (wide, h), (wide, h), (h, wide)]
    items = []
    for n, k in linears:
        buffer = tensor(n + r, k + r)
        items.append((tensor(r, k), tensor(n, r), 2.0, buffer[n:, :k], buffer[:n, k:]))
    loader = Loader()
    time(lambda: loader.load(items), moved=sum(2 * (a.nbytes + b.nbytes) for a, b, *_ in items))
