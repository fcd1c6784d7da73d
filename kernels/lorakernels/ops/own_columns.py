"""Rows of several adapters whose columns of S lie side by side (nodes/operand.py): whose columns are whose, and the
products in which each row makes the columns of its own adapter alone:

    S = X · Aᵀ      (M, p), zero in the other adapters' columns, and beside it sS, each column times a factor
    dA = dSᵀ · X    (p, K)

A product over the columns of all of n adapters computes n times as much, of which the others' columns are thrown away
(job_columns.py). Here a program has rows of one job and reads that job's columns; so have those of
`lora_grad.ds_and_db` and of the activation (glu.py) where they are given an `Own`. X: (M, K), A: (p, K); of one linear,
or of several over one X, each with columns of its own. dA grows in float32 by atomic adds; no sum goes over rows of two
jobs. Matrices are found from the operand's own address: one that a kernel reads from a table is not known to be
aligned, and what lies there would be loaded element by element, each time waited for. These kernels have no torch path:
where none of them runs, the columns of all adapters are made.
Run: python -m pytest tests/lorakernels/test_own_columns.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..runtime import (
    MAX_FUSED_RANK,
    cdiv,
    check,
    jit,
    kernel,
    next_power_of_2,
    rank_tile,
    stages_of,
    table,
    tensor_cores,
    tl,
)
from .adapter import in_units
from .concat_operand import ScaledS
from .job_rows import JobRows, rows_of
from .rms_norm import NormFactors

# (rows, columns, warps, stages) of a program, and of dA the blocks of rows that it walks down
TILES = {"own": (64, 128, 4, 3), "own_small": (32, 128, 4, 3)}
A_TILES = {"own": (64, 128, 4, 3, 8), "own_short": (64, 64, 4, 3, 2)}
CLEARED = 64  # columns that become zero at once


class LinearColumns(NamedTuple):
    """One linear's part of S. columns: those of its jobs and spare ones; jobs: (first column, rank) of each job, a rank
    of 0 for one without an adapter here."""

    columns: slice
    jobs: Sequence[tuple[int, int]]


class Launch(NamedTuple):
    """Of one launch: the first of its linears and their number, and of each the columns of a job that it makes, at most
    `rank` from `skip` on."""

    linear: int
    linears: int
    skip: int
    rank: int


class OwnColumns:
    """Whose columns of S are whose, as kernels find it on the device. linears: in order, with as many jobs each."""

    def __init__(self, linears: Sequence[LinearColumns], device: torch.device) -> None:
        self.linears, self.jobs = list(linears), len(linears[0].jobs)
        self.rank = max(rank for own in linears for _, rank in own.jobs)
        # (first column, rank, first column among the linear's) of each linear's jobs, for `place_of`
        self.places = [(at, rank, at - own.columns.start) for own in linears for at, rank in own.jobs]
        self.of_jobs = table(self.places, torch.int32, device)
        ends = (end for own in linears for end in (own.columns.start, own.columns.stop))
        self.aligned = in_units((*ends, *(i for place in self.places for i in place)), ())

    def launches(self) -> Iterator[Launch]:
        """As many linears at once as registers have columns for."""
        for skip in range(0, max(1, self.rank), MAX_FUSED_RANK):
            rank = rank_tile(min(self.rank - skip, MAX_FUSED_RANK))
            count = MAX_FUSED_RANK // rank
            for linear in range(0, len(self.linears), count):
                yield Launch(linear, min(count, len(self.linears) - linear), skip, rank)


class Own(NamedTuple):
    """Whose columns are whose, and whose rows."""

    columns: OwnColumns
    rows: JobRows


@jit
def place_of(job_ptr, number, ALIGNED: tl.constexpr):
    """(first column, rank, first column among the linear's) of a job of a linear: an entry of `OwnColumns.of_jobs`."""
    place = job_ptr + 3 * number
    column, rank, inner = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    if ALIGNED:  # only then are loads and stores of several elements, and loads copied ahead
        column, rank, inner = tl.multiple_of(column, 8), tl.multiple_of(rank, 8), tl.multiple_of(inner, 8)
    return column, rank, inner


@jit
def columns_of(
    job_ptr, job, jobs, linear, skip, LINEARS: tl.constexpr, ALIGNED: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """(columns (R,), which of them are known (R,)) of a job: of the LINEARS from `linear` on each one's RANK columns
    from `skip` on, side by side."""
    r, i = tl.arange(0, R) % RANK, tl.arange(0, R) // RANK
    place = job_ptr + 3 * ((linear + i) * jobs + job)
    rank = tl.load(place + 1, mask=i < LINEARS, other=0)
    column = tl.load(place, mask=i < LINEARS, other=0) + skip + r
    if ALIGNED:
        known = skip + tl.arange(0, R) // 8 * 8 % RANK < tl.max_constancy(rank, 8)
        column = tl.max_contiguous(tl.multiple_of(column, 8), 8)
    else:
        known = skip + r < rank
    return column, known


@jit
def store_own(
    s_rows, scaled_rows, scale_ptr, acc, mine, column, known, job_ptr, job, jobs, linear, first, last,
    SCALED: tl.constexpr, LINEARS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """S (BM, R), and SCALED sS, into the columns `column` (R,) that are known, and zeros into the linears' others from
    `first` to `last`. The pointers (BM, 1) are to the rows, of which those that are mine (BM, 1) are written."""
    dtype = s_rows.dtype.element_ty
    tl.store(s_rows + column[None, :], acc.to(dtype), mask=mine & known[None, :])
    if SCALED:
        scale = tl.load(scale_ptr + column, mask=known, other=0.0)
        tl.store(scaled_rows + column[None, :], (acc * scale[None, :]).to(dtype), mask=mine & known[None, :])
    for start in range(first, last, CLEARED):
        c = start + tl.arange(0, CLEARED)
        unit = c // 8 * 8 if ALIGNED else c
        other = unit < last
        for i in tl.static_range(LINEARS):  # pyright: ignore[reportGeneralTypeIssues]
            own, rank, _ = place_of(job_ptr, (linear + i) * jobs + job, ALIGNED)
            other &= (unit < own) | (unit >= own + rank)
        tl.store(s_rows + c[None, :], tl.zeros((BM, CLEARED), dtype), mask=mine & other[None, :])
        if SCALED:
            tl.store(scaled_rows + c[None, :], tl.zeros((BM, CLEARED), dtype), mask=mine & other[None, :])


@kernel
def _own_s_kernel(
    x_ptr, program_ptr, job_ptr, a_ptr, s_ptr, scaled_ptr, scale_ptr,
    k, jobs, linear, first, last, skip, x_row, a_row, s_row, scaled_row,
    LINEARS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr,
    R: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """BM rows of one job for the `columns_of` the LINEARS, whose columns are those from `first` to `last`; zeros come
    with the first ones of each."""
    begin, end, job = rows_of(program_ptr, tl.program_id(0), 0, BM, True)
    row = (begin + tl.arange(0, BM)).to(tl.int64)
    column, known = columns_of(job_ptr, job, jobs, linear, skip, LINEARS, ALIGNED, RANK, R)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, k, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < end) & (col[None, :] < k)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0)
        spot = column.to(tl.int64)[None, :] * a_row + col[:, None]
        a = tl.load(a_ptr + spot, mask=(col[:, None] < k) & known[None, :], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    store_own(
        s_ptr + row[:, None] * s_row, scaled_ptr + row[:, None] * scaled_row, scale_ptr, acc, row[:, None] < end,
        column, known, job_ptr, job, jobs, linear, first, tl.where(skip == 0, last, first),
        True, LINEARS, ALIGNED, BM, CLEARED,
    )  # fmt: skip


@kernel
def _own_a_kernel(
    x_ptr, w_ptr, rstd_ptr, program_ptr, job_ptr, ds_ptr, da_ptr, k, jobs, linear, skip, x_row, ds_row, da_row, offset,
    NORM: tl.constexpr, LINEARS: tl.constexpr, ALIGNED: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows of one job times BN columns of X, for the `columns_of` the LINEARS. Behind a norm X is not made
    again: rstd goes to the narrow dS, and the norm's weight to the sum."""
    begin, end, job = rows_of(program_ptr, tl.program_id(1), 0, STEPS * BM, True)
    column, mine = columns_of(job_ptr, job, jobs, linear, skip, LINEARS, ALIGNED, RANK, R)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, R), tl.float32)
    for i in range(tl.minimum(STEPS, tl.cdiv(end - begin, BM))):
        row = (begin + i * BM + tl.arange(0, BM)).to(tl.int64)
        known = row[:, None] < end
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=known & (col[None, :] < k), other=0.0)
        spot = ds_ptr + row[:, None] * ds_row + column[None, :]
        ds = tl.load(spot, mask=known & mine[None, :], other=0.0)
        if NORM:
            rstd = tl.load(rstd_ptr + row, mask=row < end, other=0.0)
            ds = (ds.to(tl.float32) * rstd[:, None]).to(ds_ptr.dtype.element_ty)
        acc = tl.dot(tl.trans(x.to(ds_ptr.dtype.element_ty)), ds, acc, input_precision="ieee")
    if NORM:
        acc *= (tl.load(w_ptr + col, mask=col < k, other=0.0).to(tl.float32) + offset)[:, None]
    of_a = da_ptr + column.to(tl.int64)[None, :] * da_row + col[:, None]
    tl.atomic_add(of_a, acc, mask=(col[:, None] < k) & mine[None, :], sem="relaxed")


def takes(adapters: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether the kernels take X or dY (M, …) with adapters that lie in this tensor, of any shape."""
    return adapters.dtype == wide.dtype and tensor_cores(wide, adapters)


def own_s(x: torch.Tensor, a: torch.Tensor, own: Own, out: torch.Tensor, scaled_s: ScaledS, tile: str = "own") -> None:
    """S of x (M, K) and a (p, K) into the linears' columns of out (M, p), and sS beside it. tile: a key of TILES; needs
    `takes`. Raises ValueError where the shapes do not fit."""
    columns, jobs = own.columns, own.columns.jobs
    check(x.shape[1] == a.shape[1] and len(a) == out.shape[1], "X, A and S do not fit", x=x, a=a, s=out)
    check(out.shape == scaled_s.out.shape, "S and sS do not fit", s=out, scaled_s=scaled_s.out)
    check_own(own, x, out)
    bm, bn, warps, stages = TILES[tile]
    programs = own.rows.programs(bm)
    for launch in columns.launches():
        part = columns.linears[launch.linear : launch.linear + launch.linears]
        _own_s_kernel[(len(programs),)](
            x, programs, columns.of_jobs, a, out, scaled_s.out, scaled_s.scales,
            x.shape[1], jobs, launch.linear, part[0].columns.start, part[-1].columns.stop, launch.skip,
            x.stride(0), a.stride(0), out.stride(0), scaled_s.out.stride(0),
            LINEARS=launch.linears, ALIGNED=columns.aligned, BM=bm, BN=bn, RANK=launch.rank,
            R=next_power_of_2(launch.rank * launch.linears), CLEARED=CLEARED,
            num_warps=warps, num_stages=stages_of(x, stages),
        )  # fmt: skip


def own_a_gradients(
    x: torch.Tensor, ds: torch.Tensor, own: Own, da: torch.Tensor, tile: str = "own",
    factors: NormFactors | None = None,
) -> None:  # fmt: skip
    """dA of x (M, K) in any dtype and dS (M, p) is added to da (≥ the jobs' columns, K), float32. factors: of the norm
    whose input x is, where its output is meant. tile: a key of A_TILES; needs `takes` of ds. Raises ValueError where
    the shapes do not fit."""
    columns = own.columns
    last = max(column + rank for column, rank, _ in columns.places)
    check(da.shape[1] == x.shape[1] and last <= len(da), f"dA and X do not fit {last} columns of dS", da=da, x=x)
    check_own(own, x, ds)
    bm, bn, warps, stages, steps = A_TILES[tile]
    programs = own.rows.programs(bm * steps)
    rstd, weight, offset = (x, x, 0.0) if factors is None else (factors.rstd, factors.weight, factors.norm.offset)
    for launch in columns.launches():
        _own_a_kernel[(cdiv(x.shape[1], bn), len(programs))](
            x, weight, rstd, programs, columns.of_jobs, ds, da, x.shape[1], columns.jobs, launch.linear, launch.skip,
            x.stride(0), ds.stride(0), da.stride(0), offset,
            NORM=factors is not None, LINEARS=launch.linears, ALIGNED=columns.aligned,
            STEPS=steps, BM=bm, BN=bn, RANK=launch.rank, R=next_power_of_2(launch.rank * launch.linears),
            num_warps=warps, num_stages=stages_of(x, stages),
        )  # fmt: skip


def check_own(own: Own, wide: torch.Tensor, s: torch.Tensor) -> None:
    """Raises ValueError where the jobs' rows or columns are not those of wide (M, …) and S (M, p)."""
    columns, rows = own
    check(len(wide) == len(s) == rows.rows, f"the jobs have {rows.rows} rows", wide=wide, s=s)
    last = max(linear.columns.stop for linear in columns.linears)
    check(last <= s.shape[1], f"S has no {last} columns", s=s)
    if rows.present and rows.present[-1] >= columns.jobs:
        raise ValueError(f"a row is of job {rows.present[-1]}; expected one of the {columns.jobs} from 0")
