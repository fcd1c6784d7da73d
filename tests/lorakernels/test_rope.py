"""RoPE of q and k, whole and partial rotation, head norms, strides, against float32 and transformers' own function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, poisoned
from lorakernels.ops.rope import HeadTensors, Rotary, rope, rope_reference, rotate_into


def table(batch, seq, rot, device, dtype):
    angle = torch.rand(batch, seq, rot // 2, device=device) * 6
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


SHAPES = [(2, 5, 4, 2, 8, 8), (1, 1, 3, 1, 64, 64), (2, 3, 5, 5, 20, 12), (1, 7, 1, 1, 96, 96)]


@pytest.mark.parametrize("batch, seq, n_q, n_k, d, rot", SHAPES)
@pytest.mark.parametrize("shared_table", [True, False])
def test_rope(batch, seq, n_q, n_k, d, rot, shared_table, device, dtype):
    q = torch.randn(batch, seq, n_q, d, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(batch, n_k, seq, d, device=device).to(dtype)
    cos, sin = table(1 if shared_table else batch, seq, rot, device, dtype)
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    out = rope(*leaves, cos, sin)
    grads = [torch.randn_like(t) for t in out]
    got = torch.autograd.grad(out, leaves, grads)
    wide = [t.float().clone().requires_grad_() for t in (q, k)]
    wanted = [rope_reference(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in wide]
    wanted_grads = torch.autograd.grad(wanted, wide, [g.float() for g in grads])
    for a, b in zip((*out, *got), (*wanted, *wanted_grads), strict=True):
        assert_close(a, b, dtype)


def test_same_as_transformers(device):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 6, 16, device=device), torch.randn(2, 2, 6, 16, device=device)
    cos, sin = table(2, 6, 16, device, torch.float32)
    for a, b in zip(rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert_close(a, b, torch.float32)


@pytest.mark.parametrize("n_q, n_k, d", [(4, 2, 8), (3, 3, 64)])
def test_head_norms_and_one_buffer(n_q, n_k, d, device, dtype):
    """Qwen3's order (norm, then rotate) in slices of one wide buffer, v carried along, and the gradient."""
    batch, seq = 2, 5
    widths = [n_q * d, n_k * d, n_k * d]

    def split(buffer):
        parts = buffer.view(batch, seq, -1)[..., : sum(widths)].split(widths, -1)
        return [t.unflatten(-1, (-1, d)) for t in parts]

    y = torch.randn(batch * seq, sum(widths), device=device).to(dtype)
    norms = tuple(torch.rand(d, device=device).to(dtype) + 0.5 for _ in range(2))
    cos, sin = table(1, seq, d, device, dtype)
    q, k, v = split(y)
    out_q, out_k = (poisoned(*t.shape, dtype=dtype, device=device) for t in (q, k))
    rotary = Rotary(cos, sin, norms, 1e-5)
    rotate_into(HeadTensors(q, k), HeadTensors(out_q, out_k), rotary)
    leaves = [t.float().clone().requires_grad_() for t in (q, k)]
    wanted = [rope_reference(t, cos, sin, w, 1e-5) for t, w in zip(leaves, norms, strict=True)]
    assert_close(out_q, wanted[0], dtype, 2)
    assert_close(out_k, wanted[1], dtype, 2)
    grads = [torch.randn(t.shape, device=device).to(dtype) for t in (q, k, v)]
    back = poisoned(batch * seq, sum(widths) + 3, dtype=dtype, device=device)
    b = split(back)
    rotate_into(HeadTensors(*grads), HeadTensors(*b), rotary, raw=(q, k), backward=True)
    want = torch.autograd.grad(wanted, leaves, [g.float() for g in grads[:2]])
    assert_close(b[0], want[0], dtype, 2)
    assert_close(b[1], want[1], dtype, 2)
    assert torch.equal(b[2], grads[2])
    assert back[:, sum(widths) :].isnan().all()


@given(seq=st.integers(0, 6), n_q=st.integers(1, 5), half=st.integers(1, 9), extra=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_any_shape(seq, n_q, half, extra):
    q, k = torch.randn(2, n_q, seq, 2 * half + extra), torch.randn(2, 1, seq, 2 * half + extra)
    cos, sin = table(1, seq, 2 * half, "cpu", torch.float32)
    out = rope(q, k, cos, sin)
    assert_close(out[0], rope_reference(q.transpose(1, 2), cos, sin).transpose(1, 2), torch.float32)


def test_gradcheck():
    q, k = (torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cos, sin = table(1, 3, 4, "cpu", torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k))


def test_wrong_shapes():
    q, cos = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 4)
    with pytest.raises(ValueError, match=r"\(1, 5, 4\)"):
        rope(q, q, torch.zeros(1, 5, 4), torch.zeros(1, 5, 4))
    with pytest.raises(ValueError, match="differ in batch"):
        rope(q, torch.zeros(1, 2, 5, 4), cos, cos)
