"""SwiGLU against torch's two operations and Liger's kernel. Run: python -m pytest benchmarks/micro/bench_swiglu.py"""

from functools import partial

import pytest
from lorakernels.ops.glu import GluBackward, backward_a_into, backward_into
from lorakernels.ops.swiglu import swiglu
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
