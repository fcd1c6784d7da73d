"""Which tiles of a kernel are tried at a shape: those that cannot win there are neither compiled nor timed.

Two rules follow from what a GPU is: a program that walks down the rows wants as many rows as it walks, and a grid wants
programs for its multiprocessors, but not so many short ones that each pays its start anew. The others are what was
measured on an H200: the choices that 90 cells of the published results recorded, 256 to 8192 rows of 576 to 28672
columns. `tests/lorakernels/test_worth_trying.py` holds every rule against each of them.

Rows come as the power of two that `tune.bucket` makes of them, because the choice is shared by a bucket. The library's
form is always tried beside the tiles, and is all that is left where these functions return nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..ops.glu import WHOLE_TILES
from ..ops.lora_grad import A_TILES, DS_DB_TILES
from ..ops.multi_product import TILES as TAIL_TILES
from ..ops.multi_product import takes
from ..runtime import cdiv, deterministic

FEWEST = 1 / 3  # programs for each multiprocessor; a coarse tile with fewer was never recorded as the fastest
MOST = 8  # the same for the finest tiles
NORM_COLUMNS = 1024  # above it a norm reads its rows twice from memory where the two launches read them once
# Adapters of a linear from which on a product of our own is tried beside the library's over columns for all of them:
# those of 8 cost nothing, of 16 6 % and of 32 12 to 17 % of an 8B's products, and ours begins behind the library's.
TAIL_ADAPTERS = 16
GLU_ROWS = 512  # up to it the activation by itself fills the GPU better than tiles that hold all columns


def norm_tiles(columns: int) -> list[str]:
    """Of a norm with S = norm(x) · Aᵀ in one launch, x (M, columns)."""
    return ["fused_wide", "fused_small"] if columns <= NORM_COLUMNS else []


def s_tiles(copied: bool) -> list[str]:
    """Of S = x · Aᵀ; copied: x is written in front of it by the same launch."""
    return ["fused"] if copied else ["fused", "fused_small"]


def dropped_s_tiles() -> list[str]:
    """Of S = dropout(x) · Aᵀ."""
    return ["fused_small"]


def glu_tiles(rows: int) -> list[str]:
    """Of act(gate) · up with S in one launch, gate (rows, I)."""
    return ["fused", "fused_small"] if rows > GLU_ROWS else []


@cache
def a_gradient_tiles(rows: int, columns: int, dropped: bool, multiprocessors: int) -> list[str]:
    """Of dA from one read of X (rows, columns); dropped: the mask is drawn again, which only the finest has room
    for."""
    grids = {name: _down(tile, rows, columns) for name, tile in A_TILES.items()}
    finest = _finest(grids)
    return [finest] if dropped else _kept(grids, multiprocessors, most=math.inf)


@cache
def glu_backward_tiles(rows: int, columns: int, multiprocessors: int) -> list[str]:
    """Of the activation's backward with dA, dS and dB in it, gate (rows, columns)."""
    return _kept({name: _down(tile, rows, columns) for name, tile in WHOLE_TILES.items()}, multiprocessors)


@cache
def ds_and_db_tiles(fitting: tuple[str, ...], rows: int, columns: int, multiprocessors: int) -> list[str]:
    """Of dS and dB from one read of dY (rows, columns); fitting: the tiles that the members' widths allow."""
    grids = {}
    for name in fitting:
        bm, bn, _, _, steps, down = DS_DB_TILES[name]
        across = Grid(cdiv(rows, bm) * cdiv(columns, bn * steps), True)
        grids[name] = _down(DS_DB_TILES[name], rows, columns) if down else across
    return _kept(grids, multiprocessors)


def tails(
    adapters: int, x: torch.Tensor, w: torch.Tensor, rank: int, widths: Sequence[int], *others: torch.Tensor | None,
    dropped: bool,
) -> list[str]:  # fmt: skip
    """Of a product whose tail looks each row's adapter up, of so many; the others as in `takes`. dropped: it draws a
    mask again, for which there is one tile. None of what the kernel does not take, and where torch is to be
    deterministic: which form is the faster may be another one next time."""
    if adapters < TAIL_ADAPTERS or deterministic() or not takes(x, w, rank, widths, *others):
        return []
    return ["tail"] if dropped else list(TAIL_TILES)


class Grid(NamedTuple):
    """How many programs a tile makes of a shape, and whether a program has all the rows that it would walk."""

    programs: int
    full: bool


def _down(tile: tuple[Any, ...], rows: int, columns: int) -> Grid:
    bm, bn, _, _, steps = tile[:5]
    return Grid(cdiv(columns, bn) * cdiv(rows, bm * steps), rows >= bm * steps)


def _finest(grids: Mapping[str, Grid]) -> str:
    """The tile with the most programs; of several the last, which walks the fewest rows."""
    return max(reversed(list(grids)), key=lambda name: grids[name].programs)


def _kept(grids: Mapping[str, Grid], multiprocessors: int, most: float = MOST) -> list[str]:
    """The coarse tiles that have enough programs; the finest where it has not too many, or where no other is left."""
    if not grids:
        return []
    finest = _finest(grids)
    least = FEWEST * multiprocessors
    coarse = [n for n, grid in grids.items() if n != finest and grid.full and grid.programs >= least]
    return coarse + [finest] * (not coarse or grids[finest].programs <= most * multiprocessors)
