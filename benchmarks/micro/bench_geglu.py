"""GEGLU, both forms, against torch's two operations. Run: python -m pytest benchmarks/micro/bench_geglu.py"""

import pytest
from lorakernels.geglu import geglu
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_geglu(form, approximate, time, phase, tensor, shapes):
    gate, up = (tensor(shapes["tokens"], shapes["wide"], grad=True) for _ in range(2))
    forms = {"ours": lambda: geglu(gate, up, approximate), "torch": lambda: F.gelu(gate, approximate=approximate) * up}
    time(phase(forms[form], (gate, up)), 3 * gate.numel() * gate.element_size())
