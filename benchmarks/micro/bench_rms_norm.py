"""RMSNorm with the residual add, alone and with the LoRA columns. Run: python -m pytest benchmarks/micro/bench_rms_norm.py"""  # noqa: E501

import pytest
import torch
from lorakernels.concat_operand import LoraColumns
from lorakernels.rms_norm import Norm, NormInput, forward_into, forward_lora_into, rms_norm
from lorakernels.runtime import TILES
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_rms_norm(form, time, phase, tensor, shapes):
    x, residual = (tensor(shapes["tokens"], shapes["hidden"], grad=True) for _ in range(2))
    weight = tensor(shapes["hidden"])

    def plain():
        h = x + residual
        return F.rms_norm(h, (shapes["hidden"],), weight, 1e-6), h

    function = {"ours": lambda: rms_norm(x, weight, 1e-6, residual=residual), "torch": plain}[form]
    time(phase(function, (x, residual)), 4 * x.numel() * x.element_size())


@pytest.mark.parametrize("form", [*TILES, "plain"])
def test_norm_and_lora_columns(form, time, tensor, shapes):
    m, k, p = shapes["tokens"], shapes["hidden"], 64
    inputs, a, buffer = NormInput(tensor(m, k), tensor(k), Norm(1e-6)), tensor(p, k), tensor(m, k + p)

    def plain():
        forward_into(inputs, buffer[:, :k])
        torch.mm(buffer[:, :k], a.t(), out=buffer[:, k:])

    fused = form if form != "plain" else "fused"
    run = plain if form == "plain" else lambda: forward_lora_into(inputs, buffer, LoraColumns(a), fused)
    time(run, 2 * m * k * buffer.element_size())
