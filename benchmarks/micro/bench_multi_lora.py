"""A frozen linear under rows of 1, 4, 8 and 16 adapters: ours against torch's loop over adapters, PEFT's way for one
adapter, and the bare linear. Run: python -m pytest benchmarks/micro/bench_multi_lora.py
"""

import pytest
import torch
from lorakernels.nodes.multi_linear import multi_linear
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, AdapterTable


@pytest.mark.parametrize("form", ["ours", "torch", "bare"])
@pytest.mark.parametrize("jobs", [1, 4, 8, 16])
def test_multi_linear(form, jobs, phase, time, tensor, shapes):
    m, n, r = shapes["tokens"], shapes["hidden"], shapes["rank"]
    x, weight = tensor(m, n, grad=True), tensor(n, n)
    adapters = [Adapter(tensor(r, n, grad=True), tensor(n, r, grad=True), 2.0) for _ in range(jobs)]
    counts = [m // jobs] * (jobs - 1) + [m - m // jobs * (jobs - 1)]
    rows, table = JobRows(enumerate(counts), x.device), AdapterTable(adapters)

    def loop():
        each = zip(x.split(counts), adapters, strict=True)
        return x @ weight.t() + torch.cat([own @ a.t() @ b.t() * scale for own, (a, b, scale, *_) in each])

    forms = {"ours": lambda: multi_linear(x, weight, table, rows), "torch": loop, "bare": lambda: x @ weight.t()}
    learned = [] if form == "bare" else [t for a, b, *_ in adapters for t in (a, b)]
    time(phase(forms[form], [x, *learned]), flops=phase.least(2 * m * n * n, 2 * m * n * n))
