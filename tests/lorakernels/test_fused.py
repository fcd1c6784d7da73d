"""The nodes of a decoder layer (norm + q,k,v + RoPE; norm + MLP + residual) against the formula in float64."""

import pytest
import torch
from kernel_checks import assert_close
from lorakernels import tune
from lorakernels.fused import Heads, Norm, gated_mlp, project
from lorakernels.glu import activation
from lorakernels.projection import Member, Projection
from lorakernels.rms_norm import rms_norm_reference
from lorakernels.rope import rope_reference
from test_projection import fix_seeds, leaves, masks_of, member, plain

F64 = torch.float64


def check_all(got, wanted, inputs, wide, dtype=F64, times=1.0):
    """Outputs and gradients of lists of outputs with respect to lists of inputs."""
    torch.manual_seed(5)
    grads = [torch.randn(t.shape, dtype=F64).to(t.device) for t in wanted]
    a = torch.autograd.grad(got, inputs, [g.to(t.dtype) for g, t in zip(grads, got, strict=True)])
    b = torch.autograd.grad(wanted, wide, grads)
    for x, y in zip((*got, *a), (*wanted, *b), strict=True):
        assert_close(x, y, dtype, times)


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


def mlp_reference(x, residual, weight, members, down, act, add, offset=0.0, masks=None, down_masks=None):
    h = x if residual is None else x + residual
    y = h if weight is None else rms_norm_reference(h, weight, 1e-6, offset)
    gate, up = plain(members, y, masks).chunk(2, -1)
    out = plain([down], activation(gate, act) * up, down_masks)
    return out + h if add else out, h


def test_backward_overwrites_only_what_nobody_asks_for_again():
    members, down = [member("gate", 18, 12, 4), member("up", 18, 12, 2)], member("down", 12, 18, 3)
    x = torch.randn(2, 3, 12, dtype=F64, requires_grad=True)
    y = gated_mlp(x, [Projection(members)], Projection([down]), "silu", add=True, norm=Norm(1e-6), norm_weight=x[0, 0])
    inputs = [x, *leaves([*members, down])]
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    last = torch.autograd.grad(y.sum(), inputs)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, last, strict=True))


