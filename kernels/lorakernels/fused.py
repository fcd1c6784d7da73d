"""The autograd functions that a decoder layer is made of, over the kernels of this package.

`project`: [residual stream →] [RMSNorm →] LoRA projections [→ head norms → RoPE], one node; q, k, v for attention.
`gated_mlp`: [x + residual →] [RMSNorm →] gate, up → act(gate)·up → down [+ x], one node.

Saved for each token: the node's input, gate and up, S (p wide) and 1/rms; the norms' outputs and act(gate)·up are made
again. q, k and v are kept by attention, in the one buffer they were born in. A norm's output is not even made again for
dA = dSᵀ·Y: as Y = rstd·h·w, dA = w · ((rstd·dS)ᵀ·h). (In float16 the product rstd·dS could overflow, so there it is.)
Run: python -m pytest tests/lorakernels/test_fused.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import glu, tune
from .linear_cross_entropy import mm_in
from .pack import pack_into
from .projection import Operand, Projection
from .rms_norm import backward_into as norm_backward_into
from .rms_norm import forward_into as norm_into
from .rms_norm import forward_lora_into as norm_lora_into
from .rope import rotate_into
from .runtime import TILES, check, rows


@dataclass(frozen=True)
class Norm:
    """RMSNorm's constants; its weight travels as a tensor argument."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Heads:
    """How the projections' output splits into q, k, v, and what happens to q and k."""

    n_q: int
    n_k: int
    size: int
    rotate: bool = True
    norm_eps: float | None = None  # Qwen3's head norms; their weights travel as tensor arguments

    @property
    def widths(self) -> list[int]:
        return [self.n_q * self.size, self.n_k * self.size, self.n_k * self.size]

    def split(self, y: torch.Tensor, lead: torch.Size) -> list[torch.Tensor]:
        """Views (B, S, H, D) of q, k, v in y (B·S, ≥ N)."""
        y = y.unflatten(0, lead)
        return [
            t.unflatten(-1, (t.shape[-1] // self.size, self.size))
            for t in y[..., : sum(self.widths)].split(self.widths, -1)
        ]


def _no_autocast(x: torch.Tensor):
    """The functions fix their dtypes themselves; autocast inside would cast the parameters' gradients."""
    return torch.autocast(x.device.type, enabled=False)


def compute_dtype(x: torch.Tensor, weight_dtype: torch.dtype) -> torch.dtype:
    """What a linear would compute in: autocast's dtype where it is on, else the frozen weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight_dtype


# ---- the operand [X | S] ---------------------------------------------------------------------------------------------
def _fill(x, residual, h, norm, weight, groups: list[Projection], ops: list[Operand], seeds, dtype):
    """(buffer with X, rstd, S of each group); a single group's S lies behind X already."""
    first, m = groups[0], x.shape[0]
    k = first.k
    buffer = torch.empty(m, k + max(g.p for g in groups), dtype=dtype, device=x.device)
    single = len(groups) == 1 and first.p > 0 and seeds[0] is None
    if single:
        rstd = _fill_fused(x, residual, h, norm, weight, ops[0].a, buffer)
        return buffer, rstd, [buffer[:, k:]]
    rstd = None
    if norm is None:
        buffer[:, :k].copy_(x)
    else:
        rstd = norm_into(x, residual, weight, norm.eps, norm.offset, buffer[:, :k], h)
    out = []
    for g, op, seed in zip(groups, ops, seeds, strict=True):
        s = torch.empty(m, g.p, dtype=dtype, device=x.device)
        g.lora_input(buffer[:, :k], op, seed, s)
        out.append(s)
    return buffer, rstd, out


def _fill_fused(x, residual, h, norm, weight, a, buffer):
    k = x.shape[1]

    def plain():
        if norm is None:
            return pack_into(x, a, buffer, None)
        rstd = norm_into(x, residual, weight, norm.eps, norm.offset, buffer[:, :k], h)
        torch.mm(buffer[:, :k], a.t(), out=buffer[:, k:])
        return rstd

    def fused(tile):
        if norm is None:
            return pack_into(x, a, buffer, tile)
        return norm_lora_into(x, residual, weight, norm.eps, norm.offset, buffer, a, h, tile)

    forms = {**{tile: partial(fused, tile) for tile in TILES}, "plain": plain}
    key = (tune.bucket(x.shape[0]), k, a.shape[0], buffer.dtype, residual is not None)
    return forms[tune.pick("norm" if norm else "pack", key, forms, x.device)]()


def _outputs(groups, ops, buffer, s_list, out=None):
    """Y (M, ΣN) of all groups side by side."""
    if len(groups) == 1:
        if groups[0].p and s_list[0].data_ptr() != buffer[:, groups[0].k :].data_ptr():
            buffer[:, groups[0].k :].copy_(s_list[0])
        return groups[0].forward(buffer, ops[0])
    y = torch.empty(buffer.shape[0], sum(g.n for g in groups), dtype=buffer.dtype, device=buffer.device)
    at = 0
    for g, op, s in zip(groups, ops, s_list, strict=True):
        part = buffer[:, : g.k + g.p]
        part[:, g.k :].copy_(s)
        g.forward(part, op, out=y[:, at : at + g.n])
        at += g.n
    return y


def _lora_gradients(group, op, d, s, needed, norm_parts, x, seeds):
    """Gradients of a group's parameters. norm_parts = (h, rstd, weight, norm) lets dA do without X; else x is X."""
    da = None
    any_a = any(need and m.a is not None for need, m in zip(needed[::4], group.members, strict=True))
    if any_a and seeds is None:
        ds = d[:, group.n :]
        dtype = next(m.a.dtype for m in group.members if m.a is not None)
        if x is None:
            h, rstd, weight, norm = norm_parts
            scaled = (ds * rstd[:, None]).to(ds.dtype)
            da = mm_in(scaled.t(), h.to(ds.dtype), dtype) * (weight + norm.offset)
        else:
            da = mm_in(ds.t(), x, dtype)
    return group.parameter_gradients(d, s, da, needed, x, seeds)


def _normed_again(h, rstd, weight, norm, dtype):
    out = torch.empty(h.shape, dtype=dtype, device=h.device)
    norm_into(h, None, weight, norm.eps, norm.offset, out)
    return out


def _needs_x(groups, seeds, dtype) -> bool:
    return any(s is not None for s in seeds) or dtype == torch.float16 or not groups[0].p


# ---- one input, several projections ----------------------------------------------------------------------------------
class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, norm_weight, cos, sin, wq, wk, *parameters):
        groups, norm, heads, dtype = call["groups"], call["norm"], call["heads"], call["dtype"]
        with _no_autocast(x):
            flat = rows(x)
            ops = [g.operand(dtype) for g in groups]
            seeds = [g.seeds(x.device) if call["training"] else None for g in groups]
            if norm is None and not any(g.p for g in groups) and flat.dtype == dtype:
                buffer, rstd, s_list = flat, None, [flat[:, :0]] * len(groups)
            else:
                buffer, rstd, s_list = _fill(flat, None, None, norm, norm_weight, groups, ops, seeds, dtype)
            y = _outputs(groups, ops, buffer, s_list)
            kept_s = [g.scale_columns(s) for g, s in zip(groups, s_list, strict=True)]
            outs, raw = _split_heads(y, x, heads, cos, sin, wq, wk)
        ctx.call, ctx.shape = call, x.shape
        kept_x = flat if norm is not None or any(g.p for g in groups) else None
        ctx.save_for_backward(kept_x, norm_weight, rstd, cos, sin, wq, wk, raw, *kept_s, *seeds, *parameters)
        ctx.set_materialize_grads(False)
        return (*outs, x) if call["pass_through"] else outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        call, groups, dtype = ctx.call, ctx.call["groups"], ctx.call["dtype"]
        x, weight, rstd, cos, sin, wq, wk, raw, *rest = ctx.saved_tensors
        kept_s, seeds = rest[: len(groups)], rest[len(groups) : 2 * len(groups)]
        d_pass = grads[-1] if call["pass_through"] else None
        d_outs = grads[:-1] if call["pass_through"] else grads
        device = next((g.device for g in grads if g is not None), None)
        if device is None:
            return (None,) * (7 + len(ctx.needs_input_grad[7:]))
        with torch.autocast(device.type, enabled=False):
            ops = [g.operand_again(dtype) for g in groups]
            ds = _output_gradients(d_outs, ctx, groups, ops, raw, cos, sin, wq, wk, device)
            d_x, d_weight, d_parameters = _input_side(ctx, groups, ops, ds, kept_s, seeds, x, rstd, weight, d_pass)
        return None, d_x, d_weight, None, None, None, None, *d_parameters


def _split_heads(y, x, heads, cos, sin, wq, wk):
    """(outputs, raw): q, k, v rotated in place in y; with head norms q and k get a place of their own, y is kept."""
    if heads is None:
        return (y.view(*x.shape[:-1], y.shape[-1]),), None
    q, k, v = heads.split(y, x.shape[:-1])
    norms = (wq, wk) if heads.norm_eps is not None else None
    if heads.rotate:
        out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device) if norms else q
        out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device) if norms else k
        rotate_into(q, k, cos, sin, out_q, out_k, norms=norms, eps=heads.norm_eps or 0.0)
        q, k = out_q, out_k
    return (q, k, v), y if norms else None


