"""Zeros in the columns of other jobs than a row's, in S and sS of 4 and 16 adapters, as many columns as merged q, k, v
have: ours against torch's masked_fill_; then sS made of S on the way (`sS made`), which torch multiplies first. Run:
python -m pytest benchmarks/micro/bench_job_columns.py
"""

import pytest
import torch
from lorakernels.ops.job_columns import keep_own_columns


@pytest.mark.parametrize("form", ["ours", "torch", "ours, sS made", "torch, sS made"])
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

    def made():
        torch.mul(s, scales, out=scaled)
        masked()

    scales = torch.full((p,), 2.0, device=s.device)
    forms = {
        "ours": lambda: keep_own_columns(s, rows, columns, scaled), "torch": masked,
        "ours, sS made": lambda: keep_own_columns(s, rows, columns, scaled, scales), "torch, sS made": made,
    }  # fmt: skip
    time(forms[form])
