"""LoRA projections of Llama-3.1-8B's shapes: one GEMM, GEMM + addmm, PEFT's arithmetic, and the frozen GEMM alone; and
how many spare columns narrower ones should have. Run: python -m pytest benchmarks/micro/bench_projection.py
"""

import pytest
from lorakernels import tune
from lorakernels.nodes.member import Member
from lorakernels.nodes.projection import Projection
from lorakernels.nodes.projection_node import project
from lorakernels.runtime import round_up
from torch import nn

LINEARS = {"o": [("hidden", "hidden")], "qkv": [("hidden", "hidden")] * 3, "gate_up": [("wide", "hidden")] * 2}
LINEARS["down"] = [("hidden", "wide")]
# (output columns, input columns, adapters) of SmolLM2-135M and -360M, Qwen3-0.6B and Qwen2.5-1.5B.
NARROW = [(960, 576, 3), (576, 576, 1), (3072, 576, 2), (576, 1536, 1), (1600, 960, 3), (960, 960, 1), (5120, 960, 2),
          (4096, 1024, 3), (6144, 1024, 2), (2048, 1536, 3), (1536, 1536, 1), (17920, 1536, 2)]  # fmt: skip


@pytest.mark.parametrize("form", ["one", "addmm", "peft", "bare"])
@pytest.mark.parametrize("linear", LINEARS)
def test_projection(form, linear, time, phase, tensor, shapes):
    members = []
    for i, (n, k) in enumerate(LINEARS[linear]):
        n = shapes[n] // 4 if linear == "qkv" and i else shapes[n]
        k, r = shapes[k], shapes["rank"]
        weight = nn.Parameter(tensor(n, k), requires_grad=False)
        members.append(Member(str(i), weight, a=tensor(r, k, grad=True), b=tensor(n, r, grad=True), scale=2.0))
    x = tensor(shapes["tokens"], members[0].shape[1], grad=True)
    group = Projection(members)

    def peft():
        return tuple(x @ m.weight.t() + (x @ m.a.t() @ m.b.t()) * m.scale for m in members)

    functions = {"peft": peft, "bare": lambda: tuple(x @ m.weight.t() for m in members)}
    inputs = (x,) if form == "bare" else (x, *(t for m in members for t in (m.a, m.b)))
    with tune.forced(form):
        flops = 2 * x.shape[0] * sum(m.weight.numel() for m in members)  # of the frozen weights, one direction
        time(phase(functions.get(form, lambda: project(x, [group])), inputs), flops=phase.least(flops, flops))


@pytest.mark.parametrize("form", ["fewest", "64"])
@pytest.mark.parametrize(("n", "k", "adapters"), NARROW)
def test_spare_columns(form, n, k, adapters, time, tensor, shapes):
    """Both directions' GEMMs of an input narrower than `operand.WIDE`. Where 64 columns win, it is to be lowered."""
    m, p = shapes["tokens"], round_up(adapters * shapes["rank"], 64 if form == "64" else 16)
    w, x, d = tensor(n + p, k + p), tensor(m, k + p), tensor(m, n + p)
    time(lambda: (x @ w[:n].t(), d @ w[:, :k]))
