"""`gated_mlp`: [x + residual →] [RMSNorm →] gate, up → act(gate)·up → down [+ x], one autograd node.

Saved for each token: the node's input, gate and up, S (p wide) of each projection and 1/rms; the norm's output and
act(gate)·up are made again. By tiles of rows (`tile`) the input alone is saved: backward makes tile after tile again,
up to act(gate)·up and not down, so that nothing wider than the input outlives a tile. Under a checkpoint of its layer
(`apart`) the product of down is a second node, which saves nothing: a checkpoint's second pass ends with what was saved
last, so it runs no down either.
Run: python -m pytest tests/lorakernels/test_mlp_node.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ops.concat_operand import with_spare_columns
from ..ops.dropout import of_rows
from ..ops.lora_grad import SavedInput
from ..ops.rms_norm import Norm, NormInput
from ..runtime import cdiv, check, compute_dtype, no_autocast, rows
from .adapter_grad import parameter_gradients
from .member import with_saved_adapters
from .mlp_activation import activate, activate_in_fp8, activation_backward, activation_backward_in_fp8, fits_fp8
from .node_backward import NodeBackward, PerProjection, restored
from .node_forward import NodeInput, NodeSpec, fill_operand, of_shape, outputs, save
from .operand import Operand
from .output_grad import (
    OutputGradient,
    frozen_input_gradient,
    input_gradient,
    output_gradient,
    wide_output_gradient,
)
from .own_rows import own_of
from .products import Fp8Operand, concat_product, frozen_product
from .projection import Projection


@dataclass(slots=True, kw_only=True)
class MLPSpec(NodeSpec):
    """Of a call of `gated_mlp`, whose arguments these are; down is the last of the projections. product: what is left
    of a forward with `apart`, until the second node runs it."""

    down: Projection
    act: str
    add: bool
    tile: int | None = None
    output: bool = True
    apart: bool = False
    product: Callable[[], torch.Tensor] | None = None


class MLPTensors(NamedTuple):
    """What `GatedMLP` saves of its own, before what it saves for each projection: h = x + residual (M, K); the norm's
    weight (K,) and rstd (M,), or None; gate and up (M, 2·I), with p spare columns behind them where one group makes
    both, not in FP8. By tiles rstd, gate and up are None."""

    h: torch.Tensor
    norm_weight: torch.Tensor | None
    rstd: torch.Tensor | None
    gate_up: torch.Tensor | None


class _Forward(NamedTuple):
    out: torch.Tensor
    own: MLPTensors
    scaled_s: Sequence[torch.Tensor | None]


class _Activated(NamedTuple):
    """packed: act(gate)·up and S of the down projection (M, I + p), or the two apart with act(gate)·up in e4m3; total:
    a copy of h that down may add to, or None; scaled_s: sS of each projection."""

    packed: torch.Tensor | Fp8Operand
    total: torch.Tensor | None
    own: MLPTensors
    scaled_s: list[torch.Tensor]


@dataclass(slots=True)
class _Tile:
    """What of an autograd context the backward of a tile asks for. shape: (rows, K)."""

    spec: MLPSpec
    shape: torch.Size
    needs_input_grad: Sequence[bool]


OWN_TENSORS = len(MLPTensors._fields)
LEADING = 4  # arguments of `GatedMLP.forward` before the parameters


class GatedMLP(torch.autograd.Function):
    """The node. Shapes as in `gated_mlp`."""

    @staticmethod
    def forward(
        ctx: Any, spec: MLPSpec, x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor | None,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        with no_autocast(x.device):
            flat, res = rows(x), None if residual is None else rows(residual)
            ops = [g.operand(spec.dtype) for g in spec.projections]
            seeds = [g.seeds(x.device) for g in spec.projections]
            form = _forward if spec.tile is None else _tiled_forward
            made = form(spec, ops, seeds, flat, res, norm_weight)
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        save(ctx, spec, x.shape, made.own, made.scaled_s, seeds, parameters)
        out = of_shape(made.out, x.shape)
        return (out, made.own.h.view(x.shape) if residual is not None else x) if spec.pass_through else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, d_pass: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        spec: MLPSpec = ctx.spec
        if grad is None:
            if d_pass is None:
                return (None,) * len(ctx.needs_input_grad)
            grad = torch.zeros(*ctx.shape[:-1], spec.down.n, dtype=spec.dtype, device=d_pass.device)
        tensors, each = restored(ctx, OWN_TENSORS)
        own = MLPTensors(*tensors)
        with no_autocast(grad.device), with_saved_adapters(ctx.adapters):
            ops = [g.operand_again(spec.dtype) for g in spec.projections]
            form = _backward if spec.tile is None else _tiled_backward
            dx, d_weight, d_parameters = form(ctx, ops, own, each, grad, d_pass)
        return None, _as(dx, ctx.dtypes[0]), _as(dx, ctx.dtypes[1]), d_weight, *d_parameters


class DownApart(torch.autograd.Function):
    """The product of down behind a `GatedMLP` that left it out: in place of its stand-in (…, K)."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, spec: MLPSpec) -> torch.Tensor:
        product, spec.product = spec.product, None
        assert product is not None
        with no_autocast(stand_in.device):
            return of_shape(product(), stand_in.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


# ---- forward ---------------------------------------------------------------------------------------------------------
def _activated(
    spec: MLPSpec, ops: Sequence[Operand], seeds: Sequence[torch.Tensor | None], flat: torch.Tensor,
    res: torch.Tensor | None, norm_weight: torch.Tensor | None,
) -> _Activated:  # fmt: skip
    """All of the forward that backward needs, and nothing of down but its S. ops, seeds: of each projection."""
    groups, down, dtype = spec.groups, spec.down, spec.dtype
    h = flat if res is None else torch.empty(flat.shape, dtype=torch.result_type(flat, res), device=flat.device)
    # The down projection adds to a second copy of h, which the norm writes on its way; a product in FP8 adds to none.
    adds_to_copy = spec.add and res is not None and h.dtype == dtype and down.fp8 is None
    total = torch.empty_like(h) if adds_to_copy else None
    norm = None
    if spec.norm is not None and norm_weight is not None:
        norm = NormInput(flat, norm_weight, spec.norm, res, h, total)
    filled = fill_operand(NodeInput(flat, norm), groups, ops[:-1], seeds[:-1], dtype)
    rstd, scaled_s = filled.rstd, filled.scaled_s
    # One group's output gets the spare columns of its gradient, which backward writes over it. FP8's goes without: its
    # product cannot leave room between rows.
    wide = None
    if len(groups) == 1 and groups[0].fp8 is None:
        wide = torch.empty(flat.shape[0], groups[0].n + groups[0].p, dtype=dtype, device=flat.device)
    in_fp8 = len(groups) == 1 and groups[0].p > 0 and down.p > 0 and down.fp8 is not None and seeds[-1] is None
    if in_fp8 and groups[0].fp8 is not None and filled.quantized is not None:
        gate_up = frozen_product(groups[0], filled.quantized, ops[0], dtype)
        of_gate_up = groups[0], ops[0], filled.s[0]
        del filled  # the widest operand comes next
        packed, scaled_s_down = activate_in_fp8(gate_up, of_gate_up, spec.act, down, ops[-1])
    else:
        gate_up = outputs(groups, ops[:-1], filled, None if wide is None else wide[:, : groups[0].n])
        del filled
        packed, scaled_s_down = activate(gate_up, spec.act, down, ops[-1], seeds[-1])
    own = MLPTensors(h, norm_weight, rstd, gate_up if wide is None else wide)
    return _Activated(packed, total, own, [*scaled_s, scaled_s_down])


def _forward(
    spec: MLPSpec, ops: Sequence[Operand], seeds: Sequence[torch.Tensor | None], flat: torch.Tensor,
    res: torch.Tensor | None, norm_weight: torch.Tensor | None,
) -> _Forward:  # fmt: skip
    packed, total, own, scaled_s = _activated(spec, ops, seeds, flat, res, norm_weight)
    product = partial(_down, packed, own.h, total, spec.down, ops[-1], spec.add)
    if spec.apart:
        spec.product = product
    return _Forward(_stand_in(spec, own.h) if spec.apart else product(), own, scaled_s)


def _tiles(m: int, rows_of_a_tile: int) -> list[slice]:
    """Of m rows: as few tiles as may be, all but the last of one size."""
    step = cdiv(m, cdiv(m, rows_of_a_tile)) if m else 1
    return [slice(i, min(i + step, m)) for i in range(0, m, step)]


def _tiled_forward(
    spec: MLPSpec, ops: Sequence[Operand], seeds: Sequence[torch.Tensor | None], flat: torch.Tensor,
    res: torch.Tensor | None, norm_weight: torch.Tensor | None,
) -> _Forward:  # fmt: skip
    h = flat if res is None else flat + res
    own, nothing = MLPTensors(h, norm_weight, None, None), [None] * len(seeds)
    if not spec.output:
        return _Forward(_stand_in(spec, h), own, nothing)
    out = torch.empty(h.shape[0], spec.down.n, dtype=_output_dtype(spec, h), device=h.device)
    assert spec.tile is not None
    for at in _tiles(h.shape[0], spec.tile):
        out[at] = _forward(spec, ops, [of_rows(s, at.start) for s in seeds], h[at], None, norm_weight).out
    return _Forward(out, own, nothing)


def _stand_in(spec: MLPSpec, h: torch.Tensor) -> torch.Tensor:
    """In place of an output (M, K) whose values nobody reads; it costs no memory."""
    return h.new_empty((), dtype=_output_dtype(spec, h)).expand(h.shape[0], spec.down.n)


def _output_dtype(spec: MLPSpec, h: torch.Tensor) -> torch.dtype:
    """Of what `_down` makes."""
    return torch.promote_types(spec.dtype, h.dtype) if spec.add else spec.dtype


def _down(
    packed: torch.Tensor | Fp8Operand, h: torch.Tensor, total: torch.Tensor | None, down: Projection,
    op_down: Operand, add: bool,
) -> torch.Tensor:  # fmt: skip
    """The down projection of packed (M, I + p), added to h (M, K) with add; total: a copy of h that may go."""
    if not add:
        return concat_product(down, packed, op_down)
    if total is not None:
        return concat_product(down, packed, op_down, out=total, residual=total)
    if h.dtype == packed.dtype:
        return concat_product(down, packed, op_down, residual=h)
    return h + concat_product(down, packed, op_down)


# ---- backward --------------------------------------------------------------------------------------------------------
def _backward(
    ctx: Any, ops: Sequence[Operand], own: MLPTensors, each: PerProjection, grad: torch.Tensor,
    d_pass: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """(dX (…, K), the gradient (K,) of the norm's weight, those of the parameters) of grad and d_pass (…, K)."""
    spec: MLPSpec = ctx.spec
    needs = list(ctx.needs_input_grad)
    n_first = len(needs) - 4 * len(spec.down.members)  # where the flags of the down projection begin
    node = NodeBackward(ctx, each, own.h, own.rstd, own.norm_weight, grad.device, ops)
    gradients, last = _down_backward(spec, own, node, grad, needs[LEADING:])
    with_dx, d_residual = any(needs[1:LEADING]), d_pass
    if spec.add and with_dx:
        d_residual = grad if d_pass is None else grad + d_pass
    return node.finish(
        gradients, needs[LEADING:n_first], last, d_residual, with_dx=with_dx, with_dw=needs[3], spare=spec.down.p
    )


def _tiled_backward(
    ctx: Any, ops: Sequence[Operand], own: MLPTensors, each: PerProjection, grad: torch.Tensor,
    d_pass: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """The same, tile after tile; what the tiles give to one parameter is added in float32 at least."""
    spec, h, sums = ctx.spec, own.h, _Sums()
    flat, passed = rows(grad), None if d_pass is None else rows(d_pass)
    dx = with_spare_columns(ctx.shape, spec.down.p, h) if any(ctx.needs_input_grad[1:LEADING]) else None
    for at in _tiles(h.shape[0], spec.tile):
        seeds = [of_rows(s, at.start) for s in each.seeds]
        made = _activated(spec, ops, seeds, h[at], None, own.norm_weight)
        again, scaled_s = made.own, made.scaled_s
        del made  # act(gate)·up is made once more where backward wants it
        tile = _Tile(spec, h[at].shape, ctx.needs_input_grad)
        of_tile = PerProjection(scaled_s, seeds, each.parameters)
        d_passed = None if passed is None else passed[at]
        d_tile, d_weight, d_parameters = _backward(tile, ops, again, of_tile, flat[at], d_passed)
        sums.add([d_weight, *d_parameters])
        if dx is not None and d_tile is not None:
            rows(dx)[at] = d_tile
    d_weight, *d_parameters = sums.as_(own.norm_weight, *each.parameters)
    return dx, d_weight, d_parameters


class _Sums:
    """Of several lists of gradients of the same parameters, any of which may be None."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor | None] = []

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._sums:
            exact = [None if g is None else torch.promote_types(g.dtype, torch.float32) for g in gradients]
            self._sums = [None if g is None else g.to(e, copy=True) for g, e in zip(gradients, exact, strict=True)]
            return
        for total, g in zip(self._sums, gradients, strict=True):
            if total is not None and g is not None:
                total += g

    def as_(self, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
        """In the dtypes of their parameters."""
        pairs = zip(self._sums, parameters, strict=True)
        return [None if g is None or p is None else g.to(p.dtype) for g, p in pairs]


def _down_backward(
    spec: MLPSpec, own: MLPTensors, node: NodeBackward, grad: torch.Tensor, needed: list[bool]
) -> tuple[list[OutputGradient], list[torch.Tensor | None]]:  # fmt: skip
    """(the gradient of each group's output, the gradients of the down projection's parameters) of grad (…, K); needed:
    autograd's flags of all parameters. A function of its own, so that dh (M, I) is free before dX is made."""
    groups, down, saved, side_stream = spec.groups, spec.down, node.saved, node.side_stream
    saved_down, of_down = saved[-1], needed[-4 * len(spec.down.members) :]
    d_down = output_gradient(down, grad, saved_down)
    ds_down = d_down.ds_of_a[:, : down.rank] if any(of_down[::4]) and saved_down.seeds is None else None
    assert own.gate_up is not None
    if fits_fp8(groups, down, saved, needed):
        dh = frozen_input_gradient(down, d_down, saved_down.op)
        of_dh = d_down.ds[:, : down.rank], saved_down.op.a[: down.rank]
        made = activation_backward_in_fp8(own.gate_up, dh, spec.act, groups[0], saved[0], of_dh)
    else:
        dh = input_gradient(down, d_down, saved_down)
        own_down = None if ds_down is None else own_of(down, dh, saved_down.op)
        made = activation_backward(own.gate_up, dh, spec.act, groups, saved[:-1], ds_down, own_down)
    source = SavedInput(dh, spec.dtype)  # which, without made.da, now holds act(gate) * up
    with side_stream:
        last = parameter_gradients(down, d_down, saved_down, of_down, source, made.da)
    side_stream.keep_alive(d_down, source if made.da is None else None)
    del dh, d_down, ds_down, source
    if made.gradients is not None:
        return made.gradients, last
    wides = zip(groups, made.wides, saved[:-1], strict=True)
    return [wide_output_gradient(g, wide, forward) for g, wide, forward in wides], last


def _as(grad: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """grad in dtype, itself (with its spare columns) where that is its own; None for an input that was not there."""
    return None if grad is None or dtype is None else grad.to(dtype)


def gated_mlp(
    x: torch.Tensor, groups: list[Projection], down: Projection, act: str, *, norm: Norm | None = None,
    norm_weight: torch.Tensor | None = None, residual: torch.Tensor | None = None, add: bool = False,
    pass_through: bool = False, tile: int | None = None, output: bool = True, apart: bool = False,
) -> Any:  # fmt: skip
    """down(act(gate)·up) (…, K) of norm(x + residual), x, residual: (…, K); add: plus x + residual; pass_through:
    (that, x + residual).

    groups: [Projection of gate and up], or one of each. act: "silu", "gelu" or "gelu_tanh"; norm_weight: (K,). tile:
    how many rows a tile of the form has that saves the input alone (ALST's TiledMLP, arXiv 2506.13996; its masks are
    those of the untiled form); output: without, and by tiles, down is not run and nobody may read its values: a layer
    that is made again for its backward asks for that; apart: down is a node of its own, for a layer that a checkpoint
    runs again. Raises ValueError where the projections do not fit x or one
    another, at a residual without a norm, where a norm has no weight, and at a tile of no rows.
    """
    if tile is not None and tile < 1:
        raise ValueError(f"a tile has 1 row or more, not {tile}")
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    for g in (*groups, down):
        g.check_rows(x)
        if g.slot is not None and tile is not None:
            raise ValueError("rows of several adapters do not go by tiles")
    check(norm is not None or residual is None, "a residual needs a norm", x=x, residual=residual)
    if norm is not None and norm_weight is None:
        raise ValueError("a norm needs its weight")
    check(sum(g.n for g in groups) == 2 * down.k, "gate and up do not fit down", x=x)
    dtype = compute_dtype(x, groups[0].compute_dtype)
    projections = [*groups, down]
    spec = MLPSpec(
        groups=groups, projections=projections, norm=norm, pass_through=pass_through, dtype=dtype, down=down, act=act,
        add=add, tile=tile, output=output, apart=apart and tile is None,
    )  # fmt: skip
    parameters = [t for g in projections for m in g.members for t in m.parameters]
    made = GatedMLP.apply(spec, x, residual, norm_weight, *parameters)
    if not spec.apart:
        return made
    return (DownApart.apply(made[0], spec), made[1]) if pass_through else DownApart.apply(made, spec)
