"""The MLP's node, with its forms measured and picked. Run: python -m pytest benchmarks/micro/bench_mlp_node.py"""

from lorakernels.member import Member
from lorakernels.mlp_node import gated_mlp
from lorakernels.projection import Projection
from lorakernels.rms_norm import Norm
from torch import nn


def test_gated_mlp(time, phase, tensor, shapes):
    def member(name, n, k):
        weight = nn.Parameter(tensor(n, k), requires_grad=False)
        return Member(name, weight, a=tensor(16, k, grad=True), b=tensor(n, 16, grad=True), scale=2.0)

    h, wide = shapes["hidden"], shapes["wide"]
    members, down = [member("gate", wide, h), member("up", wide, h)], member("down", h, wide)
    groups, last = [Projection(members)], Projection([down])
    x, residual, weight = tensor(shapes["tokens"], h, grad=True), tensor(shapes["tokens"], h, grad=True), tensor(h)
    inputs = (x, residual, *(t for m in (*members, down) for t in (m.a, m.b)))

    def run():
        return gated_mlp(x, groups, last, "silu", norm=Norm(1e-6), norm_weight=weight, residual=residual, add=True)

    time(phase(run, inputs))
