"""Zeros in the columns of other jobs than a row's, in S and sS of 4 and 16 adapters, with the spare columns that merged
q, k, v have: ours against torch's masked_fill_. Run: python -m pytest benchmarks/micro/bench_job_columns.py
"""

import pytest
import torch
from lorakernels.ops.job_columns import keep_own_columns


@pytest.mark.parametrize("form", ["ours", "torch"])
@pytest.mark.parametrize("jobs", [4, 16])
def test_keep_own_columns(form, jobs, time, tensor, shapes):
    m, k, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    p = 3 * jobs * r
    s, scaled = tensor(m, k + p)[:, k:], tensor(m, p)
    rows = (torch.arange(m, device=s.device) * jobs // m).int()
    columns = (torch.arange(p, device=s.device) // r % jobs).int()

    def masked():
        foreign = rows[:, None] != columns[None, :]
        s.masked_fill_(foreign, 0)
        scaled.masked_fill_(foreign, 0)

    time({"ours": lambda: keep_own_columns(s, rows, columns, scaled), "torch": masked}[form])
