"""Log-probabilities of the targets in chunks, against all logits. Run: python -m pytest
benchmarks/micro/bench_linear_log_probs.py
"""

import pytest
import torch
from lorakernels.ops.linear_log_probs import linear_log_probs


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_linear_log_probs(form, time, phase, tensor, shapes):
    x, weight = tensor(shapes["tokens"], shapes["hidden"], grad=True), tensor(shapes["vocabulary"], shapes["hidden"])
    target = torch.randint(shapes["vocabulary"], (shapes["tokens"],), device=x.device)

    def all_logits():
        logits = (x @ weight.t()).float()
        return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1)

    forms = {"ours": lambda: linear_log_probs(x, weight, target).log_probs, "torch": all_logits}
    one_product = 2 * x.shape[0] * weight.numel()
    time(phase(forms[form], (x,)), flops=phase.least(one_product, one_product))
