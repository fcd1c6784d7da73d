"""Rows to e4m3 and a scale each, against torch's eager passes: an activation, and a weight as backward's operand needs
it. Run: python -m pytest benchmarks/micro/bench_quantize_rows.py
"""

import pytest
import torch
from lorakernels.nodes.fp8 import supported
from lorakernels.ops.quantize_rows import FP8, quantize_rows, quantize_rows_into, quantize_rows_reference


@pytest.mark.parametrize("form", ["ours", "torch"])
@pytest.mark.parametrize("columns", ["hidden", "wide"])
def test_quantize_rows(form, columns, time, tensor, shapes):
    x = tensor(shapes["tokens"], shapes[columns])
    if form == "ours" and (reason := supported(x.device)):
        pytest.skip(reason)
    quantize = quantize_rows if form == "ours" else quantize_rows_reference
    time(lambda: quantize(x), moved=x.nbytes + x.numel())


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_quantize_transposed(form, time, tensor, shapes):
    w = tensor(shapes["wide"], shapes["hidden"])
    if form == "ours" and (reason := supported(w.device)):
        pytest.skip(reason)
    q = torch.empty(w.shape[::-1], dtype=FP8, device=w.device)
    scale = torch.empty(w.shape[0], 1, device=w.device)
    run = (lambda: quantize_rows_into(w, q.t(), scale)) if form == "ours" else lambda: quantize_rows_reference(w)
    time(run, moved=w.nbytes + w.numel())
