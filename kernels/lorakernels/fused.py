"""The autograd functions that a decoder layer is made of, over the kernels of this package.

`project`: [residual stream →] [RMSNorm →] LoRA projections [→ head norms → RoPE], one node; q, k, v for attention.
`gated_mlp`: [x + residual →] [RMSNorm →] gate, up → act(gate)·up → down [+ x], one node.

Saved for each token: the node's input, gate and up, S (p wide) and 1/rms; the norms' outputs and act(gate)·up are made
again. q, k and v are kept by attention, in the one buffer they were born in. A norm's output is not even made again for
dA = dSᵀ·Y: as Y = rstd·h·w, dA = w · ((rstd·dS)ᵀ·h). (In float16 the product rstd·dS could overflow, so there it is.)
Run: python -m pytest tests/lorakernels/test_fused.py
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import _autograd

from . import glu, tune
from .adapter import Loader
from .branch import Branch
from .linear_cross_entropy import mm_in
from .lora_grad import Source
from .pack import Kept, pack_into, with_spare_columns
from .projection import Gradient, Operand, Projection, Saved, adapters_of, as_then, sums_of
from .rms_norm import backward_into as norm_backward_into
from .rms_norm import forward_into as norm_into
from .rms_norm import forward_lora_into as norm_lora_into
from .rope import rotate_into
from .runtime import TILES, check, rows, tensor_cores


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
        parts = self.n_q, self.n_k, self.n_k
        heads = y[:, : sum(parts) * self.size].unflatten(1, (sum(parts), self.size))
        return list(heads.unflatten(0, lead).split(parts, 2))


def _no_autocast(device: torch.device):
    """The functions fix their dtypes themselves; autocast inside would cast the parameters' gradients."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def compute_dtype(x: torch.Tensor, weight_dtype: torch.dtype) -> torch.dtype:
    """What a linear would compute in: autocast's dtype where it is on, else the frozen weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight_dtype


@contextlib.contextmanager
def refreshed(groups: list[Projection], loader: Loader, x: torch.Tensor):
    """Inside, the groups' operands hold today's adapters, brought there in one launch instead of one an adapter."""
    try:
        items = [g.places(compute_dtype(x, g.compute_dtype)) for g in groups]
        loader.load([item for of_group in items for item in of_group or ()])
        yield
    finally:
        for g in groups:
            g.stale()


# ---- the operand [X | S] ---------------------------------------------------------------------------------------------
@dataclass
class Incoming:
    """The rows (M, K) that come into a node. Its X is x itself, or norm(x + residual); that sum is then written to h,
    and once more to `again` where that is given."""

    x: torch.Tensor
    norm: Norm | None = None
    weight: Any = None
    residual: Any = None
    h: Any = None
    again: Any = None

    def write(self, x_out) -> Any:
        """X into x_out (M, K); returns rstd, None without a norm."""
        if self.norm is None:
            x_out.copy_(self.x)
            return None
        norm = self.norm
        return norm_into(self.x, self.residual, self.weight, norm.eps, norm.offset, x_out, self.h, self.again)

    def write_with_s(self, buffer, group: Projection, op: Operand, kept: Kept) -> Any:
        """[X | S] into buffer (M, K + p) and sS to kept, in one launch or one after the other, whichever is faster;
        returns rstd."""
        x, norm, k, a, rank = self.x, self.norm, self.x.shape[1], op.a, group.rank

        def plain():
            rstd = self.write(buffer[:, :k])
            group.lora_input(buffer[:, :k], op, None, buffer[:, k:], kept)
            return rstd

        def fused(tile):
            if norm is None:
                return pack_into(x, a, buffer, tile, rank, kept)
            arguments = x, self.residual, self.weight, norm.eps, norm.offset, buffer, a, self.h, tile, self.again
            return norm_lora_into(*arguments, rank, kept)

        forms: dict[str, Any] = {tile: partial(fused, tile) for tile in TILES} if tensor_cores(buffer, a) else {}
        forms["plain"] = plain
        key = (tune.bucket(x.shape[0]), k, rank, buffer.dtype, self.residual is not None)
        return forms[tune.pick("norm" if norm else "pack", key, forms, x.device)]()


def _fill(incoming: Incoming, groups: list[Projection], ops: list[Operand], seeds, dtype):
    """(buffer with X, rstd, S of each group, sS of each); a single group's S lies behind X already."""
    x, first = incoming.x, groups[0]
    m, k = x.shape[0], first.k
    buffer = torch.empty(m, k + max(g.p for g in groups), dtype=dtype, device=x.device)
    kept = [g.kept(m, dtype, x.device) for g in groups]
    if len(groups) == 1 and first.p > 0 and seeds[0] is None:
        rstd = incoming.write_with_s(buffer, first, ops[0], kept[0])
        return buffer, rstd, [buffer[:, k:]], [kept[0].s]
    rstd = incoming.write(buffer[:, :k])
    out = []
    for g, op, seed, room in zip(groups, ops, seeds, kept, strict=True):
        s = torch.empty(m, g.p, dtype=dtype, device=x.device)
        g.lora_input(buffer[:, :k], op, seed, s, room)
        out.append(s)
    return buffer, rstd, out, [room.s for room in kept]


