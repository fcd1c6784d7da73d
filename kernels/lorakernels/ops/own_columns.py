"""S, or dS, of rows of several adapters whose columns lie side by side: each row makes its own adapter's columns alone.

    S = scale · X · Aᵀ      (M, p), zero in the other adapters' columns; beside it sS, each column times a factor
    dS = scale · dY · B     (M, p), the same; of the same read of dY also dB = dYᵀ · sS

A product over the columns of all of n adapters computes n times as much, of which the others' columns are thrown away
(job_columns.py). Here a program has rows of one adapter and reads that one's matrices, found as in multi_lora.py, whose
tables these are; dA is `gradients` there. X: (M, K), dY: (M, N), A: (r, K), B: (N, r). dB grows in float32 by atomic
adds; no sum goes over rows of two adapters. Run: python -m pytest tests/lorakernels/test_own_columns.py
"""

from __future__ import annotations

import torch

from ..runtime import check, kernel, rank_tile, stages_of, tensor_cores, tl
from .adapter import TL
from .concat_operand import ScaledS
from .job_rows import JobRows
from .multi_lora import MAX_COLUMNS, AdapterTable, check_rows, down, gradients

# (rows, columns, warps, stages) of a program
TILES = {"own": (64, 128, 4, 3), "own_small": (32, 128, 4, 3)}
CLEARED = 64  # columns that become zero at once


@kernel
def _own_columns_kernel(
    x_ptr, program_ptr, number_ptr, factor_ptr, s_ptr, scaled_ptr, scale_ptr, db_ptr,
    n, skip, first, last, x_row, s_row, scaled_row, db_row,
    TYPE: tl.constexpr, OF_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """BM rows of one adapter, the columns of its S from `skip` on; of those from `first` to `last` all others become
    zero. sS is written with S, and read with dS (OF_B)."""
    program = program_ptr + 4 * tl.program_id(0)
    begin, end, adapter = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    row = (begin + tl.arange(0, BM)).to(tl.int64)
    entry = number_ptr + 9 * adapter
    matrix = tl.load(entry + OF_B).to(tl.pointer_type(TYPE))  # pyright: ignore[reportArgumentType]
    rank, column, apart = tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7 + OF_B)
    dtype = s_ptr.dtype.element_ty
    r = skip + tl.arange(0, R)
    own = (row[:, None] < end) & (r[None, :] < rank)
    s_rows, scaled_rows = s_ptr + row[:, None] * s_row, scaled_ptr + row[:, None] * scaled_row
    acc = tl.zeros((BM, R), tl.float32)
    if OF_B:
        scaled = tl.load(scaled_rows + column + r[None, :], mask=own, other=0.0)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < end) & (col[None, :] < n)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0)
        spot = col[:, None] * apart + r[None, :] if OF_B else r[None, :] * apart + col[:, None]
        known = (col[:, None] < n) & (r[None, :] < rank)
        acc = tl.dot(x, tl.load(matrix + spot, mask=known, other=0.0), acc, input_precision="ieee")
        if OF_B:
            db = tl.dot(tl.trans(x), scaled, input_precision="ieee")
            spot = db_ptr + col[:, None].to(tl.int64) * db_row + column - first + r[None, :]
            tl.atomic_add(spot, db, mask=known, sem="relaxed")
    acc *= tl.load(factor_ptr + 2 * adapter)
    tl.store(s_rows + column + r[None, :], acc.to(dtype), mask=own)
    if not OF_B:
        scale = tl.load(scale_ptr + column + r, mask=r < rank, other=0.0)
        tl.store(scaled_rows + column + r[None, :], (acc * scale[None, :]).to(dtype), mask=own)
    if skip == 0:
        for start in range(first, last, CLEARED):
            c = start + tl.arange(0, CLEARED)
            other = (row[:, None] < end) & ((c < last) & ((c < column) | (c >= column + rank)))[None, :]
            tl.store(s_rows + c[None, :], tl.zeros((BM, CLEARED), dtype), mask=other)
            if not OF_B:
                tl.store(scaled_rows + c[None, :], tl.zeros((BM, CLEARED), dtype), mask=other)


