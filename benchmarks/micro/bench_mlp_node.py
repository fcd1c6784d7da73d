"""The MLP's node, its forms measured and picked, against PEFT's arithmetic. Run: python -m pytest
benchmarks/micro/bench_mlp_node.py
"""

import pytest
from lorakernels.nodes.member import Member
from lorakernels.nodes.mlp_node import gated_mlp
from lorakernels.nodes.projection import Projection
from lorakernels.ops.rms_norm import Norm
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "peft"])
def test_gated_mlp(form, time, phase, tensor, shapes):
    """down(silu(gate(y)) · up(y)) + h of y = norm(h), h = x + residual."""
    h, wide, r = shapes["hidden"], shapes["wide"], shapes["rank"]

    def member(name, n, k):
        weight = nn.Parameter(tensor(n, k), requires_grad=False)
        return Member(name, weight, a=tensor(r, k, grad=True), b=tensor(n, r, grad=True), scale=2.0)

    members, down = [member("gate", wide, h), member("up", wide, h)], member("down", h, wide)
    groups, last = [Projection(members)], Projection([down])
    x, residual, weight = tensor(shapes["tokens"], h, grad=True), tensor(shapes["tokens"], h, grad=True), tensor(h)
    inputs = (x, residual, *(t for m in (*members, down) for t in (m.a, m.b)))

    def ours():
        return gated_mlp(x, groups, last, "silu", norm=Norm(1e-6), norm_weight=weight, residual=residual, add=True)

    def linear(m, x):
        return x @ m.weight.t() + (x @ m.a.t() @ m.b.t()) * m.scale

    def peft():
        added = x + residual
        y = F.rms_norm(added, (h,), weight, 1e-6)
        return linear(down, F.silu(linear(members[0], y)) * linear(members[1], y)) + added

    flops = 2 * shapes["tokens"] * 3 * h * wide  # of the frozen weights, one direction
    time(phase({"ours": ours, "peft": peft}[form], inputs), flops=phase.least(flops, flops))
