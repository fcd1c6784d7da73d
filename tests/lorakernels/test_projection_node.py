"""`project` as a decoder layer uses it (norm, q, k, v, head norms and RoPE in one node) against the formula in float64,
and with other bases than a dense one."""

import pytest
import torch
from kernel_checks import assert_close, quantized
from lorakernels import tune
from lorakernels.nodes import projection_node
from lorakernels.nodes.heads import Heads
from lorakernels.nodes.member import Member
from lorakernels.nodes.projection import Projection
from lorakernels.nodes.projection_node import project
from lorakernels.ops.nf4 import dequantize_reference
from lorakernels.ops.rms_norm import Norm, rms_norm_reference
from lorakernels.ops.rope import rope_reference
from nodes import F64, NODES, check_all, fix_seeds, leaves, masks_of, member, plain


def qkv(dtype=F64, bias=False, r=(3, 0, 4), p=0.0):
    return [member(n, w, 20, ri, dtype, bias=bias, p=p) for n, w, ri in zip("qkv", (16, 8, 8), r, strict=True)]


@pytest.mark.parametrize("form", ["one", "addmm"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("offset, head_norm, rotate", [(0.0, False, True), (1.0, True, True), (0.0, False, False)])
def test_norm_qkv_rope(form, merged, offset, head_norm, rotate):
    members = qkv(bias=True)
    groups = [Projection(members)] if merged else [Projection([m]) for m in members]
    x, weight = torch.randn(2, 5, 20, dtype=F64, requires_grad=True), torch.randn(20, dtype=F64, requires_grad=True)
    cos, sin = torch.randn(1, 5, 8, dtype=F64), torch.randn(1, 5, 8, dtype=F64)
    wq, wk = (torch.rand(8, dtype=F64) if head_norm else None for _ in range(2))
    heads = Heads(2, 1, 8, rotate, 1e-5 if head_norm else None)
    with tune.forced(form):
        got = project(
            x, groups, norm=Norm(1e-6, offset), norm_weight=weight, heads=heads, cos=cos, sin=sin, head_norms=(wq, wk),
            pass_through=True,
        )  # fmt: skip
        y = plain(members, rms_norm_reference(x, weight, 1e-6, offset))
        q, k, v = (t.unflatten(-1, (-1, 8)) for t in y.split((16, 8, 8), -1))
        if rotate:
            q, k = rope_reference(q, cos, sin, wq, 1e-5), rope_reference(k, cos, sin, wk, 1e-5)
        inputs = [x, weight, *leaves(members)]
        check_all(got, [q, k, v, x * 1], inputs, inputs)


def test_a_gradient_with_spare_columns_is_used_where_it_lies(monkeypatch):
    """The norm's backward leaves room behind its dX; the projection before it puts dS there, and nothing is copied."""
    first, second = Projection([member("a", 12, 20, 4)]), Projection([member("b", 6, 12, 2)])
    x, weight = torch.randn(5, 20, dtype=F64, requires_grad=True), torch.rand(12, dtype=F64)
    seen, original = [], projection_node.output_gradient

    def remember(projection, dy, *rest):
        gradient = original(projection, dy, *rest)
        if projection is first:
            seen.append((dy, gradient))
        return gradient

    monkeypatch.setattr(projection_node, "output_gradient", remember)
    y = project(project(x, [first]), [second], norm=Norm(1e-6), norm_weight=weight, spare=first.p)
    wanted = plain(second.members, rms_norm_reference(plain(first.members, x), weight, 1e-6))
    inputs = [x, *leaves([*first.members, *second.members])]
    check_all([y], [wanted], inputs, inputs)
    ((dy, gradient),) = seen
    assert gradient.both.data_ptr() == dy.data_ptr() and gradient.both.shape == (5, 12 + first.p)


@NODES
def test_the_whole_attention_node(ranks, tokens, form, merged, p, more, device, dtype, monkeypatch):
    """Where Triton runs: norm, q, k, v, head norms, RoPE and what passes through, with every gradient."""
    size, k = 64, 40
    members = [
        member(name, w * size, k, r, dtype, bias=True, scale=1.0 + r / 64, p=p, device=device)
        for name, w, r in zip("qkv", (2, 1, 1), ranks, strict=True)
    ]
    groups = [Projection(members)] if merged else [Projection([m]) for m in members]
    x, weight = (t.to(device, dtype).requires_grad_() for t in (torch.randn(2, tokens, k), torch.rand(k) + 0.5))
    angle = torch.rand(1, tokens, size, device=device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = Heads(2, 1, size, True, 1e-5 if more else None)
    norms = [torch.rand(size, device=device).to(dtype) + 0.5 if more else None for _ in "qk"]
    seeds = fix_seeds(monkeypatch, members, device) if p else None
    with tune.forced(form):
        got = project(
            x, groups, norm=Norm(1e-6, 1.0), norm_weight=weight, heads=heads,
            cos=cos, sin=sin, head_norms=tuple(norms), pass_through=True,
        )  # fmt: skip
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        masks = None if seeds is None else masks_of(members, x, seeds)
        y = plain(members, rms_norm_reference(*wide, 1e-6, 1.0), masks)
        q, key, v = (t.unflatten(-1, (-1, size)) for t in y.split([m.shape[0] for m in members], -1))
        turn = [None if n is None else n.double() for n in norms]
        q, key = (rope_reference(t, cos.double(), sin.double(), n, 1e-5) for t, n in zip((q, key), turn, strict=True))
        params = leaves(members)
        check_all(got, [q, key, v, wide[0] * 1], [x, weight, *params], [*wide, *params], dtype, 4)


def test_unused_outputs_and_empty_batches():
    members = qkv()
    heads, weight = Heads(2, 1, 8), torch.ones(20, dtype=F64)
    cos = sin = torch.ones(1, 5, 8, dtype=F64)
    x = torch.randn(2, 5, 20, dtype=F64, requires_grad=True)
    kw = {"norm": Norm(1e-6), "norm_weight": weight, "heads": heads, "cos": cos, "sin": sin}
    q, _, _ = project(x, [Projection(members)], **kw)
    y = plain(members[:1], rms_norm_reference(x, weight)).unflatten(-1, (-1, 8))
    check_all([q], [rope_reference(y, cos, sin)], [x, members[0].a], [x, members[0].a])
    q, k, v = project(x[:0], [Projection(members)], **kw)
    assert (q.shape, k.shape, v.shape) == ((0, 5, 2, 8), (0, 5, 1, 8), (0, 5, 1, 8))
    (q.sum() + k.sum() + v.sum()).backward()
    assert members[0].a.grad.abs().max() == 0


def test_nf4_bases():
    def quantized_member(name, n, k, r):
        packed, state = quantized(n, k, 8, True, "cpu")
        state.dtype = F64
        weight = torch.nn.Parameter(packed, requires_grad=False)
        like = member(name, n, k, r)
        return Member(name, weight, None, like.a, like.b, None, 2.0, 0.0, state), dequantize_reference(packed, state)

    (m1, w1), (m2, w2) = quantized_member("q", 6, 16, 2), quantized_member("k", 4, 16, 3)
    x = torch.randn(5, 16, dtype=F64, requires_grad=True)
    group = Projection([m1, m2])
    got = project(x, [group])
    dense = [
        Member(m.name, torch.nn.Parameter(w.double(), requires_grad=False), None, m.a, m.b, None, 2.0)
        for m, w in ((m1, w1), (m2, w2))
    ]
    inputs = [x, *leaves([m1, m2])]
    check_all([got], [plain(dense, x)], inputs, inputs)
    assert group.buffer is None, "a quantized weight is never kept expanded"


def test_fp8_base_leaves_the_adapters_exact():
    """W's product is within FP8's error; dB, which never sees W, is as exact as without it."""
    torch.manual_seed(1)
    m = member("a", 48, 64, 4, torch.float32)
    x = torch.randn(32, 64, requires_grad=True)
    got = project(x, [Projection([m], fp8=True)])
    wanted = plain([m], x, dtype=torch.float32)
    assert 1e-4 < (got - wanted).norm() / wanted.norm() < 0.05
    grad = torch.randn_like(wanted)
    a, b = (torch.autograd.grad(y, [x, m.a, m.b], grad) for y in (got, wanted))
    assert (a[0] - b[0]).norm() / b[0].norm() < 0.05
    assert_close(a[1], b[1], torch.float32, 2)
    assert_close(a[2], b[2], torch.float32, 2)


def test_a_norm_without_its_weight():
    x, groups = torch.zeros(1, 2, 20, dtype=F64), [Projection(qkv())]
    with pytest.raises(ValueError, match="a norm needs its weight"):
        project(x, groups, norm=Norm(1e-6))
    with pytest.raises(ValueError, match="head norms need their weights"):
        project(x, groups, heads=Heads(2, 1, 8, True, 1e-6), head_norms=(torch.ones(8), None))