def _outputs(groups, ops, buffer, s_list, out=None):
    """Y (M, ΣN) of all groups side by side; a single group's goes to out where that is given."""
    if len(groups) == 1:
        if groups[0].p and s_list[0].data_ptr() != buffer[:, groups[0].k :].data_ptr():
            buffer[:, groups[0].k :].copy_(s_list[0])
        return groups[0].forward(buffer, ops[0], out=out)
    y = torch.empty(buffer.shape[0], sum(g.n for g in groups), dtype=buffer.dtype, device=buffer.device)
    at = 0
    for g, op, s in zip(groups, ops, s_list, strict=True):
        part = buffer[:, : g.k + g.p]
        part[:, g.k :].copy_(s)
        g.forward(part, op, out=y[:, at : at + g.n])
        at += g.n
    return y


def _from_elsewhere(x, group, op, seed):
    """(Y, sS) of an X that somebody else wrote, attention say. It is copied in front of S only where the one GEMM that
    this allows is measured to be worth it."""

    def packed():
        buffer, _, s, (kept,) = _fill(Incoming(x), [group], [op], [seed], x.dtype)
        return _outputs([group], [op], buffer, s), kept

    def apart():
        s = torch.empty(x.shape[0], group.p, dtype=x.dtype, device=x.device)
        kept = group.kept(x.shape[0], x.dtype, x.device)
        group.lora_input(x, op, seed, s, kept)
        return group.forward_apart(x, s, op), kept.s

    if op.full is None or not group.p or not group.one_gemm:
        return apart()  # nothing would read the two as one
    key = (tune.bucket(x.shape[0]), group.k, group.n, group.p, x.dtype, seed is not None)
    forms = {"packed": packed, "apart": apart}
    return forms[tune.pick("from elsewhere", key, forms, x.device)]()


def _saved(groups, ops, kept_s, seeds, m: int, branch: Branch, device) -> list[Saved]:
    """What the backward of each projection of a node starts from; they share the room for their sums."""
    sums, beside = sums_of(groups, m, device), branch if branch.active else None
    return [Saved(*parts, sums, beside) for parts in zip(ops, kept_s, seeds, strict=True)]


def _parameter_gradients(groups, saved, tails, needed, source: Source | None) -> list[Any]:
    """Gradients of all parameters of groups that share an input; tails: a Gradient each."""
    out: list[Any] = []
    for g, kept, tail in zip(groups, saved, tails, strict=True):
        out += g.parameter_gradients(tail, kept, needed[len(out) : len(out) + 4 * len(g.members)], source)
    return out


def _input_gradient(groups, saved, tails):
    """dX of groups that share an input."""
    dx = None
    for g, kept, tail in zip(groups, saved, tails, strict=True):
        part = g.backward_input(tail, kept)
        dx = part if dx is None else dx.add_(part)
    return dx


def _as_parameters(gradients, parameters, saved) -> list[Any]:
    """The gradients in their parameters' dtypes; the node's sums are cast in one launch."""
    sums = saved[0].sums
    return [None if p is None else sums.cast(g, p.dtype) for g, p in zip(gradients, parameters, strict=True)]


def _of_shape(y, shape):
    """y (M, N) as (..., N), and no view to autograd, which would forbid a hook to write into it."""
    return torch.ops.aten._unsafe_view(y, [*shape[:-1], y.shape[-1]])


