"""Backward of the autograd nodes, over all projections of a node: what each starts from, dX of those that share an
input, and the parameters' gradients in the parameters' dtypes. Run: python -m pytest
tests/lorakernels/test_projection_node.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..ops.concat_operand import with_spare_columns
from ..ops.lora_grad import SavedInput
from ..ops.rms_norm import NormFactors
from ..ops.rms_norm import backward_into as norm_backward_into
from ..runtime import rows
from ..side_stream import SideStream
from .adapter_grad import accumulator_for, parameter_gradients
from .node_forward import NodeSpec
from .operand import Operand
from .output_grad import OutputGradient, SavedForward, input_gradient
from .projection import Projection


class PerProjection(NamedTuple):
    """What a node saves for each of its projections, in their order: sS (M, p), the seeds (members,) of its dropout or
    None, and, of all of them together, the parameters."""

    scaled_s: Sequence[torch.Tensor]
    seeds: Sequence[torch.Tensor | None]
    parameters: Sequence[torch.Tensor | None]


def restored(ctx: Any, count: int) -> tuple[Sequence[torch.Tensor], PerProjection]:
    """What `save` has kept: the node's own tensors, so many, and those of each projection."""
    tensors, n = ctx.saved_tensors, len(ctx.spec.projections)
    own, rest = tensors[:count], tensors[count:]
    return own, PerProjection(rest[:n], rest[n : 2 * n], rest[2 * n :])


def saved_forwards(
    groups: Sequence[Projection], ops: Sequence[Operand], tensors: PerProjection, m: int, side_stream: SideStream,
    device: torch.device,
) -> list[SavedForward]:  # fmt: skip
    """What the backward of each projection of a node of m rows starts from; they share the accumulator."""
    accumulator, beside = accumulator_for(groups, m, device), side_stream if side_stream.active else None
    parts = zip(groups, ops, tensors.scaled_s, tensors.seeds, strict=True)
    return [
        SavedForward(op, scaled_s, seeds, accumulator, beside, g.raised_b(op.sb.dtype))
        for g, op, scaled_s, seeds in parts
    ]


def shared_parameter_gradients(
    groups: Sequence[Projection], saved: Sequence[SavedForward], gradients: Sequence[OutputGradient],
    needed: list[bool], source: SavedInput | None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of all parameters of groups that share an input, whose flags are needed."""
    out: list[torch.Tensor | None] = []
    for g, forward, gradient in zip(groups, saved, gradients, strict=True):
        flags = needed[len(out) : len(out) + 4 * len(g.members)]
        out += parameter_gradients(g, gradient, forward, flags, source)
    return out


def shared_input_gradient(
    groups: Sequence[Projection], saved: Sequence[SavedForward], gradients: Sequence[OutputGradient]
) -> torch.Tensor:
    """dX (M, K) of groups that share an input."""
    dx = input_gradient(groups[0], gradients[0], saved[0])
    for g, forward, gradient in zip(groups[1:], saved[1:], gradients[1:], strict=True):
        dx = dx.add_(input_gradient(g, gradient, forward))
    return dx


def as_parameters(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor | None], saved: Sequence[SavedForward]
) -> list[torch.Tensor | None]:
    """The gradients in the dtypes of their parameters: A (r, K), B (N, r), biases (N,). The node's accumulator is cast
    in one launch."""
    accumulator = saved[0].accumulator
    assert accumulator is not None
    pairs = zip(gradients, parameters, strict=True)
    return [None if p is None else accumulator.cast(g, p.dtype) for g, p in pairs]


@dataclass(slots=True)
class NormGradient:
    """Backward through a node's norm, to the rows that came in. h (M, K) and factors: None without a norm; shape:
    (…, K), of the node's input; spare: columns of room behind dX, for the projection whose output that input is;
    with_dw: whether the gradient of the norm's weight is wanted."""

    h: torch.Tensor | None
    factors: NormFactors | None
    shape: torch.Size
    spare: int
    with_dw: bool

    def of(self, dn: torch.Tensor, d_residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(dX (…, K) with d_residual (…, K) added, the gradient (K,) of the norm's weight or None) of dn (M, K)."""
        if self.factors is None or self.h is None:
            dx = dn.view(self.shape)
            return (dx if d_residual is None else dx + d_residual), None
        dx = with_spare_columns(self.shape, self.spare, self.h)
        d_residual = None if d_residual is None else rows(d_residual)
        dw = norm_backward_into(dn, self.h, self.factors, rows(dx), d_residual, self.with_dw)
        return dx, None if dw is None else dw.to(self.factors.weight.dtype)


class NodeBackward:
    """The frame of a node's backward: what each projection starts from, and at the end what the input and the
    parameters get. h (M, K): the rows that came in, None where nothing asks for them; rstd (M,) and norm_weight (K,):
    of the norm, or None; ops: the projections' operands, where the caller has them already."""

    def __init__(
        self, ctx: Any, each: PerProjection, h: torch.Tensor | None, rstd: torch.Tensor | None,
        norm_weight: torch.Tensor | None, device: torch.device, ops: Sequence[Operand] | None = None,
    ):  # fmt: skip
        spec: NodeSpec = ctx.spec
        self.spec, self.shape, self.each, self.h = spec, ctx.shape, each, h
        m = ctx.shape[:-1].numel()
        ops = [g.operand_again(spec.dtype) for g in spec.projections] if ops is None else ops
        self.side_stream = SideStream(device, m * sum(g.n for g in spec.groups))
        self.saved = saved_forwards(spec.projections, ops, each, m, self.side_stream, device)
        self.factors = None
        if spec.norm is not None and rstd is not None and norm_weight is not None:
            self.factors = NormFactors(rstd, norm_weight, spec.norm)

    def finish(
        self, gradients: Sequence[OutputGradient], needed: list[bool], others: Sequence[torch.Tensor | None],
        d_residual: torch.Tensor | None, *, with_dx: bool, with_dw: bool, spare: int,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None]]:  # fmt: skip
        """(dX (…, K), the gradient (K,) of the norm's weight, those of all parameters), of the gradients of the groups'
        outputs. needed: autograd's flags of the groups' parameters; others: the gradients of the other projections';
        with_dx: whether dX is wanted; the others as in `NormGradient`."""
        groups, source = self.spec.groups, None
        saved = self.saved[: len(groups)]
        if self.h is not None:
            source = SavedInput(self.h, self.spec.dtype, self.factors)
        with self.side_stream:
            own = shared_parameter_gradients(groups, saved, gradients, needed, source)
            d_parameters = as_parameters([*own, *others], self.each.parameters, self.saved)
        dx = d_weight = None
        if with_dx:
            norm = NormGradient(self.h, self.factors, self.shape, spare, with_dw)
            dx, d_weight = norm.of(shared_input_gradient(groups, saved, gradients), d_residual)
        self.side_stream.join()
        return dx, d_weight, d_parameters
