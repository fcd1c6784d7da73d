"""Seeded dropout against torch's (which keeps a mask). Run: python -m pytest benchmarks/lorakernels/bench_dropout.py"""

import pytest
from lorakernels.dropout import draw_seed, dropout
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_dropout(form, time, phase, tensor, shapes):
    x = tensor(shapes["tokens"], shapes["hidden"], grad=True)
    function = {"ours": lambda: dropout(x, draw_seed(x.device), 0.1), "torch": lambda: F.dropout(x, 0.1)}[form]
    time(phase(function, (x,)), 2 * x.numel() * x.element_size())