# ---- one input, several projections ----------------------------------------------------------------------------------
class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, norm_weight, cos, sin, wq, wk, *parameters):
        groups, norm, heads, dtype = call["groups"], call["norm"], call["heads"], call["dtype"]
        with _no_autocast(x.device):
            flat = rows(x)
            ops = [g.operand(dtype) for g in groups]
            seeds = [g.seeds(x.device) for g in groups]
            rstd = None
            if norm is None and len(groups) == 1 and flat.dtype == dtype:
                y, kept = _from_elsewhere(flat, groups[0], ops[0], seeds[0])
                kept_s = [kept]
            else:
                buffer, rstd, s_list, kept_s = _fill(Incoming(flat, norm, norm_weight), groups, ops, seeds, dtype)
                y = _outputs(groups, ops, buffer, s_list)
            outs, raw = (_of_shape(y, x.shape),), None
            if heads is not None:
                outs, raw = Rotation(heads, cos, sin, wq, wk).forward(y, x.shape[:-1])
        ctx.call, ctx.shape, ctx.adapters = call, x.shape, adapters_of(groups)
        kept_x = flat if norm is not None or any(g.p for g in groups) else None
        ctx.save_for_backward(kept_x, norm_weight, rstd, cos, sin, wq, wk, raw, *kept_s, *seeds, *parameters)
        ctx.set_materialize_grads(False)
        return (*outs, x) if call["pass_through"] else outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        call, groups, dtype = ctx.call, ctx.call["groups"], ctx.call["dtype"]
        x, weight, rstd, cos, sin, wq, wk, raw, *rest = ctx.saved_tensors
        n = len(groups)
        kept_s, seeds, parameters = rest[:n], rest[n : 2 * n], rest[2 * n :]
        d_pass = grads[-1] if call["pass_through"] else None
        d_outs = grads[:-1] if call["pass_through"] else grads
        device = next((g.device for g in grads if g is not None), None)
        if device is None:
            return (None,) * (7 + len(ctx.needs_input_grad[7:]))
        with _no_autocast(device), as_then(ctx.adapters):
            ops = [g.operand_again(dtype) for g in groups]
            m = ctx.shape[:-1].numel()
            branch = Branch(device, m * sum(g.n for g in groups))
            saved = _saved(groups, ops, kept_s, seeds, m, branch, device)
            with_dx = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
            rotation = None if call["heads"] is None else Rotation(call["heads"], cos, sin, wq, wk)
            tails = _output_gradients(d_outs, groups, saved, with_dx, rotation, raw, ctx.shape[:-1])
            source = None if x is None else Source(x, dtype, call["norm"], rstd, weight)
            with branch:
                needed = list(ctx.needs_input_grad[7:])
                d_parameters = _parameter_gradients(groups, saved, tails, needed, source)
                d_parameters = _as_parameters(d_parameters, parameters, saved)
            dx = d_weight = None
            if with_dx:
                spare, with_dw = call["spare"], ctx.needs_input_grad[2]
                dx = _input_gradient(groups, saved, tails)
                dx, d_weight = _norm_backward(dx, x, weight, rstd, call["norm"], d_pass, ctx.shape, spare, with_dw)
            branch.join()
        return None, dx, d_weight, None, None, None, None, *d_parameters


@dataclass
class Rotation:
    """What happens to q and k: the heads' layout, cos and sin of RoPE, the weights of the head norms or None."""

    heads: Heads
    cos: Any
    sin: Any
    wq: Any = None
    wk: Any = None

    @property
    def norms(self):
        return None if self.heads.norm_eps is None else (self.wq, self.wk)

    def forward(self, y, lead) -> tuple[tuple, Any]:
        """(q, k, v), rotated in place in y (M, N); and raw: with head norms q and k get a place of their own, y is
        kept."""
        q, k, v = self.heads.split(y, lead)
        if self.heads.rotate:
            out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device) if self.norms else q
            out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device) if self.norms else k
            eps = self.heads.norm_eps or 0.0
            rotate_into(q, k, self.cos, self.sin, out_q, out_k, norms=self.norms, eps=eps)
            q, k = out_q, out_k
        return (q, k, v), y if self.norms else None

    def backward(self, d_outs, wide, raw, lead) -> None:
        """The gradients of q, k, v into the first columns of wide (M, at least N)."""
        into = self.heads.split(wide, lead)
        dq, dk, dv = (torch.zeros_like(t) if d is None else d for d, t in zip(d_outs, into, strict=True))
        if not self.heads.rotate:
            for d, t in zip((dq, dk, dv), into, strict=True):
                t.copy_(d)
            return
        raw = None if raw is None else self.heads.split(raw, lead)[:2]
        rotate_into(
            dq, dk, self.cos, self.sin, into[0], into[1], v=dv, out_v=into[2], raw=raw, norms=self.norms,
            eps=self.heads.norm_eps or 0.0, backward=True,
        )  # fmt: skip


