"""LoRA's own products of rows of many adapters in the form in which each row makes its own adapter's columns alone
(ops/own_columns.py), beside those over the columns of all adapters, most of which are then thrown away. S, dS, dA and
dB lie where they lie there, so that each product chooses for itself.

Run: python -m pytest tests/lorakernels/test_multi.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..ops.concat_operand import ScaledS
from ..ops.grad_accumulator import GradAccumulator, gradient_zeros
from ..ops.lora_grad import SavedInput
from ..ops.own_columns import A_TILES, TILES, own_a_gradients, own_ds_and_db, own_s, takes
from ..runtime import MAX_FUSED_RANK, deterministic
from .operand import Operand
from .projection import Projection


def s_forms(
    projection: Projection, x: torch.Tensor, op: Operand, out: torch.Tensor, scaled_s: ScaledS
) -> dict[str, Callable[[], None]]:  # fmt: skip
    """By tile, S of x (M, K) into out (M, p), and sS into scaled_s. None where the form is not worth a trial."""

    def run(tile: str) -> None:
        own, rows = projection.own_columns(x)
        own_s(x, op.a, own, rows, out, scaled_s, tile)

    return {tile: partial(run, tile) for tile in TILES} if _tried(projection, x, op) else {}


def ds_forms(
    projection: Projection, dy: torch.Tensor, op: Operand, ds: torch.Tensor, scaled_s: torch.Tensor,
    accumulator: GradAccumulator | None,
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By tile, dS of dY (M, N) into ds (M, p), with scaled_s (M, p); returns dB of all members (N, r), float32. None
    where the form is not worth a trial, or the linears have columns of several numbers."""

    def run(tile: str) -> torch.Tensor:
        own, rows = projection.own_columns(dy)
        db = gradient_zeros(accumulator, projection.n, projection.ranks[0], dy.device)
        own_ds_and_db(dy, op.sb, own, rows, ds, scaled_s, db, tile)
        return db

    fits = _tried(projection, dy, op) and len(set(projection.ranks)) == 1
    return {tile: partial(run, tile) for tile in TILES} if fits else {}


def da_forms(
    projection: Projection, ds: torch.Tensor, op: Operand, source: SavedInput, accumulator: GradAccumulator | None
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By tile, dA (rank, K) of all members, float32, of ds (M, p) and the input. None where the form is not worth a
    trial."""
    factors = source.factors

    def run(tile: str) -> torch.Tensor:
        own, rows = projection.own_columns(ds)
        da = gradient_zeros(accumulator, projection.rank, projection.k, ds.device)
        own_a_gradients(source.tensor() if factors is None else source.h, ds, own, rows, da, tile, factors)
        return da

    whole = factors is None or ds.dtype != torch.float16  # there rstd · dS could overflow
    return {tile: partial(run, tile) for tile in A_TILES} if whole and _tried(projection, ds, op) else {}


def _tried(projection: Projection, wide: torch.Tensor, op: Operand) -> bool:
    """Whether the form is worth a trial: not where one kernel holds the columns of all adapters in its registers."""
    if projection.slot is None or projection.rank <= MAX_FUSED_RANK or deterministic():
        return False
    return takes(op.a, wide)
