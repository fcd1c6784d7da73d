"""[x | x · Aᵀ] by tile, against a copy and a GEMM; S by itself. Run: pytest benchmarks/micro/bench_concat_operand.py"""

import pytest
from lorakernels.ops.concat_operand import LoraColumns, concat_operand_into, s_into
from lorakernels.runtime import TILES


@pytest.mark.parametrize("tile", [*TILES, "torch"])
@pytest.mark.parametrize("p", [16, 64])
def test_concat_operand(tile, p, time, tensor, shapes):
    m, k = shapes["tokens"], shapes["hidden"]
    x, columns, out = tensor(m, k), LoraColumns(tensor(p, k)), tensor(m, k + p)
    run_as = None if tile == "torch" else tile
    time(lambda: concat_operand_into(x, columns, out, run_as), moved=2 * x.nbytes)


@pytest.mark.parametrize("tile", [*TILES, "torch"])
@pytest.mark.parametrize("p", [16, 64])
def test_s(tile, p, time, tensor, shapes):
    m, k = shapes["tokens"], shapes["hidden"]
    buffer, columns = tensor(m, k + p), LoraColumns(tensor(p, k))
    run_as = None if tile == "torch" else tile
    time(lambda: s_into(buffer[:, :k], columns, buffer[:, k:], run_as), moved=m * k * buffer.element_size())