def _output_gradients(d_outs, groups, saved, with_dx: bool, rotation: Rotation | None, raw, lead) -> list:
    """A Gradient of each group."""
    like, m, n = saved[0].op.sb, lead.numel(), sum(g.n for g in groups)
    single = len(groups) == 1
    if rotation is None:
        dy = d_outs[0]
        dy = torch.zeros(m, n, dtype=like.dtype, device=like.device) if dy is None else dy
        if single:
            return [groups[0].gradient(dy, saved[0], with_dx)]
        wide = rows(dy)
    else:
        wide = torch.empty(m, n + (groups[0].p if single else 0), dtype=like.dtype, device=like.device)
        rotation.backward(d_outs, wide, raw, lead)
        if single:
            return [groups[0].gradient_of(wide, saved[0])]
    parts = wide.split([g.n for g in groups], -1)
    return [g.gradient(dy, kept, with_dx) for g, dy, kept in zip(groups, parts, saved, strict=True)]


def _norm_backward(dn, h, weight, rstd, norm, d_residual, shape, spare: int, with_dw: bool):
    if norm is None:
        dx = dn.view(shape)
        return (dx if d_residual is None else dx + d_residual), None
    dx = with_spare_columns(shape, spare, h)
    d_residual = None if d_residual is None else rows(d_residual)
    dw = norm_backward_into(dn, h, weight, rstd, norm.offset, d_residual, rows(dx), with_dw)
    return dx, None if dw is None else dw.to(weight.dtype)


def project(
    x, groups, *, norm: Norm | None = None, norm_weight=None, heads: Heads | None = None, cos=None, sin=None,
    head_norms=(None, None), pass_through: bool = False, spare: int = 0,
):  # fmt: skip
    """Y (..., N); or q, k, v as (B, S, H, D) with `heads`; pass_through adds x itself, so that the residual's gradient
    is added inside the norm's backward. groups: one Projection, or several that share x (their outputs lie side by
    side). spare: columns of room behind the norm's dX, for the projection whose output x is.
    """
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    dtype = compute_dtype(x, groups[0].compute_dtype)
    call = {
        "groups": groups,
        "norm": norm,
        "heads": heads,
        "pass_through": pass_through,
        "dtype": dtype,
        "spare": spare,
    }
    parameters = [t for g in groups for m in g.members for t in m.parameters]
    outs = Project.apply(call, x, norm_weight, cos, sin, *head_norms, *parameters)
    return outs[0] if len(outs) == 1 else outs


