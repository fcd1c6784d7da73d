"""GEGLU, both forms, against torch's two operations and Liger's kernel. Run: python -m pytest
benchmarks/micro/bench_geglu.py
"""

import pytest
from lorakernels.ops.geglu import geglu
from torch.nn import functional as F


@pytest.mark.parametrize("form", ["ours", "torch", "liger"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_geglu(form, approximate, time, phase, tensor, shapes, liger):
    if form == "liger" and approximate == "none":
        pytest.skip("Liger has the approximation by tanh alone")
    gate, up = (tensor(shapes["tokens"], shapes["wide"], grad=True) for _ in range(2))
    forms = {
        "ours": lambda: geglu(gate, up, approximate),
        "torch": lambda: F.gelu(gate, approximate=approximate) * up,
        "liger": lambda: liger("liger_geglu")(gate, up),
    }
    time(phase(forms[form], (gate, up)), moved=phase.least(3, 5) * gate.nbytes)
