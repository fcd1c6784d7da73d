"""The activation between products in FP8, quantized on the way, against a library's sum, the activation and
`quantize_rows` one after the other. Run: python -m pytest benchmarks/micro/bench_quantized_glu.py
"""

import pytest
import torch
from lorakernels.nodes.fp8 import supported
from lorakernels.ops import glu, quantized_glu
from lorakernels.ops.concat_operand import LoraColumns
from lorakernels.ops.glu import GluBackward
from lorakernels.ops.quantize_rows import quantize_rows

P = 64


def members(tensor, m, n, rank):
    """sB (2·I, P), block-diagonal, and S (M, P) of gate and up."""
    sb, s = torch.zeros_like(tensor(2 * n, P)), tensor(m, P)
    for i in range(2):
        sb[i * n :][:n, i * rank :][:, :rank] = tensor(n, rank)
    s[:, 2 * rank :] = 0
    return sb, s


@pytest.mark.parametrize("form", ["fused", "fused_small", "plain"])
def test_forward(form, time, tensor, shapes):
    m, n, rank = shapes["tokens"], shapes["wide"], shapes["rank"]
    gate_up, a, t = tensor(m, 2 * n), tensor(P, n), tensor(m, P)
    sb, s = members(tensor, m, n, rank)
    if reason := supported(s.device):
        pytest.skip(reason)
    packed = tensor(m, n + P)

    def plain():
        gate_up.addmm_(s, sb.t())
        glu.forward_lora_into(gate_up[:, :n], gate_up[:, n:], packed, LoraColumns(a, rank), "silu")
        quantize_rows(packed[:, :n])

    def on_the_way():
        quantized_glu.forward(gate_up, s, sb, "silu", LoraColumns(a, rank), t, 2 * rank, form)

    s *= 1e-3  # the sum grows with each repetition
    time(plain if form == "plain" else on_the_way, moved=13 * m * n * gate_up.element_size() // 2)


@pytest.mark.parametrize("form", [*glu.WHOLE_TILES, "plain"])
def test_backward(form, time, tensor, shapes):
    m, n, rank = shapes["tokens"], shapes["wide"], shapes["rank"]
    gate, up, grad, ds, a = tensor(m, n), tensor(m, n), tensor(m, n), tensor(m, rank), tensor(rank, n)
    sb, s = members(tensor, m, n, rank)
    if reason := supported(s.device):
        pytest.skip(reason)
    factor, wide, out = torch.rand(2 * n, device=s.device), tensor(m, 2 * n + P), tensor(m, P)
    inputs = GluBackward(gate, up, grad, "silu")

    def plain():
        grad.addmm_(ds, a)
        if glu.whole_fits(ds, [rank, rank], [n, n]):
            glu.backward_whole_into(inputs, wide, ds, sb, s)
        else:
            glu.backward_into(inputs, wide[:, :n], wide[:, n : 2 * n])
        quantize_rows(wide[:, : 2 * n], factor)

    def on_the_way():
        quantized_glu.backward(inputs, ds, a, factor, sb, s, out, form)

    ds *= 1e-3
    time(plain if form == "plain" else on_the_way, moved=16 * m * n * gate.element_size() // 2)