# ---- the gated MLP ---------------------------------------------------------------------------------------------------
class GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, residual, norm_weight, *parameters):
        groups, down, norm, dtype = call["groups"], call["down"], call["norm"], call["dtype"]
        with _no_autocast(x.device):
            flat, res = rows(x), None if residual is None else rows(residual)
            ops, op_down = [g.operand(dtype) for g in groups], down.operand(dtype)
            seeds = [g.seeds(x.device) for g in (*groups, down)]
            h = flat if res is None else torch.empty(flat.shape, dtype=torch.result_type(flat, res), device=x.device)
            # The down projection adds to a second copy of h, which the norm writes on its way.
            total = torch.empty_like(h) if call["add"] and res is not None and h.dtype == dtype else None
            incoming = Incoming(flat, norm, norm_weight, res, h, total)
            buffer, rstd, s_list, kept_s = _fill(incoming, groups, ops, seeds[:-1], dtype)
            # One group's output gets the spare columns of its gradient, which backward writes over it.
            wide = None
            if len(groups) == 1:
                wide = torch.empty(flat.shape[0], groups[0].n + groups[0].p, dtype=dtype, device=x.device)
            gate_up = _outputs(groups, ops, buffer, s_list, None if wide is None else wide[:, : groups[0].n])
            del buffer, s_list  # the widest operand comes next
            packed, kept = _activate(gate_up, call["act"], down, op_down, seeds[-1])
            kept_s.append(kept)
            out = _down(packed, h, total, down, op_down, call["add"])
        ctx.call, ctx.shape, ctx.adapters = call, x.shape, adapters_of([*groups, down])
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.save_for_backward(h, norm_weight, rstd, gate_up if wide is None else wide, *kept_s, *seeds, *parameters)
        ctx.set_materialize_grads(False)
        out = _of_shape(out, x.shape)
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
        kept_s, seeds, parameters = rest[:n], rest[n : 2 * n], rest[2 * n :]
        n_down = 4 * len(down.members)
        with _no_autocast(grad.device), as_then(ctx.adapters):
            ops = [g.operand_again(dtype) for g in (*groups, down)]
            branch = Branch(grad.device, gate_up.numel())
            *saved, kept = _saved((*groups, down), ops, kept_s, seeds, h.shape[0], branch, grad.device)
            d_down = down.gradient(grad, kept)
            dh = down.backward_input(d_down, kept)
            needed = list(ctx.needs_input_grad[n_in - n_down :])
            ds_down = d_down.ds[:, : down.rank] if down.rank and needed[0] and kept.seeds is None else None
            wides, tails, da_down = _activation_backward(gate_up, dh, call["act"], groups, saved, ds_down)
            source = Source(dh, dtype)  # which, without da_down, now holds act(gate) * up
            with branch:
                last = down.parameter_gradients(d_down, kept, needed, source, da_down)
            branch.keep(d_down, source if da_down is None else None)
            del dh, d_down, ds_down, source
            tails = tails or [g.gradient_of(w, k) for g, w, k in zip(groups, wides, saved, strict=True)]
            with branch:
                first_source = Source(h, dtype, call["norm"], rstd, weight)
                needed = list(ctx.needs_input_grad[4 : n_in - n_down])
                first = _parameter_gradients(groups, saved, tails, needed, first_source)
                d_parameters = _as_parameters([*first, *last], parameters, saved)
            d_x = d_weight = None
            if any(ctx.needs_input_grad[1:4]):
                d_x = _input_gradient(groups, saved, tails)
                d_residual = d_pass
                if call["add"]:
                    d_residual = grad if d_pass is None else grad + d_pass
                with_dw = ctx.needs_input_grad[3]
                d_x, d_weight = _norm_backward(
                    d_x, h, weight, rstd, call["norm"], d_residual, ctx.shape, down.p, with_dw
                )
            branch.join()
        return None, _as(d_x, ctx.dtypes[0]), _as(d_x, ctx.dtypes[1]), d_weight, *d_parameters


def _as(grad, dtype):
    """grad in dtype, itself (with its spare columns) where that is its own; None for an input that was not there."""
    return None if grad is None or dtype is None else grad.to(dtype)


def _activate(gate_up, act, down, op_down, seed):
    """[act(gate)·up | S of the down projection], and its sS."""
    m, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    packed = torch.empty(m, width + down.p, dtype=gate_up.dtype, device=gate_up.device)
    kept = down.kept(m, packed.dtype, packed.device)

    def plain():
        glu.forward_into(gate, up, packed[:, :width], act)
        down.lora_input(packed[:, :width], op_down, seed, packed[:, width:], kept)

    forms = {"plain": plain}
    if down.p and seed is None and tensor_cores(packed, op_down.a):
        forms = {
            t: partial(glu.forward_lora_into, gate, up, packed, op_down.a, act, t, down.rank, kept) for t in TILES
        } | forms
    forms[tune.pick("glu", (tune.bucket(m), width, down.p, act, packed.dtype), forms, packed.device)]()
    return packed, kept.s


def _down(packed, h, total, down, op_down, add: bool):
    if not add:
        return down.forward(packed, op_down)
    if total is not None:
        return down.forward(packed, op_down, out=total, residual=total)
    if h.dtype == packed.dtype:
        return down.forward(packed, op_down, residual=h)
    return h + down.forward(packed, op_down)


def _may_overwrite() -> bool:
    """Whether this backward is the last over its graph (no retain_graph), so that saved tensors of our own may go."""
    keeps = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return not keeps()


