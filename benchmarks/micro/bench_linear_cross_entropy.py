"""The chunked head against all logits, and against Liger's chunks. Run: python -m pytest
benchmarks/micro/bench_linear_cross_entropy.py
"""

import pytest
import torch
from lorakernels.ops.linear_cross_entropy import linear_cross_entropy
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch", "liger"])
def test_linear_cross_entropy(form, time, phase, tensor, shapes, liger):
    x, weight = tensor(shapes["tokens"], shapes["hidden"], grad=True), tensor(shapes["vocabulary"], shapes["hidden"])
    target = torch.randint(shapes["vocabulary"], (shapes["tokens"],), device=x.device)
    forms = {
        "ours": lambda: linear_cross_entropy(x, weight, target),
        "torch": lambda: F.cross_entropy((x @ weight.t()).float(), target),
        "liger": lambda: liger("liger_fused_linear_cross_entropy")(x, weight, target),
    }
    one_product = 2 * x.shape[0] * weight.numel()
    time(phase(forms[form], (x,)), flops=phase.least(one_product, one_product), graph=form != "liger")
