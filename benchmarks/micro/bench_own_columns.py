"""S and sS, dS with dB, and dA of 4 and 16 adapters side by side, of merged q, k and v: each row's own columns in every
tile, against products over the columns of all of them with zeros put in afterwards. Run:
python -m pytest benchmarks/micro/bench_own_columns.py
"""

import pytest
import torch
from lorakernels.ops.concat_operand import ScaledS
from lorakernels.ops.job_columns import keep_own_columns
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, AdapterTable, add_a_gradients
from lorakernels.ops.own_columns import TILES, own_ds_and_db, own_s

LINEARS = 3


@pytest.mark.parametrize("form", [*TILES, "all"])
@pytest.mark.parametrize("jobs", [4, 16])
@pytest.mark.parametrize("product", ["s", "ds and db", "da"])
def test_own_columns(product, form, jobs, time, tensor, shapes):
    m, k, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    q, p = jobs * r, LINEARS * jobs * r
    x, dy, operand, sb = tensor(m, k), tensor(m, LINEARS * k), tensor(p, k), tensor(LINEARS * k, p)
    s, scaled_s = tensor(m, p), ScaledS(tensor(m, p), torch.full((p,), 2.0, device=x.device))
    counts = [m // jobs] * (jobs - 1) + [m - m // jobs * (jobs - 1)]
    rows, parts = JobRows(enumerate(counts), x.device), []
    for i in range(LINEARS):
        columns, own = slice(i * q, (i + 1) * q), slice(i * k, (i + 1) * k)
        places = [(operand[c : c + r], sb[own, c : c + r], c) for c in range(columns.start, columns.stop, r)]
        parts.append((columns, own, AdapterTable([Adapter(a, b, 1.0, 0.0, c) for a, b, c in places])))
    db, da = (torch.zeros(*shape, device=x.device) for shape in ((LINEARS * k, q), (p, k)))
    job_of_column = (torch.arange(p, device=x.device) // r % jobs).int()

    def ours():
        for columns, own, table in parts:
            if product == "s":
                own_s(x, table, rows, s, scaled_s, columns, form)
            elif product == "da":
                add_a_gradients(x, s, table, rows, da)
            else:
                own_ds_and_db(dy[:, own], table, rows, s, scaled_s.out, db[own], columns, form)

    def of_all():
        if product == "da":
            return s.t() @ x
        torch.mm(*((x, operand.t()) if product == "s" else (dy, sb)), out=s)
        if product == "s":
            return keep_own_columns(s, rows.job_of_row(), job_of_column, scaled_s.out, scaled_s.scales)
        keep_own_columns(s, rows.job_of_row(), job_of_column)
        return [dy[:, own].t() @ scaled_s.out[:, columns] for columns, own, _ in parts]

    time(of_all if form == "all" else ours)
