"""`gated_mlp`: [x + residual →] [RMSNorm →] gate, up → act(gate)·up → down [+ x], one autograd node.

Saved for each token: the node's input, gate and up, S (p wide) of each projection and 1/rms; the norm's output and
act(gate)·up are made again. Run: python -m pytest tests/lorakernels/test_mlp_node.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..ops.lora_grad import SavedInput
from ..ops.rms_norm import Norm, NormInput
from ..runtime import check, compute_dtype, no_autocast, rows
from .adapter_grad import parameter_gradients
from .member import with_saved_adapters
from .mlp_activation import activate, activation_backward
from .node_backward import NodeBackward, PerProjection, restored
from .node_forward import NodeInput, NodeSpec, fill_operand, of_shape, outputs, save
from .operand import Operand
from .output_grad import OutputGradient, input_gradient, output_gradient, wide_output_gradient
from .products import concat_product
from .projection import Projection


@dataclass(slots=True, kw_only=True)
class MLPSpec(NodeSpec):
    """Of a call of `gated_mlp`, whose arguments these are; down is the last of the projections."""

    down: Projection
    act: str
    add: bool


class MLPTensors(NamedTuple):
    """What `GatedMLP` saves of its own, before what it saves for each projection: h = x + residual (M, K); the norm's
    weight (K,) and rstd (M,), or None; gate and up (M, 2·I), with p spare columns behind them where one group makes
    both, not in FP8."""

    h: torch.Tensor
    norm_weight: torch.Tensor | None
    rstd: torch.Tensor | None
    gate_up: torch.Tensor


class _Forward(NamedTuple):
    out: torch.Tensor
    own: MLPTensors
    scaled_s: list[torch.Tensor]
    seeds: list[torch.Tensor | None]


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
            made = _forward(spec, x, residual, norm_weight)
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        save(ctx, spec, x.shape, made.own, made.scaled_s, made.seeds, parameters)
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
            dx, d_weight, d_parameters = _backward(ctx, own, each, grad, d_pass)
        return None, _as(dx, ctx.dtypes[0]), _as(dx, ctx.dtypes[1]), d_weight, *d_parameters


# ---- forward ---------------------------------------------------------------------------------------------------------
def _forward(
    spec: MLPSpec, x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor | None
) -> _Forward:
    groups, down, dtype = spec.groups, spec.down, spec.dtype
    flat, res = rows(x), None if residual is None else rows(residual)
    ops, op_down = [g.operand(dtype) for g in groups], down.operand(dtype)
    seeds = [g.seeds(x.device) for g in spec.projections]
    h = flat if res is None else torch.empty(flat.shape, dtype=torch.result_type(flat, res), device=x.device)
    # The down projection adds to a second copy of h, which the norm writes on its way; a product in FP8 adds to none.
    adds_to_copy = spec.add and res is not None and h.dtype == dtype and down.fp8 is None
    total = torch.empty_like(h) if adds_to_copy else None
    norm = None
    if spec.norm is not None and norm_weight is not None:
        norm = NormInput(flat, norm_weight, spec.norm, res, h, total)
    filled = fill_operand(NodeInput(flat, norm), groups, ops, seeds[:-1], dtype)
    rstd, scaled_s = filled.rstd, filled.scaled_s
    # One group's output gets the spare columns of its gradient, which backward writes over it. FP8's goes without: its
    # product cannot leave room between rows.
    wide = None
    if len(groups) == 1 and groups[0].fp8 is None:
        wide = torch.empty(flat.shape[0], groups[0].n + groups[0].p, dtype=dtype, device=x.device)
    gate_up = outputs(groups, ops, filled, None if wide is None else wide[:, : groups[0].n])
    del filled  # the widest operand comes next
    packed, scaled_s_down = activate(gate_up, spec.act, down, op_down, seeds[-1])
    out = _down(packed, h, total, down, op_down, spec.add)
    own = MLPTensors(h, norm_weight, rstd, gate_up if wide is None else wide)
    return _Forward(out, own, [*scaled_s, scaled_s_down], seeds)


def _down(
    packed: torch.Tensor, h: torch.Tensor, total: torch.Tensor | None, down: Projection, op_down: Operand, add: bool
) -> torch.Tensor:
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
    ctx: Any, own: MLPTensors, each: PerProjection, grad: torch.Tensor, d_pass: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:
    """(dX (…, K), the gradient (K,) of the norm's weight, those of the parameters) of grad and d_pass (…, K)."""
    spec: MLPSpec = ctx.spec
    needs = list(ctx.needs_input_grad)
    n_first = len(needs) - 4 * len(spec.down.members)  # where the flags of the down projection begin
    node = NodeBackward(ctx, each, own.h, own.rstd, own.norm_weight, grad.device)
    gradients, last = _down_backward(spec, own, node, grad, needs[n_first:])
    with_dx, d_residual = any(needs[1:LEADING]), d_pass
    if spec.add and with_dx:
        d_residual = grad if d_pass is None else grad + d_pass
    return node.finish(
        gradients, needs[LEADING:n_first], last, d_residual, with_dx=with_dx, with_dw=needs[3], spare=spec.down.p
    )


def _down_backward(
    spec: MLPSpec, own: MLPTensors, node: NodeBackward, grad: torch.Tensor, needed: list[bool]
) -> tuple[list[OutputGradient], list[torch.Tensor | None]]:  # fmt: skip
    """(the gradient of each group's output, the gradients of the down projection's parameters) of grad (…, K). A
    function of its own, so that dh (M, I) is free before dX is made."""
    groups, down, saved, side_stream = spec.groups, spec.down, node.saved, node.side_stream
    saved_down = saved[-1]
    d_down = output_gradient(down, grad, saved_down)
    dh = input_gradient(down, d_down, saved_down)
    ds_down = d_down.ds_of_a[:, : down.rank] if down.rank and needed[0] and saved_down.seeds is None else None
    made = activation_backward(own.gate_up, dh, spec.act, groups, saved[:-1], ds_down)
    source = SavedInput(dh, spec.dtype)  # which, without made.da, now holds act(gate) * up
    with side_stream:
        last = parameter_gradients(down, d_down, saved_down, needed, source, made.da)
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
    pass_through: bool = False,
) -> Any:  # fmt: skip
    """down(act(gate)·up) (…, K) of norm(x + residual), x, residual: (…, K); add: plus x + residual; pass_through:
    (that, x + residual).

    groups: [Projection of gate and up], or one of each. act: "silu", "gelu" or "gelu_tanh"; norm_weight: (K,). Raises
    ValueError where the projections do not fit x or one another, at a residual without a norm, and where a norm has no
    weight.
    """
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    check(norm is not None or residual is None, "a residual needs a norm", x=x, residual=residual)
    if norm is not None and norm_weight is None:
        raise ValueError("a norm needs its weight")
    check(sum(g.n for g in groups) == 2 * down.k, "gate and up do not fit down", x=x)
    dtype = compute_dtype(x, groups[0].compute_dtype)
    projections = [*groups, down]
    spec = MLPSpec(
        groups=groups, projections=projections, norm=norm, pass_through=pass_through, dtype=dtype, down=down, act=act,
        add=add,
    )  # fmt: skip
    parameters = [t for g in projections for m in g.members for t in m.parameters]
    return GatedMLP.apply(spec, x, residual, norm_weight, *parameters)
