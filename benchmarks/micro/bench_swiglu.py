"""SwiGLU against torch's two operations and Liger's kernel. Run: python -m pytest benchmarks/micro/bench_swiglu.py"""

from functools import partial

import pytest
import torch
from lorakernels.ops.concat_operand import LoraColumns
from lorakernels.ops.glu import (
    WHOLE_TILES,
    GluBackward,
    backward_a_into,
    backward_into,
    backward_whole_into,
    forward_into,
    forward_lora_into,
    whole_fits,
)
from lorakernels.ops.lora_grad import AdapterColumns, ds_and_db
from lorakernels.ops.swiglu import swiglu
from lorakernels.runtime import TILES
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch", "liger"])
def test_swiglu(form, time, phase, tensor, shapes, liger):
    gate, up = (tensor(shapes["tokens"], shapes["wide"], grad=True) for _ in range(2))
    forms = {
        "ours": lambda: swiglu(gate, up),
        "torch": lambda: F.silu(gate) * up,
        "liger": lambda: liger("liger_swiglu")(gate, up),
    }
    time(phase(forms[form], (gate, up)), moved=phase.least(3, 5) * gate.nbytes)


@pytest.mark.parametrize("form", [*TILES, "plain"])
def test_swiglu_and_lora_columns(form, time, tensor, shapes):
    """[h | h · Aᵀ] of the down projection."""
    m, n, p = shapes["tokens"], shapes["wide"], 64
    gate, up, buffer = tensor(m, n), tensor(m, n), tensor(m, n + p)
    columns = LoraColumns(tensor(p, n), shapes["rank"])

    def plain():
        forward_into(gate, up, buffer[:, :n], "silu")
        torch.mm(buffer[:, :n], columns.a.t(), out=buffer[:, n:])

    run = plain if form == "plain" else lambda: forward_lora_into(gate, up, buffer, columns, "silu", form)
    time(run, moved=3 * gate.nbytes)


@pytest.mark.parametrize("form", ["one pass", "two"])
def test_backward_with_a(form, time, tensor, shapes):
    """The gradients of gate and up, and dA of the down projection."""
    gate, up, dh = (tensor(shapes["tokens"], shapes["wide"]) for _ in range(3))
    ds, inputs = tensor(shapes["tokens"], shapes["rank"]), GluBackward(gate, up, dh, "silu")

    def two():
        backward_into(inputs, gate, up, h_into_grad=True)
        return ds.t() @ dh

    one = partial(backward_a_into, inputs, gate, up, ds)
    time(two if form == "two" else one, moved=5 * gate.nbytes)


@pytest.mark.parametrize("form", [*WHOLE_TILES, "apart"])
def test_backward_whole(form, time, tensor, shapes):
    """The same with dS and dB of gate and up; apart: those in a launch of their own."""
    m, n, r, p = shapes["tokens"], shapes["wide"], shapes["rank"], 64
    dh, ds, wide, sb, s = tensor(m, n), tensor(m, r), tensor(m, 2 * n + p), tensor(2 * n, p), tensor(m, p)
    if not whole_fits(ds, [r, r], [n, n]):
        pytest.skip("runs in Triton only")
    gate, up, tail = wide.split([n, n, p], 1)
    inputs = GluBackward(gate, up, dh, "silu")

    def apart():
        backward_a_into(inputs, gate, up, ds)
        ds_and_db(wide[:, : 2 * n], tail, AdapterColumns(sb, s, [n, n], r), "one_read_down")

    whole = partial(backward_whole_into, inputs, wide, ds, sb, s, form)
    time(apart if form == "apart" else whole, moved=5 * dh.nbytes)
