"""Forward of the autograd nodes: from the rows that come in to the output of the projections that share them.

The operand [X | S] is written by whoever makes X: a norm, or a copy. A tensor that somebody else wrote is copied only
where that is measured to be worth it. For products in FP8 a norm leaves X in e4m3, too, which spares them a read of two
bytes an element. X itself is written all the same, because S is made of it.
Run: python -m pytest tests/lorakernels/test_projection_node.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ops.concat_operand import LoraColumns, ScaledS, concat_operand_into
from ..ops.quantize_rows import Quantized, new_quantized, quantize_rows_into
from ..ops.rms_norm import Norm, NormInput
from ..ops.rms_norm import forward_into as norm_into
from ..ops.rms_norm import forward_lora_into as norm_lora_into
from ..runtime import tensor_cores
from ..tuning import tune
from ..tuning.worth_trying import norm_tiles, s_tiles
from .operand import Operand, adapters_of
from .products import Fp8Operand, concat_product, lora_input, product_of_apart
from .projection import Projection


@dataclass(slots=True, kw_only=True)
class NodeSpec:
    """What is no tensor of a node's call. groups: the projections that share the node's input; projections: all, in the
    order in which the node saves what it saves for each; norm: before the groups; pass_through: whether the input is
    given back, too; dtype: of the products."""

    groups: Sequence[Projection]
    projections: Sequence[Projection]
    norm: Norm | None
    pass_through: bool
    dtype: torch.dtype


def save(
    ctx: Any, spec: NodeSpec, shape: torch.Size, own: Sequence[torch.Tensor | None],
    scaled_s: Sequence[torch.Tensor | None], seeds: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor | None],
) -> None:  # fmt: skip
    """Keeps for backward what `restored` gives. own: a NamedTuple of the node's own tensors; shape: (…, K) of its
    input; scaled_s, seeds: of each projection."""
    ctx.spec, ctx.shape, ctx.adapters = spec, shape, adapters_of(spec.projections)
    ctx.save_for_backward(*own, *scaled_s, *seeds, *parameters)
    ctx.set_materialize_grads(False)


@dataclass(slots=True)
class NodeInput:
    """The rows x (M, K) that come into a node. Its X is x itself, or norm(x + residual)."""

    x: torch.Tensor
    norm: NormInput | None = None

    def write(self, x_out: torch.Tensor, quantized: Quantized | None) -> torch.Tensor | None:
        """X into x_out (M, K), and in e4m3 to quantized where that is given; returns rstd (M,), None without a norm."""
        if self.norm is not None:
            return norm_into(self.norm, x_out, quantized)
        x_out.copy_(self.x)
        if quantized is not None:
            quantize_rows_into(x_out, *quantized)
        return None

    def write_with_s(
        self, buffer: torch.Tensor, group: Projection, op: Operand, scaled_s: ScaledS, quantized: Quantized | None
    ) -> torch.Tensor | None:
        """[X | S] into buffer (M, K + p), sS to scaled_s, and X in e4m3 to quantized where that is given, in one launch
        or one after the other, whichever is faster; returns rstd (M,), None without a norm."""
        x, norm, k = self.x, self.norm, self.x.shape[1]
        columns = LoraColumns(op.a, group.rank, scaled_s)

        def plain() -> torch.Tensor | None:
            rstd = self.write(buffer[:, :k], quantized)
            lora_input(group, buffer[:, :k], op, None, buffer[:, k:], scaled_s)
            return rstd

        def fused(tile: str) -> torch.Tensor | None:
            rstd = None
            if norm is None:
                concat_operand_into(x, columns, buffer, tile)
            else:
                rstd = norm_lora_into(norm, buffer, columns, tile)
            if quantized is not None:
                quantize_rows_into(buffer[:, :k], *quantized)
            group.keep_own_columns(buffer[:, k:], scaled_s.out)
            return rstd

        tiles = s_tiles(copied=True) if norm is None else norm_tiles(k)
        forms: dict[str, Any] = {tile: partial(fused, tile) for tile in tiles if tensor_cores(buffer, op.a)}
        forms["plain"] = plain
        residual = norm is not None and norm.residual is not None
        key = (tune.bucket(x.shape[0]), k, group.rank, buffer.dtype, residual, *(["fp8"] if quantized else []))
        return forms[tune.pick("norm" if norm else "concat operand", key, forms, x.device)]()


class Filled(NamedTuple):
    """buffer: X in its first columns, (M, K + the largest p); rstd: (M,) of the norm; s and scaled_s: S and sS (M, p)
    of each group; quantized: X in e4m3, where a product is in FP8. A single group's S may lie behind X already."""

    buffer: torch.Tensor
    rstd: torch.Tensor | None
    s: list[torch.Tensor]
    scaled_s: list[torch.Tensor]
    quantized: Quantized | None = None


