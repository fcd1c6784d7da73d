"""The chunked head against all logits. Run: python -m pytest benchmarks/micro/bench_linear_cross_entropy.py"""

import pytest
import torch
from lorakernels.linear_cross_entropy import linear_cross_entropy
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_linear_cross_entropy(form, time, phase, tensor, shapes):
    x, weight = tensor(shapes["tokens"], shapes["hidden"], grad=True), tensor(shapes["vocabulary"], shapes["hidden"])
    target = torch.randint(shapes["vocabulary"], (shapes["tokens"],), device=x.device)
    forms = {
        "ours": lambda: linear_cross_entropy(x, weight, target),
        "torch": lambda: F.cross_entropy((x @ weight.t()).float(), target),
    }
    time(phase(forms[form], (x,)), (x.numel() * 2 + weight.numel()) * x.element_size())
