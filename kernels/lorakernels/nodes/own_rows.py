"""LoRA's own products of rows of many adapters in the form in which each row makes its own adapter's columns alone
(ops/own_columns.py), beside those over the columns of all adapters, most of which are then thrown away. S, dS, dA and
dB lie where they lie there, so that each product chooses for itself.

Run: python -m pytest tests/lorakernels/test_multi.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..ops.concat_operand import ScaledS
from ..ops.grad_accumulator import GradAccumulator, gradient_zeros
from ..ops.lora_grad import SavedInput
from ..ops.multi_lora import add_a_gradients
from ..ops.own_columns import TILES, own_ds_and_db, own_s, takes
from ..runtime import MAX_FUSED_RANK, deterministic
from .operand import Operand
from .projection import LinearSlots, Projection


def s_forms(
    projection: Projection, x: torch.Tensor, op: Operand, out: torch.Tensor, scaled_s: ScaledS
) -> dict[str, Callable[[], None]]:  # fmt: skip
    """By tile, S of x (M, K) into out (M, p), and sS into scaled_s. None where the form is not worth a trial."""

    def run(tile: str) -> None:
        for columns, _, slots in _by_linear(projection, x, op):
            own_s(x, slots.table, slots.jobs, out, scaled_s, columns, tile)

    return {tile: partial(run, tile) for tile in TILES} if _tried(projection, x, op) else {}


def ds_forms(
    projection: Projection, dy: torch.Tensor, op: Operand, ds: torch.Tensor, scaled_s: torch.Tensor,
    accumulator: GradAccumulator | None,
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By tile, dS of dY (M, N) into ds (M, p), with scaled_s (M, p); returns dB of all members (N, r), float32. None
    where the form is not worth a trial, or the linears have columns of several numbers."""

    def run(tile: str) -> torch.Tensor:
        db = gradient_zeros(accumulator, projection.n, projection.ranks[0], dy.device)
        for columns, rows, slots in _by_linear(projection, dy, op):
            own_ds_and_db(dy[:, rows], slots.table, slots.jobs, ds, scaled_s, db[rows], columns, tile)
        return db

    fits = _tried(projection, dy, op) and len(set(projection.ranks)) == 1
    return {tile: partial(run, tile) for tile in TILES} if fits else {}


def da_forms(
    projection: Projection, ds: torch.Tensor, op: Operand, source: SavedInput, accumulator: GradAccumulator | None
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """dA (rank, K) of all members, float32, of ds (M, rank) and the input. None where the form is not worth a trial."""
    factors = source.factors

    def run() -> torch.Tensor:
        da = gradient_zeros(accumulator, projection.rank, projection.k, ds.device)
        if factors is None:
            x, narrow = source.tensor(), ds
        else:  # X is not made again: rstd goes to the narrow dS, and the norm's weight to the result
            x, narrow = source.h, (ds * factors.rstd[:, None]).to(ds.dtype)
        for _, _, slots in _by_linear(projection, x, op):
            add_a_gradients(x, narrow, slots.table, slots.jobs, da)
        return da if factors is None else da.mul_(factors.weight + factors.norm.offset)

    whole = factors is None or ds.dtype != torch.float16  # there rstd · dS could overflow
    return {"own": run} if whole and _tried(projection, source.h, op) else {}


def _tried(projection: Projection, wide: torch.Tensor, op: Operand) -> bool:
    """Whether the form is worth a trial: not where one kernel holds the columns of all adapters in its registers, and
    not where tables of the adapters' places would be made anew on each forward."""
    if projection.slot is None or projection.rank <= MAX_FUSED_RANK or deterministic():
        return False
    if op.full is None or op.full is not projection.buffer or not takes(op.full, wide):
        return False
    served = {j for m, j in zip(projection.members, projection.linear_of, strict=True) if m.a is not None}
    return len(served) == len(projection.linears)


def _by_linear(
    projection: Projection, x: torch.Tensor, op: Operand
) -> Iterator[tuple[slice, slice, LinearSlots]]:  # fmt: skip
    """Each linear's columns of S, with the spare ones those of the last, its columns of Y, and its slots."""
    columns = projection.linear_columns
    columns = [*columns[:-1], slice(columns[-1].start, projection.p)]
    return zip(columns, projection.linear_rows, projection.slots(x, op, None), strict=True)
