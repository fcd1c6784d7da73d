"""RMSNorm with the residual add, against torch's, transformers' (which a PEFT model runs) and Liger's; and with the
LoRA columns. Run: python -m pytest benchmarks/micro/bench_rms_norm.py
"""

import pytest
import torch
from lorakernels.ops.concat_operand import LoraColumns
from lorakernels.ops.rms_norm import (
    Norm,
    NormFactors,
    NormInput,
    backward_into,
    forward_into,
    forward_lora_into,
    rms_norm,
)
from lorakernels.runtime import TILES
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch", "peft", "liger"])
def test_rms_norm(form, time, phase, tensor, shapes, liger):
    x, residual = (tensor(shapes["tokens"], shapes["hidden"], grad=True) for _ in range(2))
    weight = tensor(shapes["hidden"])

    def plain():
        h = x + residual
        return F.rms_norm(h, (shapes["hidden"],), weight, 1e-6), h

    def transformers():
        h = x + residual
        raised = h.float()
        return weight * (raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype), h

    def ligers():
        h = x + residual
        return liger("liger_rms_norm")(h, weight, 1e-6, in_place=False), h

    forms = {
        "ours": lambda: rms_norm(x, weight, 1e-6, residual=residual),
        "torch": plain,
        "peft": transformers,
        "liger": ligers,
    }
    time(phase(forms[form], (x, residual)), moved=phase.least(4, 4) * x.nbytes)


@pytest.mark.parametrize("form", [*TILES, "plain"])
def test_norm_and_lora_columns(form, time, tensor, shapes):
    m, k, p = shapes["tokens"], shapes["hidden"], 64
    inputs = NormInput(tensor(m, k), tensor(k), Norm(1e-6), residual=tensor(m, k), h=tensor(m, k))
    a, buffer = tensor(p, k), tensor(m, k + p)

    def plain():
        forward_into(inputs, buffer[:, :k])
        torch.mm(buffer[:, :k], a.t(), out=buffer[:, k:])

    fused = form if form != "plain" else "fused"
    run = plain if form == "plain" else lambda: forward_lora_into(inputs, buffer, LoraColumns(a), fused)
    time(run, moved=4 * m * k * buffer.element_size())


def test_backward(time, tensor, shapes):
    """dh, with the residual's gradient."""
    dy, h, dx, d = (tensor(shapes["tokens"], shapes["hidden"]) for _ in range(4))
    factors = NormFactors(tensor(shapes["tokens"]).float(), tensor(shapes["hidden"]), Norm(1e-6))
    time(lambda: backward_into(dy, h, factors, dx, d), moved=4 * h.nbytes)
