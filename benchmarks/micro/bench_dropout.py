"""Seeded dropout against torch's (which keeps a mask). Run: python -m pytest benchmarks/micro/bench_dropout.py"""

import pytest
from lorakernels.dropout import add_product_into, draw_seed, dropout, product_into
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_dropout(form, time, phase, tensor, shapes):
    x = tensor(shapes["tokens"], shapes["hidden"], grad=True)
    function = {"ours": lambda: dropout(x, draw_seed(x.device), 0.1), "torch": lambda: F.dropout(x, 0.1)}[form]
    time(phase(function, (x,)), 2 * x.numel() * x.element_size())


@pytest.mark.parametrize("form", ["ours", "apart"])
def test_product(form, time, tensor, shapes):
    x, a = tensor(shapes["tokens"], shapes["hidden"]), tensor(shapes["rank"], shapes["hidden"])
    s, seed = tensor(shapes["tokens"], shapes["rank"]), draw_seed(x.device)
    time(
        lambda: product_into(x, a, seed, 0.1, s, "fused_small" if form == "ours" else None),
        x.numel() * x.element_size(),
    )


@pytest.mark.parametrize("form", ["ours", "apart"])
def test_add_product(form, time, tensor, shapes):
    dx, a = tensor(shapes["tokens"], shapes["hidden"]), tensor(shapes["rank"], shapes["hidden"])
    ds, seed = tensor(shapes["tokens"], shapes["rank"]), draw_seed(dx.device)
    time(
        lambda: add_product_into(ds, a, seed, 0.1, dx, fused=form == "ours"),
        2 * dx.numel() * dx.element_size(),
    )
