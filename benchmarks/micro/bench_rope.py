"""RoPE of q and k against transformers' own function and Liger's. Run: pytest benchmarks/micro/bench_rope.py"""

import pytest
import torch
from lorakernels.ops.rope import HeadTensors, Rotary, rope, rotate_into


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


def test_backward_of_qkv(time, tensor, shapes):
    """[dq | dk | dv] in the buffer that q, k and v share."""
    seq, d = shapes["tokens"] // 4, 128 if shapes["hidden"] >= 1024 else 16
    sizes = [shapes["hidden"], shapes["hidden"] // 4, shapes["hidden"] // 4]
    merged = tensor(4, seq, sum(sizes) + 64)[..., : sum(sizes)]
    target = HeadTensors(*(t.unflatten(-1, (-1, d)) for t in merged.split(sizes, -1)))
    source = HeadTensors(*(tensor(*t.shape) for t in target))
    rotary = Rotary(tensor(1, seq, d), tensor(1, seq, d))
    moved = 2 * sum(t.nbytes for t in source)
    time(lambda: rotate_into(source, target, rotary, backward=True), moved=moved)
