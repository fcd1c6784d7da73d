"""The four products of an 8B's layer under rows of 1, 8, 16 and 32 adapters of rank 16, forward and dX: ours, whose
tail looks the row's adapter up, against the library's over columns for all of them, and against the bare product. S and
dS are there already (bench_multi_lora.py). Run: python -m pytest benchmarks/micro/bench_multi_product.py
"""

import pytest
import torch
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, AdapterTable
from lorakernels.ops.multi_product import TILES, multi_product, takes
from lorakernels.runtime import round_up


def layer(shapes):
    """(widths of the linears of a product, its depth), by name."""
    h, wide = shapes["hidden"], shapes["wide"]
    return {"qkv": ((h, h // 4, h // 4), h), "o": ((h,), h), "gate+up": ((wide, wide), h), "down": ((h,), wide)}


@pytest.mark.parametrize("form", [*TILES, "columns", "bare"])
@pytest.mark.parametrize("jobs", [1, 8, 16, 32])
@pytest.mark.parametrize("name", ["qkv", "o", "gate+up", "down"])
@pytest.mark.parametrize("of_b", [True, False], ids=["forward", "dX"])
def test_multi_product(form, jobs, name, of_b, time, tensor, shapes):
    if form == "bare" and jobs > 1:
        pytest.skip("it is the same for any number of adapters")
    (widths, k), m, r = layer(shapes)[name], shapes["tokens"], shapes["rank"]
    n = sum(widths)
    p = round_up(jobs * r * len(widths), 64)
    full, xs = tensor(n + p, k + p), tensor(m, (k if of_b else n) + p)
    w, x, s = full[:n, :k], xs[:, :-p], xs[:, -p:]
    rows = JobRows([(job, m // jobs) for job in range(jobs)], x.device)
    tables, column, row = [], 0, 0
    for width in widths:
        adapters = []
        for _ in range(jobs):
            a, b = full[n + column : n + column + r, :k], full[row : row + width, k + column : k + column + r]
            adapters.append(Adapter(a, b, 1.0, 0.0, column))
            column += r
        tables.append(AdapterTable(adapters))
        row += width
    if form in TILES and not takes(x, w, r, widths):
        pytest.skip("the kernel needs a GPU and its 16 bits")
    by_row = {tile: lambda tile=tile: multi_product(x, w, s, tables, rows, tile, of_b=of_b) for tile in TILES}
    columns = (lambda: xs @ full[:n].t()) if of_b else (lambda: xs @ full[:, :k])
    bare = (lambda: x @ w.t()) if of_b else (lambda: x @ w)
    with torch.no_grad():
        time({**by_row, "columns": columns, "bare": bare}[form], flops=2 * m * n * k)
