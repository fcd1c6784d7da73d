"""[x | x · Aᵀ] by tile, against a copy and a GEMM; S by itself. Run: pytest benchmarks/micro/bench_pack.py"""

import pytest
from lorakernels.pack import pack_into, s_into
from lorakernels.runtime import TILES


@pytest.mark.parametrize("tile", [*TILES, None])
@pytest.mark.parametrize("p", [16, 64])
def test_pack(tile, p, time, tensor, shapes):
    m, k = shapes["tokens"], shapes["hidden"]
    x, a, out = tensor(m, k), tensor(p, k), tensor(m, k + p)
    time(lambda: pack_into(x, a, out, tile), 2 * x.numel() * x.element_size())


@pytest.mark.parametrize("tile", [*TILES, None])
@pytest.mark.parametrize("p", [16, 64])
def test_s(tile, p, time, tensor, shapes):
    m, k = shapes["tokens"], shapes["hidden"]
    buffer, a = tensor(m, k + p), tensor(p, k)
    time(lambda: s_into(buffer[:, :k], a, buffer[:, k:], tile), m * k * buffer.element_size())
