"""`gated_mlp` (residual, norm, gate, up, activation and down in one node) against the formula in float64."""

import pytest
import torch
from kernel_checks import assert_close
from lorakernels import tune
from lorakernels.nodes.mlp_node import gated_mlp
from lorakernels.nodes.projection import Projection
from lorakernels.ops.glu import activation
from lorakernels.ops.rms_norm import Norm, rms_norm_reference
from nodes import F64, NODES, check_all, fix_seeds, leaves, masks_of, member, plain


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


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("merged, add, tile", [(True, True, 3), (False, False, 4)])
def test_tiles_of_rows(p, merged, add, tile, device, dtype, monkeypatch):
    """Of 10 rows, which no tile divides: output and gradients are the untiled form's, under its masks."""
    gate, up, down = (
        member(name, n, k, 5, dtype, scale=1.5, p=p, device=device)
        for name, n, k in (("gate", 64, 40), ("up", 64, 40), ("down", 40, 64))
    )
    groups = [Projection([gate, up])] if merged else [Projection([gate]), Projection([up])]
    x, residual, weight = (
        t.to(device, dtype).requires_grad_() for t in (torch.randn(2, 5, 40), torch.randn(2, 5, 40), torch.rand(40))
    )
    fix_seeds(monkeypatch, [gate, up, down], device)
    inputs, made = [x, residual, weight, *leaves([gate, up, down])], []
    for rows in (None, tile):
        outs = gated_mlp(
            x, groups, Projection([down]), "silu", norm=Norm(1e-6), norm_weight=weight, residual=residual, add=add,
            pass_through=not add, tile=rows,
        )  # fmt: skip
        outs = [outs] if add else list(outs)
        torch.manual_seed(5)
        made.append([*outs, *torch.autograd.grad(outs, inputs, [torch.randn(t.shape).to(t) for t in outs])])
    for got, wanted in zip(*reversed(made), strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted.double(), dtype, 4)


def test_by_tiles_the_input_alone_is_saved():
    members = [member("gate", 64, 32, 4, torch.float32), member("up", 64, 32, 4, torch.float32)]
    down, groups = member("down", 32, 64, 4, torch.float32), [Projection(members)]
    x, saved = torch.randn(7, 32, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        y = gated_mlp(
            x, groups, Projection([down]), "silu", norm=Norm(1e-6), norm_weight=torch.ones(32), add=True, tile=2
        )
    wide = [t for t in saved.values() if t.shape[0] == 7]
    assert len(wide) == 1 and wide[0].data_ptr() == x.data_ptr() and y.shape == x.shape


@pytest.mark.parametrize("add", [True, False])
def test_an_output_that_nobody_reads_is_not_made(add, monkeypatch):
    from lorakernels.nodes import mlp_node

    members, down = [member("gate", 18, 12, 4), member("up", 18, 12, 2)], member("down", 12, 18, 3)
    x = torch.randn(2, 5, 12, dtype=F64, requires_grad=True)
    weight, grad, inputs = torch.rand(12, dtype=F64), torch.randn(2, 5, 12, dtype=F64), [x, *leaves([*members, down])]
    arguments = {"norm": Norm(1e-6), "norm_weight": weight, "add": add, "tile": 3}
    groups, last = [Projection(members)], Projection([down])
    wanted = torch.autograd.grad(gated_mlp(x, groups, last, "silu", **arguments), inputs, grad)
    monkeypatch.setattr(mlp_node, "_down", None)
    y = gated_mlp(x, groups, last, "silu", **arguments, output=False)
    assert y.shape == x.shape and y.untyped_storage().nbytes() == 8
    for got, want in zip(torch.autograd.grad(y, inputs, grad), wanted, strict=True):
        assert torch.equal(got, want)


def test_what_does_not_fit():
    groups, down = [Projection([member("gate_up", 36, 12, 4)])], Projection([member("down", 12, 18, 3)])
    x = torch.zeros(2, 12, dtype=F64)
    with pytest.raises(ValueError, match="a norm needs its weight"):
        gated_mlp(x, groups, down, "silu", norm=Norm(1e-6))
    with pytest.raises(ValueError, match="a residual needs a norm"):
        gated_mlp(x, groups, down, "silu", residual=x)
    with pytest.raises(ValueError, match="12 columns"):
        gated_mlp(x[:, 1:], groups, down, "silu")
    with pytest.raises(ValueError, match="gate and up do not fit down"):
        gated_mlp(x, groups, Projection([member("down", 12, 17, 3)]), "silu")
    with pytest.raises(ValueError, match="a tile has 1 row or more, not 0"):
        gated_mlp(x, groups, down, "silu", tile=0)