def _output_gradients(d_outs, ctx, groups, ops, raw, cos, sin, wq, wk, device):
    """[dY | dS] of each group."""
    heads, dtype, m = ctx.call["heads"], ctx.call["dtype"], ctx.shape[:-1].numel()
    if heads is None:
        dy = d_outs[0]
        n = sum(g.n for g in groups)
        dy = torch.zeros(m, n, dtype=dtype, device=device) if dy is None else rows(dy).to(dtype)
        parts = dy.split([g.n for g in groups], -1)
        return [g.pack_gradient(part, op) for g, part, op in zip(groups, parts, ops, strict=True)]
    single = len(groups) == 1
    wide = torch.empty(m, sum(heads.widths) + (groups[0].p if single else 0), dtype=dtype, device=device)
    _heads_backward(d_outs, heads, heads.split(wide, ctx.shape[:-1]), raw, cos, sin, wq, wk, ctx.shape[:-1])
    if single:
        groups[0].gradient_tail(wide, ops[0])
        return [wide]
    parts = wide.split([g.n for g in groups], -1)
    return [g.pack_gradient(part, op) for g, part, op in zip(groups, parts, ops, strict=True)]


def _heads_backward(d_outs, heads, into, raw, cos, sin, wq, wk, lead) -> None:
    dq, dk, dv = (torch.zeros_like(t) if d is None else d for d, t in zip(d_outs, into, strict=True))
    if not heads.rotate:
        for d, t in zip((dq, dk, dv), into, strict=True):
            t.copy_(d)
        return
    norms = (wq, wk) if heads.norm_eps is not None else None
    raw = None if raw is None else heads.split(raw, lead)[:2]
    rotate_into(
        dq, dk, cos, sin, into[0], into[1], v=dv, out_v=into[2], raw=raw, norms=norms, eps=heads.norm_eps or 0.0,
        backward=True,
    )  # fmt: skip


