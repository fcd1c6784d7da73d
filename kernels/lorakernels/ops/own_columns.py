"""S, dS, dA and dB of rows of several adapters whose columns lie side by side (nodes/operand.py): each row makes the
columns of its own adapter alone.

    S = X · Aᵀ        (M, p), zero in the other adapters' columns, and beside it sS, each column times a factor
    dS = dY · sB      (M, p), the same; of the same read of dY also dB = dYᵀ · sS
    dA = dSᵀ · X      (p, K)

A product over the columns of all of n adapters computes n times as much, of which the others' columns are thrown away
(job_columns.py). Here a program has rows of one job and reads that job's columns. X: (M, K), dY: (M, N), A: (p, K),
sB: (N, p); one linear, or several below one another in N, each with columns of its own. The programs of one piece of X
for several linears stand beside one another, so that it comes from memory once. dA and dB grow in float32 by atomic
adds; no sum goes over rows of two jobs. Matrices are found from the operand's own address: one that a kernel reads from
a table is not known to be aligned, and what lies there would be loaded element by element, each time waited for.
Run: python -m pytest tests/lorakernels/test_own_columns.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..runtime import cdiv, check, kernel, rank_tile, stages_of, table, tensor_cores, tl, use_triton
from .adapter import in_units
from .concat_operand import ScaledS
from .job_rows import JobRows
from .multi_lora import MAX_COLUMNS
from .rms_norm import NormFactors

# (rows, columns, warps, stages) of a program, and of dA the blocks of rows that it walks down
TILES = {"own": (64, 128, 4, 3), "own_small": (32, 128, 4, 3)}
A_TILES = {"own": (64, 128, 4, 3, 8), "own_short": (64, 64, 4, 3, 2)}
CLEARED = 64  # columns that become zero at once


class LinearColumns(NamedTuple):
    """One linear's part of S and of Y. columns: of S, those of its jobs and spare ones; rows: of sB, its columns of Y;
    jobs: (first column, rank) of each job, a rank of 0 for one without an adapter here."""

    columns: slice
    rows: slice
    jobs: Sequence[tuple[int, int]]


class OwnColumns:
    """Whose columns of S are whose, as kernels find it on the device. linears: in order, with as many jobs each."""

    def __init__(self, linears: Sequence[LinearColumns], device: torch.device) -> None:
        self.linears, self.jobs = list(linears), len(linears[0].jobs)
        self.rank = max(rank for own in linears for _, rank in own.jobs)
        parts = [(own.columns.start, own.columns.stop, own.rows.start, own.rows.stop) for own in linears]
        self.places = [place for own in linears for place in own.jobs]
        self.of_linears = table([(c, d, a, b - a) for c, d, a, b in parts], torch.int32, device)
        self.of_jobs = table(self.places, torch.int32, device)
        self.n = parts[-1][3]
        self.aligned = in_units((i for row in (*parts, *self.places) for i in row), ())

    def each(self, rows: JobRows) -> Iterator[tuple[LinearColumns, torch.Tensor, slice]]:
        """For each linear and job that has rows and an adapter: the numbers of its rows and its columns."""
        for own in self.linears:
            for job in rows.present:
                column, rank = own.jobs[job]
                if rank:
                    yield own, rows.of(job), slice(column, column + rank)


@kernel
def _own_columns_kernel(
    x_ptr, program_ptr, linear_ptr, job_ptr, matrix_ptr, s_ptr, scaled_ptr, scale_ptr, db_ptr,
    k, jobs, skip, x_row, matrix_row, s_row, scaled_row, db_row,
    OF_B: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """BM rows of one job for one linear: the columns of its S from `skip` on, and zeros in the linear's others. sS is
    written with S, and read with dS (OF_B)."""
    linear, program = tl.program_id(0), program_ptr + 4 * tl.program_id(1)
    begin, end, job = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    first, last = tl.load(linear_ptr + 4 * linear), tl.load(linear_ptr + 4 * linear + 1)
    place = job_ptr + 2 * (linear * jobs + job)
    column, rank = tl.load(place), tl.load(place + 1)
    offset, n = linear * 0, k
    if OF_B:
        offset, n = tl.load(linear_ptr + 4 * linear + 2), tl.load(linear_ptr + 4 * linear + 3)
    if ALIGNED:  # only then are loads and stores of several elements, and loads copied ahead
        column, rank = tl.multiple_of(column, 8), tl.multiple_of(rank, 8)
        first, last = tl.multiple_of(first, 8), tl.multiple_of(last, 8)
        if OF_B:
            offset, n = tl.multiple_of(offset, 8), tl.multiple_of(n, 8)
    row = (begin + tl.arange(0, BM)).to(tl.int64)
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
        x = tl.load(x_ptr + row[:, None] * x_row + offset + col[None, :], mask=inside, other=0.0)
        known = (col[:, None] < n) & (r[None, :] < rank)
        if OF_B:
            spot = (offset + col).to(tl.int64)[:, None] * matrix_row + column + r[None, :]
        else:
            spot = (column + r).to(tl.int64)[None, :] * matrix_row + col[:, None]
        acc = tl.dot(x, tl.load(matrix_ptr + spot, mask=known, other=0.0), acc, input_precision="ieee")
        if OF_B:
            db = tl.dot(tl.trans(x), scaled, input_precision="ieee")
            spot = (offset + col).to(tl.int64)[:, None] * db_row + column - first + r[None, :]
            tl.atomic_add(db_ptr + spot, db, mask=known, sem="relaxed")
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


@kernel
def _own_a_kernel(
    x_ptr, w_ptr, rstd_ptr, program_ptr, job_ptr, ds_ptr, da_ptr, k, jobs, skip, x_row, ds_row, da_row, offset,
    NORM: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows of one job times BN columns of X, for one linear. Behind a norm X is not made again: rstd goes to
    the narrow dS, and the norm's weight to the sum."""
    linear, program = tl.program_id(0), program_ptr + 4 * tl.program_id(1)
    begin, end, job = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    place = job_ptr + 2 * (linear * jobs + job)
    column, rank = tl.load(place), tl.load(place + 1)
    if ALIGNED:
        column, rank = tl.multiple_of(column, 8), tl.multiple_of(rank, 8)
    col, r = tl.program_id(2) * BN + tl.arange(0, BN), skip + tl.arange(0, R)
    acc = tl.zeros((BN, R), tl.float32)
    for i in range(STEPS):
        row = (begin + i * BM + tl.arange(0, BM)).to(tl.int64)
        known = row[:, None] < end
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=known & (col[None, :] < k), other=0.0)
        spot = ds_ptr + row[:, None] * ds_row + column + r[None, :]
        ds = tl.load(spot, mask=known & (r[None, :] < rank), other=0.0)
        if NORM:
            rstd = tl.load(rstd_ptr + row, mask=row < end, other=0.0)
            ds = (ds.to(tl.float32) * rstd[:, None]).to(ds_ptr.dtype.element_ty)
        acc = tl.dot(tl.trans(x.to(ds_ptr.dtype.element_ty)), ds, acc, input_precision="ieee")
    if NORM:
        acc *= (tl.load(w_ptr + col, mask=col < k, other=0.0).to(tl.float32) + offset)[:, None]
    spot = da_ptr + (column + r).to(tl.int64)[None, :] * da_row + col[:, None]
    tl.atomic_add(spot, acc, mask=(col[:, None] < k) & (r[None, :] < rank), sem="relaxed")


