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
from ..ops.lora_grad import AdapterColumns, SavedInput, ds_and_db, fitting_tiles
from ..ops.own_columns import A_TILES, TILES, Own, own_a_gradients, own_s, takes
from ..runtime import deterministic, multiprocessors
from ..tuning import tune
from ..tuning.worth_trying import ds_and_db_tiles
from .operand import Operand
from .projection import Projection


def own_of(projection: Projection, wide: torch.Tensor, op: Operand) -> Own | None:
    """Whose columns are whose, where the kernels take these rows of X or dY (M, …), several adapters have columns in
    S, and atomic adds are allowed; else None."""
    several = projection.slot is not None and len(projection.members) > len(projection.linears)
    return projection.own_columns(wide) if several and not deterministic() and takes(op.a, wide) else None


def s_forms(
    projection: Projection, x: torch.Tensor, op: Operand, out: torch.Tensor, scaled_s: ScaledS
) -> dict[str, Callable[[], None]]:  # fmt: skip
    """By tile, S of x (M, K) into out (M, p), and sS into scaled_s. None where no kernel takes them."""
    own = own_of(projection, x, op)
    return {} if own is None else {tile: partial(own_s, x, op.a, own, out, scaled_s, tile) for tile in TILES}


def ds_forms(
    projection: Projection, dy: torch.Tensor, op: Operand, ds: torch.Tensor, scaled_s: torch.Tensor,
    accumulator: GradAccumulator | None,
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By tile, dS of dY (M, N) into ds (M, p), with scaled_s (M, p); returns dB of all members (N, r), float32. None
    where no kernel takes them, or the linears have columns of several numbers."""
    own, ranks, widths = own_of(projection, dy, op), projection.ranks, projection.widths
    if own is None or len(set(ranks)) > 1:
        return {}
    adapters = AdapterColumns(op.sb, scaled_s, widths, ranks[0], own)
    fitting = tuple(fitting_tiles(dy, widths, [own.columns.rank] * len(widths)))
    tiles = ds_and_db_tiles(fitting, tune.bucket(len(dy)), projection.n, multiprocessors(dy))
    return {f"own_{tile}": partial(ds_and_db, dy, ds, adapters, tile, accumulator) for tile in tiles}


def da_forms(
    projection: Projection, ds: torch.Tensor, op: Operand, source: SavedInput, accumulator: GradAccumulator | None
) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By tile, dA (rank, K) of all members, float32, of ds (M, p) and the input. None where no kernel takes them."""
    own, factors = own_of(projection, ds, op), source.factors

    def run(own: Own, tile: str) -> torch.Tensor:
        da = gradient_zeros(accumulator, projection.rank, projection.k, ds.device)
        own_a_gradients(source.tensor() if factors is None else source.h, ds, own, da, tile, factors)
        return da

    whole = factors is None or ds.dtype != torch.float16  # there rstd · dS could overflow
    return {tile: partial(run, own, tile) for tile in A_TILES} if whole and own is not None else {}
