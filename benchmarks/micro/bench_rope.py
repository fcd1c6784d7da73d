"""RoPE of q and k against transformers' own function and Liger's. Run: pytest benchmarks/micro/bench_rope.py"""

import pytest
import torch
from lorakernels.ops.rope import rope


def torch_rope(q, k, cos, sin):
    def turn(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    cos, sin = cos[:, None], sin[:, None]
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


@pytest.mark.parametrize("form", ["ours", "torch", "liger"])
def test_rope(form, time, phase, tensor, shapes, liger):
    seq, d = shapes["tokens"] // 4, 128 if shapes["hidden"] >= 1024 else 16
    n_q = shapes["hidden"] // d
    q = tensor(4, seq, n_q, d).transpose(1, 2).requires_grad_()
    k = tensor(4, seq, max(1, n_q // 4), d).transpose(1, 2).requires_grad_()
    cos, sin = tensor(1, seq, d), tensor(1, seq, d)
    forms = {
        "ours": lambda: rope(q, k, cos, sin),
        "torch": lambda: torch_rope(q, k, cos, sin),
        "liger": lambda: liger("liger_rope")(q, k, cos, sin),
    }
    time(phase(forms[form], (q, k)), moved=phase.least(2, 2) * (q.numel() + k.numel()) * q.element_size())
