"""SwiGLU against torch's two operations. Run: python -m pytest benchmarks/lorakernels/bench_swiglu.py"""

import pytest
from lorakernels.swiglu import swiglu
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
def test_swiglu(form, time, phase, tensor, shapes):
    gate, up = (tensor(shapes["tokens"], shapes["wide"], grad=True) for _ in range(2))
    function = {"ours": lambda: swiglu(gate, up), "torch": lambda: F.silu(gate) * up}[form]
    time(phase(function, (gate, up)), 3 * gate.numel() * gate.element_size())
