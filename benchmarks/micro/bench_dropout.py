"""Seeded dropout against torch's, which is PEFT's and keeps a mask. Run: python -m pytest
benchmarks/micro/bench_dropout.py
"""

import pytest
import torch
from lorakernels.ops.dropout import add_product_into, draw_seed, dropout, product_into
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_dropout(form, time, phase, tensor, shapes):
    x = tensor(shapes["tokens"], shapes["hidden"], grad=True)
    seed = draw_seed(x.device)
    function = {"ours": lambda: dropout(x, seed, 0.1), "torch": lambda: F.dropout(x, 0.1)}[form]
    time(phase(function, (x,)), moved=phase.least(2, 2) * x.nbytes)


@pytest.mark.parametrize("form", ["ours", "apart", "torch"])
def test_product(form, time, tensor, shapes):
    """S = dropout(x) · Aᵀ. apart: our mask, written, and a library product."""
    x, a = tensor(shapes["tokens"], shapes["hidden"]), tensor(shapes["rank"], shapes["hidden"])
    s, seed = tensor(shapes["tokens"], shapes["rank"]), draw_seed(x.device)
    functions = {
        "ours": lambda: product_into(x, a, seed, 0.1, s, "fused_small"),
        "apart": lambda: product_into(x, a, seed, 0.1, s, None),
        "torch": lambda: torch.mm(F.dropout(x, 0.1), a.t(), out=s),
    }
    time(functions[form], moved=x.nbytes)


@pytest.mark.parametrize("form", ["ours", "apart"])
def test_add_product(form, time, tensor, shapes):
    """dX += dropout(dS · A)."""
    dx, a = tensor(shapes["tokens"], shapes["hidden"]), tensor(shapes["rank"], shapes["hidden"])
    ds, seed = tensor(shapes["tokens"], shapes["rank"]), draw_seed(dx.device)
    time(lambda: add_product_into(ds, a, seed, 0.1, dx, fused=form == "ours"), moved=2 * dx.nbytes)