def _input_side(ctx, groups, ops, ds, kept_s, seeds, x, rstd, weight, d_pass):
    """Gradients of x, of the norm's weight, and of all parameters."""
    norm, dtype = ctx.call["norm"], ctx.call["dtype"]
    source = None
    if norm is None:
        source = None if x is None else x.to(dtype)
    elif _needs_x(groups, seeds, dtype):
        source = _normed_again(x, rstd, weight, norm, dtype)
    d_parameters, at = [], 7
    for g, op, d, s, seed in zip(groups, ops, ds, kept_s, seeds, strict=True):
        needed = list(ctx.needs_input_grad[at : at + 4 * len(g.members)])
        at += 4 * len(g.members)
        d_parameters += _lora_gradients(g, op, d, s, needed, (x, rstd, weight, norm), source, seed)
    if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
        return None, None, d_parameters
    dn = groups[0].backward_input(ds[0], ops[0], seeds[0])
    for g, op, d, seed in zip(groups[1:], ops[1:], ds[1:], seeds[1:], strict=True):
        dn += g.backward_input(d, op, seed)
    d_x, d_weight = _norm_backward(dn, x, weight, rstd, norm, d_pass, ctx.shape, ctx.needs_input_grad[2])
    return d_x, d_weight, d_parameters


def _norm_backward(dn, h, weight, rstd, norm, d_residual, shape, with_dw):
    if norm is None:
        dx = dn.view(shape)
        return (dx if d_residual is None else dx + d_residual), None
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    d_residual = None if d_residual is None else rows(d_residual)
    dw = norm_backward_into(dn, h, weight, rstd, norm.offset, d_residual, dx, with_dw)
    return dx.view(shape), None if dw is None else dw.to(weight.dtype)