def takes(adapters: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether the kernels take X or dY (M, …) with adapters that lie in this tensor, of any shape."""
    return adapters.dtype == wide.dtype and tensor_cores(wide, adapters)


def own_s(
    x: torch.Tensor, a: torch.Tensor, own: OwnColumns, rows: JobRows, out: torch.Tensor, scaled_s: ScaledS,
    tile: str = "own",
) -> None:  # fmt: skip
    """S of x (M, K) and a (p, K) into the linears' columns of out (M, p), and sS beside it. tile: a key of TILES.
    Raises ValueError where the shapes do not fit."""
    check(x.shape[1] == a.shape[1] and len(a) == out.shape[1], "X, A and S do not fit", x=x, a=a, s=out)
    if _fit(x, a, own, rows, out, scaled_s.out):
        _launch(x, a, own, rows, out, scaled_s.out, scaled_s.scales, None, tile)
        return
    for linear in own.linears:
        out[:, linear.columns] = scaled_s.out[:, linear.columns] = 0
    for _, where, columns in own.each(rows):
        where = where.to(x.device)
        s = x[where] @ a[columns].t()
        out[where, columns] = s
        scaled_s.out[where, columns] = (s * scaled_s.scales[columns]).to(s.dtype)


def own_ds_and_db(
    dy: torch.Tensor, sb: torch.Tensor, own: OwnColumns, rows: JobRows, out: torch.Tensor, scaled_s: torch.Tensor,
    db: torch.Tensor, tile: str = "own",
) -> None:  # fmt: skip
    """dS of dy (M, N) and sb (N, p) into the linears' columns of out (M, p). dB of sS (M, p) is added to db (N, ≥ a
    linear's columns), float32: in a linear's rows its own columns, from the first one on. As `own_s`."""
    fits = dy.shape[1] == len(sb) == len(db) == own.n and sb.shape[1] == out.shape[1]
    check(fits, f"dY, sB, dS and dB do not fit {own.n} columns", dy=dy, sb=sb, ds=out, db=db)
    widest = max(c + rank - linear.columns.start for linear in own.linears for c, rank in linear.jobs if rank)
    check(db.shape[1] >= widest, f"dB has no room for {widest} columns", db=db)
    if _fit(dy, sb, own, rows, out, scaled_s):
        _launch(dy, sb, own, rows, out, scaled_s, scaled_s, db, tile)
        return
    for linear in own.linears:
        out[:, linear.columns] = 0
    for linear, where, columns in own.each(rows):
        where = where.to(dy.device)
        part = dy[where, linear.rows]
        out[where, columns] = part @ sb[linear.rows, columns]
        into = db[linear.rows, columns.start - linear.columns.start : columns.stop - linear.columns.start]
        into += part.t() @ scaled_s[where, columns]


def own_a_gradients(
    x: torch.Tensor, ds: torch.Tensor, own: OwnColumns, rows: JobRows, da: torch.Tensor, tile: str = "own",
    factors: NormFactors | None = None,
) -> None:  # fmt: skip
    """dA of x (M, K) in any dtype and dS (M, p) is added to da (≥ the jobs' columns, K), float32. factors: of the norm
    whose input x is, where its output is meant. tile: a key of A_TILES. Raises ValueError where the shapes do not
    fit."""
    last = max(column + rank for column, rank in own.places)
    check(da.shape[1] == x.shape[1] and last <= len(da), f"dA and X do not fit {last} columns of dS", da=da, x=x)
    _check_rows(x, own, rows, ds)
    if not takes(ds, ds) or not use_triton(x) or x.stride(1) != 1 or ds.stride(1) != 1:
        weight = 1.0 if factors is None else factors.weight.to(da.dtype) + factors.norm.offset
        for _, where, columns in own.each(rows):
            where = where.to(x.device)
            part = ds[where, columns]
            part = part if factors is None else (part * factors.rstd[where, None]).to(ds.dtype)
            da[columns] += part.t() @ x[where].to(ds.dtype) * weight
        return
    bm, bn, warps, stages, steps = A_TILES[tile]
    programs = rows.programs(bm * steps)
    rstd, weight, offset = (x, x, 0.0) if factors is None else (factors.rstd, factors.weight, factors.norm.offset)
    for skip in range(0, own.rank, MAX_COLUMNS):
        _own_a_kernel[(len(own.linears), programs.shape[0], cdiv(x.shape[1], bn))](
            x, weight, rstd, programs, own.of_jobs, ds, da, x.shape[1], own.jobs, skip,
            x.stride(0), ds.stride(0), da.stride(0), offset,
            NORM=factors is not None, ALIGNED=own.aligned, STEPS=steps, BM=bm, BN=bn,
            R=rank_tile(min(own.rank - skip, MAX_COLUMNS)),
            num_warps=warps, num_stages=stages_of(x, stages),
        )  # fmt: skip


def _check_rows(wide: torch.Tensor, own: OwnColumns, rows: JobRows, s: torch.Tensor) -> None:
    check(len(wide) == len(s) == rows.rows, f"the jobs have {rows.rows} rows", wide=wide, s=s)
    last = max(linear.columns.stop for linear in own.linears)
    check(last <= s.shape[1], f"S has no {last} columns", s=s)
    if rows.present and rows.present[-1] >= own.jobs:
        raise ValueError(f"a row is of job {rows.present[-1]}; expected one of the {own.jobs} from 0")


def _fit(
    wide: torch.Tensor, adapters: torch.Tensor, own: OwnColumns, rows: JobRows, s: torch.Tensor, scaled_s: torch.Tensor
) -> bool:
    """Whether the kernel takes them. Raises ValueError where nothing does."""
    _check_rows(wide, own, rows, s)
    check(s.shape == scaled_s.shape, "S and sS do not fit", s=s, scaled_s=scaled_s)
    alike = all(t.dtype == wide.dtype and t.stride(1) == 1 for t in (adapters, s, scaled_s))
    return alike and wide.stride(1) == 1 and takes(adapters, wide)


def _launch(
    wide: torch.Tensor, adapters: torch.Tensor, own: OwnColumns, rows: JobRows, s: torch.Tensor,
    scaled_s: torch.Tensor, scales: torch.Tensor, db: torch.Tensor | None, tile: str,
) -> None:  # fmt: skip
    bm, bn, warps, stages = TILES[tile]
    programs, grad = rows.programs(bm), scales if db is None else db
    for skip in range(0, own.rank, MAX_COLUMNS):
        _own_columns_kernel[(len(own.linears), programs.shape[0])](
            wide, programs, own.of_linears, own.of_jobs, adapters, s, scaled_s, scales, grad,
            wide.shape[1], own.jobs, skip,
            wide.stride(0), adapters.stride(0), s.stride(0), scaled_s.stride(0), grad.stride(0),
            OF_B=db is not None, ALIGNED=own.aligned, BM=bm, BN=bn,
            R=rank_tile(min(own.rank - skip, MAX_COLUMNS)), CLEARED=CLEARED,
            num_warps=warps, num_stages=stages_of(wide, stages),
        )  # fmt: skip
