"""`project`: [residual stream →] [RMSNorm →] LoRA projections [→ head norms → RoPE], one autograd node.

Saved for each token: the node's input, S (p wide) and 1/rms; the norm's output is made again. q, k and v are held by
attention, in the one buffer they were born in. Run: python -m pytest tests/lorakernels/test_projection_node.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..ops.rms_norm import Norm, NormInput
from ..runtime import check, compute_dtype, no_autocast, rows
from .heads import Heads, Rotation
from .member import with_saved_adapters
from .node_backward import NodeBackward, PerProjection, restored
from .node_forward import NodeInput, NodeSpec, fill_operand, of_shape, output_of_foreign_input, outputs, save
from .output_grad import OutputGradient, SavedForward, output_gradient, wide_output_gradient
from .projection import Projection


@dataclass(slots=True, kw_only=True)
class ProjectSpec(NodeSpec):
    """Of a call of `project`, whose arguments these are."""

    heads: Heads | None
    spare: int


class ProjectTensors(NamedTuple):
    """What `Project` saves of its own, before what it saves for each projection: x (M, K), None where nothing asks for
    it; the norm's weight (K,) and rstd (M,); cos and sin of RoPE, the head norms' weights (D,), and the projections'
    output (M, N) before these norms. Each of them may be None."""

    x: torch.Tensor | None
    norm_weight: torch.Tensor | None
    rstd: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    raw: torch.Tensor | None


OWN_TENSORS = len(ProjectTensors._fields)
LEADING = 7  # arguments of `Project.forward` before the parameters


class Project(torch.autograd.Function):
    """The node. autograd sees tensors only where they are arguments of their own, so these are many; shapes as in
    `project`."""

    @staticmethod
    def forward(
        ctx: Any, spec: ProjectSpec, x: torch.Tensor, norm_weight: torch.Tensor | None, cos: torch.Tensor | None,
        sin: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        groups, norm, dtype = spec.groups, spec.norm, spec.dtype
        with no_autocast(x.device):
            flat = rows(x)
            ops = [g.operand(dtype) for g in groups]
            seeds = [g.seeds(x.device) for g in groups]
            rstd, raw = None, None
            if norm is None and len(groups) == 1 and flat.dtype == dtype:
                y, s = output_of_foreign_input(flat, groups[0], ops[0], seeds[0])
                scaled_s = [s]
            else:
                normed = None if norm is None or norm_weight is None else NormInput(flat, norm_weight, norm)
                filled = fill_operand(NodeInput(flat, normed), groups, ops, seeds, dtype)
                rstd, scaled_s = filled.rstd, filled.scaled_s
                y = outputs(groups, ops, filled)
            outs: tuple[torch.Tensor, ...] = (of_shape(y, x.shape),)
            if spec.heads is not None:
                outs, raw = Rotation(spec.heads, cos, sin, q_norm, k_norm).forward(y, x.shape[:-1])
        saved_x = flat if norm is not None or any(g.p for g in groups) else None
        own = ProjectTensors(saved_x, norm_weight, rstd, cos, sin, q_norm, k_norm, raw)
        save(ctx, spec, x.shape, own, scaled_s, seeds, parameters)
        return (*outs, x) if spec.pass_through else outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        spec: ProjectSpec = ctx.spec
        tensors, each = restored(ctx, OWN_TENSORS)
        own = ProjectTensors(*tensors)
        d_pass = grads[-1] if spec.pass_through else None
        d_outs = grads[:-1] if spec.pass_through else grads
        device = next((g.device for g in grads if g is not None), None)
        if device is None:
            return (None,) * len(ctx.needs_input_grad)
        with no_autocast(device), with_saved_adapters(ctx.adapters):
            dx, d_weight, d_parameters = _backward(ctx, own, each, d_outs, d_pass, device)
        return None, dx, d_weight, *(None,) * (LEADING - 3), *d_parameters


def _backward(
    ctx: Any, own: ProjectTensors, each: PerProjection, d_outs: Sequence[torch.Tensor | None],
    d_pass: torch.Tensor | None, device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
    """(dX (…, K), the gradient (K,) of the norm's weight, those of the parameters)."""
    spec: ProjectSpec = ctx.spec
    needs = ctx.needs_input_grad
    with_dx = needs[1] or needs[2]
    node = NodeBackward(ctx, each, own.x, own.rstd, own.norm_weight, device)
    gradients = _output_gradients(d_outs, spec, own, node.saved, with_dx, ctx.shape[:-1])
    needed = list(needs[LEADING:])
    return node.finish(gradients, needed, [], d_pass, with_dx=with_dx, with_dw=needs[2], spare=spec.spare)


def _output_gradients(
    d_outs: Sequence[torch.Tensor | None], spec: ProjectSpec, own: ProjectTensors, saved: Sequence[SavedForward],
    with_dx: bool, lead: torch.Size,
) -> list[OutputGradient]:  # fmt: skip
    """An OutputGradient of each group. lead: (…) of the node's input (…, K)."""
    groups = spec.groups
    like, m, n = saved[0].op.sb, lead.numel(), sum(g.n for g in groups)
    single = len(groups) == 1
    if spec.heads is None:
        dy = d_outs[0]
        dy = torch.zeros(m, n, dtype=like.dtype, device=like.device) if dy is None else dy
        if single:
            return [output_gradient(groups[0], dy, saved[0], with_dx)]
        wide = rows(dy)
    else:
        wide = torch.empty(m, n + (groups[0].p if single else 0), dtype=like.dtype, device=like.device)
        rotation = Rotation(spec.heads, own.cos, own.sin, own.q_norm, own.k_norm)
        rotation.backward(d_outs, wide, own.raw, lead)
        if single:
            return [wide_output_gradient(groups[0], wide, saved[0])]
    parts = wide.split([g.n for g in groups], -1)
    return [output_gradient(g, dy, forward, with_dx) for g, dy, forward in zip(groups, parts, saved, strict=True)]


def project(
    x: torch.Tensor, groups: Sequence[Projection], *, norm: Norm | None = None,
    norm_weight: torch.Tensor | None = None, heads: Heads | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    pass_through: bool = False, spare: int = 0,
) -> Any:  # fmt: skip
    """Y (…, N) of x (…, K); or q, k, v as (B, S, H, D) with `heads`, of an x (B, S, K); with pass_through a tuple that
    ends with x itself, so that the residual's gradient is added inside the norm's backward.

    groups: one Projection, or several that share x (their outputs lie side by side). norm, norm_weight (K,): of x
    before them; cos, sin: (B or 1, S, ≤ D); head_norms: weights (D,) for q and k. spare: columns of room behind the
    norm's dX, for the projection whose output x is. Raises ValueError where x does not have K columns, or a norm has no
    weight.
    """
    check(x.shape[-1] == groups[0].k, f"x must have {groups[0].k} columns", x=x)
    for g in groups:
        g.check_rows(x)
    if norm is not None and norm_weight is None:
        raise ValueError("a norm needs its weight")
    q_norm, k_norm = head_norms
    if heads is not None and heads.norm_eps is not None and (q_norm is None or k_norm is None):
        raise ValueError("head norms need their weights")
    dtype = compute_dtype(x, groups[0].compute_dtype)
    spec = ProjectSpec(
        groups=groups, projections=groups, norm=norm, pass_through=pass_through, dtype=dtype, heads=heads, spare=spare
    )
    parameters = [t for g in groups for m in g.members for t in m.parameters]
    outs = Project.apply(spec, x, norm_weight, cos, sin, q_norm, k_norm, *parameters)
    return outs[0] if len(outs) == 1 else outs