def project(
    x, groups, *, norm: Norm | None = None, norm_weight=None, heads: Heads | None = None, cos=None, sin=None,
    head_norms=(None, None), pass_through: bool = False, training: bool = True,
):  # fmt: skip
    """Y (..., N); or q, k, v as (B, S, H, D) with `heads`; pass_through adds x itself, so that the residual's gradient
    is added inside the norm's backward. groups: one Projection, or several that share x (their outputs lie side by
    side).
    """
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    dtype = compute_dtype(x, groups[0].compute_dtype)
    call = {
        "groups": groups,
        "norm": norm,
        "heads": heads,
        "pass_through": pass_through,
        "training": training,
        "dtype": dtype,
    }
    parameters = [t for g in groups for m in g.members for t in m.parameters]
    outs = Project.apply(call, x, norm_weight, cos, sin, *head_norms, *parameters)
    return outs[0] if len(outs) == 1 else outs


# ---- the gated MLP ---------------------------------------------------------------------------------------------------
class GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, residual, norm_weight, *parameters):
        groups, down, norm, dtype = call["groups"], call["down"], call["norm"], call["dtype"]
        with _no_autocast(x):
            flat, res = rows(x), None if residual is None else rows(residual)
            ops, op_down = [g.operand(dtype) for g in groups], down.operand(dtype)
            seeds = [g.seeds(x.device) if call["training"] else None for g in (*groups, down)]
            h = flat if res is None else torch.empty(flat.shape, dtype=torch.result_type(flat, res), device=x.device)
            buffer, rstd, s_list = _fill(flat, res, h, norm, norm_weight, groups, ops, seeds[:-1], dtype)
            gate_up = _outputs(groups, ops, buffer, s_list)
            kept_s = [g.scale_columns(s) for g, s in zip(groups, s_list, strict=True)]
            del buffer, s_list  # the widest operand comes next
            packed = _activate(gate_up, call["act"], down, op_down, seeds[-1])
            out = _down(packed, h, down, op_down, call["add"])
            kept_s.append(down.scale_columns(packed[:, down.k :]))
        ctx.call, ctx.shape, ctx.dtypes = call, x.shape, (x.dtype, None if residual is None else residual.dtype)
        ctx.save_for_backward(h, norm_weight, rstd, gate_up, *kept_s, *seeds, *parameters)
        ctx.set_materialize_grads(False)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return (out, h.view(x.shape) if residual is not None else x) if call["pass_through"] else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Any, d_pass: Any = None):
        call = ctx.call
        groups, down, dtype = call["groups"], call["down"], call["dtype"]
        n_in = len(ctx.needs_input_grad)
        if grad is None and d_pass is None:
            return (None,) * n_in
        if grad is None:
            grad = torch.zeros(*ctx.shape[:-1], down.n, dtype=dtype, device=d_pass.device)
        h, weight, rstd, gate_up, *rest = ctx.saved_tensors
        n = len(groups) + 1
        kept_s, seeds = rest[:n], rest[n : 2 * n]
        n_down = 4 * len(down.members)
        with _no_autocast(grad):
            ops, op_down = [g.operand_again(dtype) for g in groups], down.operand_again(dtype)
            d_down = down.pack_gradient(rows(grad).to(dtype), op_down)
            dh = down.backward_input(d_down, op_down, seeds[-1])
            ds = _activation_backward(gate_up, dh, call["act"], groups, ops)  # dh now holds act(gate) * up
            needed = list(ctx.needs_input_grad[n_in - n_down :])
            last = _lora_gradients(down, op_down, d_down, kept_s[-1], needed, None, dh, seeds[-1])
            del dh, d_down
            d_x, d_weight, first = _mlp_input_side(ctx, groups, ops, ds, kept_s, seeds, h, rstd, weight, grad, d_pass)
        d_res = None if ctx.dtypes[1] is None or d_x is None else d_x.to(ctx.dtypes[1])
        return None, None if d_x is None else d_x.to(ctx.dtypes[0]), d_res, d_weight, *first, *last