def fill_operand(
    node_input: NodeInput, groups: Sequence[Projection], ops: Sequence[Operand],
    seeds: Sequence[torch.Tensor | None], dtype: torch.dtype,
) -> Filled:  # fmt: skip
    """[X | S] of groups that share an input. ops: each one's operand; seeds: each one's (members,), or None."""
    x, first = node_input.x, groups[0]
    m, k = x.shape[0], first.k
    buffer = torch.empty(m, k + max(g.p for g in groups), dtype=dtype, device=x.device)
    scaled = [g.new_scaled_s(m, dtype, x.device) for g in groups]
    quantized = new_quantized(m, k, x.device) if any(g.fp8 is not None for g in groups) else None
    if len(groups) == 1 and first.p > 0 and seeds[0] is None:
        rstd = node_input.write_with_s(buffer, first, ops[0], scaled[0], quantized)
        return Filled(buffer, rstd, [buffer[:, k:]], [scaled[0].out], quantized)
    rstd = node_input.write(buffer[:, :k], quantized)
    out = []
    for g, op, seed, scaled_s in zip(groups, ops, seeds, scaled, strict=True):
        s = torch.empty(m, g.p, dtype=dtype, device=x.device)
        lora_input(g, buffer[:, :k], op, seed, s, scaled_s)
        out.append(s)
    return Filled(buffer, rstd, out, [scaled_s.out for scaled_s in scaled], quantized)


def outputs(
    groups: Sequence[Projection], ops: Sequence[Operand], filled: Filled, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Y (M, ΣN) of all groups side by side; a single group's goes to out (M, N) where that is given."""
    buffer = filled.buffer
    if len(groups) == 1:
        return concat_product(groups[0], _operand(groups[0], filled, filled.s[0]), ops[0], out=out)
    y = torch.empty(buffer.shape[0], sum(g.n for g in groups), dtype=buffer.dtype, device=buffer.device)
    at = 0
    for g, op, s in zip(groups, ops, filled.s, strict=True):
        concat_product(g, _operand(g, filled, s), op, out=y[:, at : at + g.n])
        at += g.n
    return y


def _operand(group: Projection, filled: Filled, s: torch.Tensor) -> torch.Tensor | Fp8Operand:
    """What a group's product reads: [X | S] (M, K + p), its S (M, p) brought behind X, or the two apart in FP8."""
    if group.fp8 is not None and filled.quantized is not None:
        return Fp8Operand(filled.quantized, s)
    xs = filled.buffer[:, : group.k + group.p]
    if group.p and s.data_ptr() != xs[:, group.k :].data_ptr():
        xs[:, group.k :].copy_(s)
    return xs


def output_of_foreign_input(
    x: torch.Tensor, group: Projection, op: Operand, seed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y (M, N), sS (M, p)) of an x (M, K) that somebody else wrote, attention say. It is copied in front of S only
    where the one GEMM that this allows is measured to be worth it. seed: (members,), or None."""

    def packed() -> tuple[torch.Tensor, torch.Tensor]:
        filled = fill_operand(NodeInput(x), [group], [op], [seed], x.dtype)
        return outputs([group], [op], filled), filled.scaled_s[0]

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.empty(x.shape[0], group.p, dtype=x.dtype, device=x.device)
        scaled_s = group.new_scaled_s(x.shape[0], x.dtype, x.device)
        lora_input(group, x, op, seed, s, scaled_s)
        return product_of_apart(group, x, s, op), scaled_s.out

    if op.full is None or not group.p or not group.one_gemm:
        return apart()  # nothing would read the two as one
    key = (tune.bucket(x.shape[0]), group.k, group.n, group.p, x.dtype, seed is not None)
    forms = {"packed": packed, "apart": apart}
    return forms[tune.pick("from elsewhere", key, forms, x.device)]()


def of_shape(y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """y (M, N) as (…, N) with the leading shape of `shape` (…, K), and no view to autograd, which would forbid a hook
    to write into it."""
    return torch.ops.aten._unsafe_view(y, [*shape[:-1], y.shape[-1]])
