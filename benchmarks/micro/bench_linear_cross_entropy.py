"""The chunked head against all logits, and against Liger's chunks. Run: python -m pytest
benchmarks/micro/bench_linear_cross_entropy.py
"""

import pytest
import torch
from lorakernels.ops.linear_cross_entropy import linear_cross_entropy, loss_and_gradient_
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


def test_loss_and_gradient(time, tensor, shapes):
    """A chunk's loss, and its gradient over its logits."""
    logits = tensor(shapes["tokens"] // 8, shapes["vocabulary"])
    target = torch.randint(shapes["vocabulary"], (len(logits),), device=logits.device)
    time(lambda: loss_and_gradient_(logits, target), moved=2 * logits.nbytes)