def _activate(gate_up, act, down, op_down, seed):
    """[act(gate)·up | S of the down projection]."""
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    packed = torch.empty(m, width + down.p, dtype=gate_up.dtype, device=gate_up.device)

    def plain():
        glu.forward_into(gate, up, packed[:, :width], act)
        down.lora_input(packed[:, :width], op_down, seed, packed[:, width:])

    forms = {"plain": plain}
    if down.p and seed is None:
        forms = {t: partial(glu.forward_lora_into, gate, up, packed, op_down.a, act, t) for t in TILES} | forms
    forms[tune.pick("glu", (tune.bucket(m), width, down.p, act, packed.dtype), forms, packed.device)]()
    return packed


def _down(packed, h, down, op_down, add: bool):
    if not add:
        return down.forward(packed, op_down)
    if h.dtype == packed.dtype:
        return down.forward(packed, op_down, residual=h)
    return h + down.forward(packed, op_down)


def _activation_backward(gate_up, dh, act, groups, ops):
    """[d gate, d up | dS] of each group; dh is overwritten with act(gate)·up."""
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    ds = [torch.empty(m, g.n + g.p, dtype=dh.dtype, device=dh.device) for g in groups]
    if len(groups) > 1:
        glu.backward_into(gate, up, dh, ds[0][:, :width], ds[1][:, :width], act, h_into_grad=True)
        for g, op, d in zip(groups, ops, ds, strict=True):
            g.gradient_tail(d, op)
        return ds
    tile = None
    if groups[0].p:
        # Measured on a copy: every run overwrites dh with another meaning, so a second run on it would be of garbage.
        key = (tune.bucket(m), width, groups[0].p, act, dh.dtype)
        tile = tune.pick("glu backward", key, _backward_forms(gate, up, dh, ds[0], ops[0].sb, act), dh.device)
    glu.backward_lora_into(gate, up, dh, ds[0], ops[0].sb, act, None if tile == "plain" else tile)
    return ds


def _backward_forms(gate, up, dh, d, sb, act):
    copies = []

    def run(tile):
        if not copies:
            copies.append(dh.clone())
        glu.backward_lora_into(gate, up, copies[0], d, sb, act, tile)

    return {**{tile: partial(run, tile) for tile in TILES}, "plain": partial(run, None)}


def _mlp_input_side(ctx, groups, ops, ds, kept_s, seeds, h, rstd, weight, grad, d_pass):
    norm, dtype = ctx.call["norm"], ctx.call["dtype"]
    source = None
    if norm is None:
        source = h.to(dtype)
    elif _needs_x(groups, seeds[:-1], dtype):
        source = _normed_again(h, rstd, weight, norm, dtype)
    out, at = [], 4
    for g, op, d, s, seed in zip(groups, ops, ds, kept_s, seeds, strict=False):
        needed = list(ctx.needs_input_grad[at : at + 4 * len(g.members)])
        at += 4 * len(g.members)
        out += _lora_gradients(g, op, d, s, needed, (h, rstd, weight, norm), source, seed)
    if not any(ctx.needs_input_grad[1:4]):
        return None, None, out
    dn = groups[0].backward_input(ds[0], ops[0], seeds[0])
    for g, op, d, seed in zip(groups[1:], ops[1:], ds[1:], seeds[1:], strict=False):
        dn += g.backward_input(d, op, seed)
    d_residual = d_pass
    if ctx.call["add"]:
        d_residual = grad if d_pass is None else grad + d_pass
    d_x, d_weight = _norm_backward(dn, h, weight, rstd, norm, d_residual, ctx.shape, ctx.needs_input_grad[3])
    return d_x, d_weight, out


def gated_mlp(
    x, groups, down, act: str, *, norm: Norm | None = None, norm_weight=None, residual=None, add: bool = False,
    pass_through: bool = False, training: bool = True,
):  # fmt: skip
    """down(act(gate)·up) of norm(x + residual); add: plus x + residual; pass_through: (that, x + residual).

    groups: [Projection of gate and up], or one of each. act: "silu", "gelu" or "gelu_tanh"."""
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    check(norm is not None or residual is None, "a residual needs a norm", x=x, residual=residual)
    check(sum(g.n for g in groups) == 2 * down.k, "gate and up do not fit down", x=x)
    dtype = compute_dtype(x, groups[0].compute_dtype)
    call = {
        "groups": groups,
        "down": down,
        "norm": norm,
        "act": act,
        "add": add,
        "pass_through": pass_through,
        "training": training,
        "dtype": dtype,
    }
    parameters = [t for g in (*groups, down) for m in g.members for t in m.parameters]
    return GatedMLP.apply(call, x, residual, norm_weight, *parameters)
