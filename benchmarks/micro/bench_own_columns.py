"""S and sS, dS with dB, and dA of 4 and 16 adapters side by side, of merged q, k and v: each row's own columns in every
tile, against products over the columns of all of them with zeros put in afterwards. Run:
python -m pytest benchmarks/micro/bench_own_columns.py
"""

import pytest
import torch
from lorakernels.ops.concat_operand import ScaledS
from lorakernels.ops.job_columns import keep_own_columns
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.lora_grad import DS_DB_TILES, AdapterColumns, ds_and_db
from lorakernels.ops.own_columns import A_TILES, TILES, LinearColumns, Own, OwnColumns, own_a_gradients, own_s, takes

LINEARS = 3
TILES_OF = {"s": TILES, "ds and db": DS_DB_TILES, "da": A_TILES}


@pytest.mark.parametrize("form", [*dict.fromkeys(tile for tiles in TILES_OF.values() for tile in tiles), "all"])
@pytest.mark.parametrize("jobs", [4, 16])
@pytest.mark.parametrize("product", ["s", "ds and db", "da"])
def test_own_columns(product, form, jobs, time, tensor, shapes):
    if form not in ("all", *TILES_OF[product]):
        pytest.skip("no tile of this product")
    m, k, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    q, p = jobs * r, LINEARS * jobs * r
    x, dy, a, sb = tensor(m, k), tensor(m, LINEARS * k), tensor(p, k), tensor(LINEARS * k, p)
    if form != "all" and not takes(a, x):
        pytest.skip("no torch path")
    s, scaled_s = tensor(m, p), ScaledS(tensor(m, p), torch.full((p,), 2.0, device=x.device))
    counts = [m // jobs] * (jobs - 1) + [m - m // jobs * (jobs - 1)]
    rows, parts = JobRows(enumerate(counts), x.device), []
    for i in range(LINEARS):
        of_jobs = [(column, r) for column in range(i * q, (i + 1) * q, r)]
        parts.append(LinearColumns(slice(i * q, (i + 1) * q), of_jobs))
    own, da = Own(OwnColumns(parts, x.device), rows), torch.zeros(p, k, device=x.device)
    job_of_column = (torch.arange(p, device=x.device) // r % jobs).int()

    def ours():
        if product == "s":
            own_s(x, a, own, s, scaled_s, form)
        elif product == "da":
            own_a_gradients(x, s, own, da, form)
        else:
            ds_and_db(dy, s, AdapterColumns(sb, scaled_s.out, [k] * LINEARS, q, own), form)

    def of_all():
        if product == "da":
            return s.t() @ x
        torch.mm(*((x, a.t()) if product == "s" else (dy, sb)), out=s)
        if product == "s":
            return keep_own_columns(s, rows.job_of_row(), job_of_column, scaled_s.out, scaled_s.scales)
        keep_own_columns(s, rows.job_of_row(), job_of_column)
        each = zip(dy.split(k, 1), parts, strict=True)
        return [of_linear.t() @ scaled_s.out[:, part.columns] for of_linear, part in each]

    time(of_all if form == "all" else ours)