def takes(adapters: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether the kernel takes X or dY (M, …) with adapters that lie in this tensor, of any shape."""
    return adapters.dtype == wide.dtype and tensor_cores(wide, adapters)


def own_s(
    x: torch.Tensor, table: AdapterTable, rows: JobRows, out: torch.Tensor, scaled_s: ScaledS, columns: slice,
    tile: str = "own",
) -> None:  # fmt: skip
    """S of X (M, K) into the columns, a slice of known ends, of out (M, p), and sS beside it; `Adapter.column` says
    which of them are whose. tile: a key of TILES. Raises ValueError where the shapes do not fit."""
    if _fit(x, table, rows, out, scaled_s.out, columns, False):
        _launch(x, table, rows, out, scaled_s.out, scaled_s.scales, None, columns, tile)
        return
    out[:, columns] = 0
    down(x, table, rows, out=out)
    scaled_s.out[:, columns] = out[:, columns] * scaled_s.scales[columns]


def own_ds_and_db(
    dy: torch.Tensor, table: AdapterTable, rows: JobRows, out: torch.Tensor, scaled_s: torch.Tensor, db: torch.Tensor,
    columns: slice, tile: str = "own",
) -> None:  # fmt: skip
    """dS of dY (M, N) into the columns of out (M, p), as `own_s`; dB of sS (M, p) is added to db (N, ≥ the adapters'
    columns), float32, each adapter's where it is among the columns."""
    behind = max(a.column + len(a.a) for a in table.adapters if a is not None) - columns.start
    check(db.shape[0] == table.n and db.shape[1] >= behind, "dB does not fit", dy=dy, db=db)
    if _fit(dy, table, rows, out, scaled_s, columns, True):
        _launch(dy, table, rows, out, scaled_s, scaled_s, db, columns, tile)
        return
    out[:, columns] = 0
    down(dy, table, rows, of_b=True, out=out)
    for adapter, own in zip(table.adapters, gradients(dy, scaled_s, table, rows, of_b=True), strict=True):
        if adapter is not None and own is not None:
            first = adapter.column - columns.start
            db[:, first : first + own.shape[1]] += own


def _fit(
    wide: torch.Tensor, table: AdapterTable, rows: JobRows, out: torch.Tensor, scaled_s: torch.Tensor, columns: slice,
    of_b: bool,
) -> bool:  # fmt: skip
    """Whether the kernel takes them. Raises ValueError where nothing does."""
    check_rows(wide, table, rows, of_b)
    check(out.shape == scaled_s.shape and len(out) == len(wide), "S and sS do not fit", x=wide, s=out, sS=scaled_s)
    there = [a for a in table.adapters if a is not None]
    lie = all(columns.start <= a.column and a.column + len(a.a) <= columns.stop <= out.shape[1] for a in there)
    check(lie, f"an adapter does not lie in the columns {columns.start} to {columns.stop}", s=out)
    alike = all(t.dtype == wide.dtype and t.stride(1) == 1 for t in (out, scaled_s))
    return alike and table.alike and takes(table.sample, wide)


def _launch(
    wide: torch.Tensor, table: AdapterTable, rows: JobRows, out: torch.Tensor, scaled_s: torch.Tensor,
    scales: torch.Tensor, db: torch.Tensor | None, columns: slice, tile: str,
) -> None:  # fmt: skip
    bm, bn, warps, stages = TILES[tile]
    programs, (numbers, factors) = rows.programs(bm), table.on_device()
    grad = factors if db is None else db
    for skip in range(0, table.rank, MAX_COLUMNS):
        _own_columns_kernel[(programs.shape[0],)](
            wide, programs, numbers, factors, out, scaled_s, scales, grad,
            wide.shape[1], skip, columns.start, columns.stop,
            wide.stride(0), out.stride(0), scaled_s.stride(0), grad.stride(0),
            TYPE=getattr(tl, TL[table.sample.dtype]), OF_B=int(db is not None), BM=bm, BN=bn,
            R=rank_tile(min(table.rank - skip, MAX_COLUMNS)), CLEARED=CLEARED,
            num_warps=warps, num_stages=stages_of(wide, stages),
        )  # fmt: skip