def test_a_gradient_with_spare_columns_is_used_where_it_lies():
    """The norm's backward leaves room behind its dX; the projection before it puts dS there, and nothing is copied."""
    first, second = Projection([member("a", 12, 20, 4)]), Projection([member("b", 6, 12, 2)])
    x, weight = torch.randn(5, 20, dtype=F64, requires_grad=True), torch.rand(12, dtype=F64)
    packed = []
    original = first.gradient
    first.gradient = lambda dy, *rest: packed.append((dy, original(dy, *rest))) or packed[-1][1]
    y = project(project(x, [first]), [second], norm=Norm(1e-6), norm_weight=weight, spare=first.p)
    wanted = plain(second.members, rms_norm_reference(plain(first.members, x), weight, 1e-6))
    inputs = [x, *leaves([*first.members, *second.members])]
    check_all([y], [wanted], inputs, inputs)
    ((dy, gradient),) = packed
    assert gradient.both.data_ptr() == dy.data_ptr() and gradient.both.shape == (5, 12 + first.p)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    "with_norm, with_residual, add", [(True, True, True), (True, False, True), (False, False, False)]
)
def test_gated_mlp(act, merged, with_norm, with_residual, add):
    members, down = [member("gate", 18, 12, 4), member("up", 18, 12, 2)], member("down", 12, 18, 3, bias=True)
    groups = [Projection(members)] if merged else [Projection([m]) for m in members]
    x, residual = (torch.randn(2, 3, 12, dtype=F64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, dtype=F64, requires_grad=True) if with_norm else None
    residual = residual if with_residual else None
    norm = Norm(1e-6) if with_norm else None
    got = gated_mlp(x, groups, Projection([down]), act, norm=norm, norm_weight=weight, residual=residual, add=add)
    wanted = mlp_reference(x, residual, weight, members, down, act, add)[0]
    inputs = [t for t in (x, residual, weight) if t is not None] + leaves([*members, down])
    check_all([got], [wanted], inputs, inputs)


def test_pass_through_of_the_mlp():
    """Gemma 2 norms the MLP's output before the residual, so both leave the node."""
    members, down = [member("gate_up", 36, 12, 4)], member("down", 12, 18, 3)
    x, residual = (torch.randn(5, 12, dtype=F64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, dtype=F64)
    got = gated_mlp(
        x, [Projection(members)], Projection([down]), "gelu_tanh", norm=Norm(1e-6, 1.0), norm_weight=weight,
        residual=residual, pass_through=True,
    )  # fmt: skip
    wanted = mlp_reference(x, residual, weight, members, down, "gelu_tanh", False, 1.0)
    inputs = [x, residual, *leaves([*members, down])]
    check_all(got, wanted, inputs, inputs)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_low_precision(name):
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    members, down = [member("gate", 32, 24, 4, dtype), member("up", 32, 24, 4, dtype)], member("down", 24, 32, 4, dtype)
    x = torch.randn(6, 24).to(dtype).requires_grad_()
    weight = torch.rand(24).to(dtype)
    got = gated_mlp(x, [Projection(members)], Projection([down]), "silu", norm=Norm(1e-6), norm_weight=weight, add=True)
    wide = x.detach().double().requires_grad_()
    wanted = mlp_reference(wide, None, weight.double(), members, down, "silu", True)[0]
    params = leaves([*members, down])
    check_all([got], [wanted], [x, *params], [wide, *params], dtype, 4)


# Ranks of q, k, v or of gate, up, down; tokens of each of two sequences; form; merged; dropout; whether there are head
# norms, or the residual is added. Spread over few cases: the interpreter spends a second or two on the masks of one.
NODES = pytest.mark.parametrize(
    "ranks, tokens, form, merged, p, more",
    [
        ((17, 17, 17), 5, "one", True, 0.0, True),
        ((1, 7, 0), 5, "addmm", True, 0.0, False),
        ((256, 3, 17), 1, "apart", False, 0.0, True),
        ((7, 7, 70), 5, "plain", True, 0.0, True),
        ((17, 17, 17), 5, "apart", True, 0.3, True),
        ((1, 7, 256), 2, "one", False, 0.3, False),
        ((3, 3, 3), 1, "plain", True, 0.3, True),
    ],
)


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


@NODES
def test_the_whole_mlp_node(ranks, tokens, form, merged, p, more, device, dtype, monkeypatch):
    """Where Triton runs: residual, norm, gate, up, activation and down, with every gradient."""
    k, width = 40, 64
    gate, up, down = (
        member(name, n, k_in, r, dtype, scale=1.0 + r / 64, p=p, device=device)
        for name, n, k_in, r in zip(("gate", "up", "down"), (width, width, k), (k, k, width), ranks, strict=True)
    )
    groups = [Projection([gate, up])] if merged else [Projection([gate]), Projection([up])]
    x, residual, weight = (
        t.to(device, dtype).requires_grad_()
        for t in (torch.randn(2, tokens, k), torch.randn(2, tokens, k), torch.rand(k) + 0.5)
    )
    seeds = fix_seeds(monkeypatch, [gate, up, down], device) if p else None
    with tune.forced(form):
        got = gated_mlp(
            x, groups, Projection([down]), "silu", norm=Norm(1e-6), norm_weight=weight, residual=residual, add=more
        )
        wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
        masks = [None, None]
        if seeds is not None:
            between = torch.empty(2, tokens, width, device=device, dtype=dtype)
            masks = [masks_of([gate, up], x, seeds[:2]), masks_of([down], between, seeds[2:])]
        wanted = mlp_reference(*wide, [gate, up], down, "silu", more, 0.0, *masks)[0]
        params = leaves([gate, up, down])
        check_all([got], [wanted], [x, residual, weight, *params], [*wide, *params], dtype, 4)


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


def test_what_is_saved():
    """For a token: h, gate, up, and S of both GEMMs. Not the norm's output, not act(gate)·up."""
    members = [member("gate", 64, 32, 4, torch.float32), member("up", 64, 32, 4, torch.float32)]
    down = member("down", 32, 64, 4, torch.float32)
    groups, x = [Projection(members)], torch.randn(7, 32, requires_grad=True)
    own = {id(t) for t in (x, *leaves([*members, down]))}
    saved = {}

    def remember(t):
        saved[t.data_ptr()] = 0 if any(t is o for o in (x,)) or t.dim() < 2 or id(t) in own else t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        gated_mlp(x, groups, Projection([down]), "silu", norm=Norm(1e-6), norm_weight=torch.ones(32), add=True)
    parameters = sum(t.numel() for t in leaves([*members, down]))
    per_token = 32 + 128 + groups[0].p + 16
    assert sum(saved.values()) <= 7 * per_token + parameters


def test_nf4_bases():
    from lorakernels.nf4 import dequantize_reference
    from test_nf4 import quantized

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