def _activation_backward(gate_up, dh, act, groups, saved, ds_down):
    """(for each group a buffer (M, N + p) that begins with its output's gradient; a Gradient of each, or None where dS
    and dB are still to be made; dA of the down projection or None).

    ds_down: (M, rank) if dA is wanted. Where one pass for both is faster it comes from there; otherwise it is None and
    dh is overwritten with act(gate)·up. With one group gate_up (that came with spare columns) is overwritten with its
    gradient, where nobody will ask for it again."""
    m, width = dh.shape
    if len(groups) > 1:
        wides = [torch.empty(m, g.n + g.p, dtype=dh.dtype, device=dh.device) for g in groups]
        parts = wides[0][:, :width], wides[1][:, :width]
        return wides, None, _parts_backward(gate_up, dh, parts, act, ds_down, saved[0].chain_sums)
    group, kept = groups[0], saved[0]

    def apart(dh, into):
        parts = into[:, :width], into[:, width : 2 * width]
        return [into], None, _parts_backward(gate_up, dh, parts, act, ds_down, kept.chain_sums)

    def apart_with_tail(dh, into):  # what the form costs; where it is taken, its dS and dB come later
        da = apart(dh, into)[2]
        if da is None and ds_down is not None:
            mm_in(ds_down.t(), dh, torch.float32)
        group.gradient_of(into, kept)

    def whole(tile, dh, into):
        gate, up = gate_up[:, :width], gate_up[:, width : 2 * width]
        arguments = gate, up, dh, into, ds_down, kept.op.sb, kept.scaled_s, act, tile, kept.chain_sums
        da, db = glu.backward_whole_into(*arguments)
        return [into], [Gradient(into[:, : group.n], into[:, group.n :], into, db)], da

    forms: dict[str, Any] = {"apart": apart}
    if ds_down is not None and glu.whole_fits(ds_down, group.ranks, group.widths):
        forms = {tile: partial(whole, tile) for tile in glu.WHOLE_TILES} | forms
    trials = tune.on_spare(forms | {"apart": apart_with_tail}, lambda: (dh.clone(), torch.empty_like(gate_up)))
    picked = tune.pick("gate and up backward", (tune.bucket(m), width, group.rank, act, dh.dtype), trials, dh.device)
    return forms[picked](dh, gate_up if _may_overwrite() else torch.empty_like(gate_up))


def _parts_backward(gate_up, dh, parts, act, ds_down, sums):
    """The activation's backward into parts; dA of the down projection where one pass for both is the faster way, else
    None, and dh is overwritten with act(gate)·up."""
    width = dh.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width : 2 * width]
    if ds_down is None or ds_down.shape[1] > glu.MAX_A_RANK or not tensor_cores(dh, ds_down):
        d_gate, d_up = parts
        glu.backward_into(gate, up, dh, d_gate, d_up, act, h_into_grad=True)
        return None
    return _backward_with_a(gate, up, dh, parts, ds_down, act, sums)


def _backward_with_a(gate, up, dh, parts, ds_down, act, sums):
    """dA of the down projection, in one pass with the activation's backward where that is the faster way."""

    def plain(dh, d_gate, d_up):
        glu.backward_into(gate, up, dh, d_gate, d_up, act, h_into_grad=True)

    def plain_with_a(dh, d_gate, d_up):  # what the form costs; where it is taken, dA comes later
        plain(dh, d_gate, d_up)
        mm_in(ds_down.t(), dh, torch.float32)

    def one_pass(tile, dh, d_gate, d_up):
        return glu.backward_a_into(gate, up, dh, d_gate, d_up, ds_down, act, tile, sums)

    forms = {**{tile: partial(one_pass, tile) for tile in glu.A_TILES}, "plain": plain}
    spare = forms | {"plain": plain_with_a}
    trials = tune.on_spare(spare, lambda: [dh.clone(), *(torch.empty_like(t) for t in parts)])
    key = (tune.bucket(dh.shape[0]), dh.shape[1], ds_down.shape[1], act, dh.dtype)
    return forms[tune.pick("glu backward", key, trials, dh.device)](dh, *parts)


def gated_mlp(
    x, groups, down, act: str, *, norm: Norm | None = None, norm_weight=None, residual=None, add: bool = False,
    pass_through: bool = False,
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
        "dtype": dtype,
    }
    parameters = [t for g in (*groups, down) for m in g.members for t in m.parameters]
    return GatedMLP.apply(call, x, residual, norm_weight, *parameters)
