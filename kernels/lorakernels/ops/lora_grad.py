"""The gradients of LoRA's own matrices, each from one read of the wide tensor that it needs:

    dS = dY · sB   and   dB = dYᵀ · sS     (`ds_and_db`; `b_gradient`: dB alone)
    dA = dSᵀ · X                           (`a_gradient`: X itself, or the input of the norm that made X)

dY: (M, N), sB: (N, p), S: (M, p), X: (M, K), dB: (N, r), dA: (p, K). Rows of several adapters make dS and dB of their
own columns alone (own_columns.py). These products are
hundreds of times longer than wide, so reading dY or X is all they cost; as library calls dS and dB read dY twice, q, k
and v want three products each, and a sum over 8192 rows is split and added up by a further launch. Both results grow
in float32 through atomic adds: the last bits differ from run to run, as those of the attention's backward do, so where
torch is to be deterministic `tune` takes the library's form.
Where X = rstd · h · (w + offset) is a norm's output, it is made again in registers. Measured (docs/lab-notes.md) and
chosen against the library's form by `tune`. Run: python -m pytest tests/lorakernels/test_lora_grad.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import compile_ahead
from ..runtime import cdiv, check, kernel, rank_tile, stages_of, tensor_cores, tl, working_dtype
from .dropout import keep_tile, threshold_and_scale
from .grad_accumulator import GradAccumulator, gradient_zeros
from .job_rows import rows_of
from .own_columns import Own, check_own, place_of
from .rms_norm import NormFactors, NormInput
from .rms_norm import forward_into as norm_into

MAX_RANK = 64  # of one member: above it the accumulators leave the registers
BLOCK = 64  # columns a step; the steps of a program have to end where a member ends
# (rows, columns, warps, stages, most steps of a program, whether it walks down the rows): few long programs for many
# rows, many short ones for few. Across the columns dS grows in registers and dB by atomic adds, down the rows it is the
# other way round.
DS_DB_TILES = {
    "one_read": (128, BLOCK, 4, 3, 16, False),
    "one_read_short": (128, BLOCK, 4, 3, 3, False),
    "one_read_small": (64, BLOCK, 4, 3, 2, False),
    "one_read_down": (64, 4 * BLOCK, 4, 3, 16, True),
}
# (rows, columns, warps, stages, steps of a program): dB alone, down the rows; and dA
B_TILES = {"b": (64, BLOCK, 4, 3, 4)}
A_TILES = {
    "one_read": (64, 128, 4, 3, 16),
    "one_read_square": (128, 128, 4, 3, 8),
    "one_read_narrow": (64, 64, 4, 3, 4),
}


class AdapterColumns(NamedTuple):
    """The adapters of members that share dY, as the operand and forward's S have them: sb (N, p), scaled_s (M, p), of
    which each member's `rank` columns lie beside the one before's; widths: each member's columns of dY, N in all; own:
    where a member's columns are those of several jobs, of which a row makes its own alone."""

    sb: torch.Tensor
    scaled_s: torch.Tensor
    widths: list[int]
    rank: int
    own: Own | None = None


@dataclass(slots=True)
class SavedInput:
    """The input X (M, K) of projections, as backward has it: h (M, K) itself in any dtype, or what the factors of a
    norm make of it again. dtype: of X."""

    h: torch.Tensor
    dtype: torch.dtype
    factors: NormFactors | None = None
    _made: torch.Tensor | None = field(default=None, init=False)

    def tensor(self) -> torch.Tensor:
        """X (M, K) in dtype, made at the first call that launches kernels."""
        if self._made is not None:
            return self._made
        made = self._make()
        if not compile_ahead.collecting():  # there the norm's kernel is not launched, and nothing is in made
            self._made = made
        return made

    def _make(self) -> torch.Tensor:
        if self.factors is None:
            return self.h.to(self.dtype)
        made = torch.empty(self.h.shape, dtype=self.dtype, device=self.h.device)
        norm_into(NormInput(self.h, self.factors.weight, self.factors.norm), made)
        return made


def ds_and_db_reference(
    dy: torch.Tensor, sb: torch.Tensor, scaled_s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dS (M, p), dB of all columns of S (N, p)) in float32 (float64 for float64), of dy (M, N), sb (N, p) and scaled_s
    (M, p)."""
    dtype = working_dtype(dy)
    return dy.to(dtype) @ sb.to(dtype), dy.to(dtype).t() @ scaled_s.to(dtype)


def a_gradient_reference(ds: torch.Tensor, h: torch.Tensor, factors: NormFactors | None = None) -> torch.Tensor:
    """dA (p, K) in float32 (float64 for float64), of ds (M, p) and h (M, K)."""
    dtype = working_dtype(h)
    x = h.to(dtype)
    if factors is not None:
        x = x * factors.rstd[:, None].to(dtype) * (factors.weight.to(dtype) + factors.norm.offset)
    return ds.to(dtype).t() @ x


@kernel
def _ds_and_db_kernel(
    dy_ptr, sb_ptr, s_ptr, ds_ptr, db_ptr, program_ptr, job_ptr, m, n, end_0, end_1, rank, jobs,
    dy_row, sb_row, s_row, ds_row, db_row,
    OWN: tl.constexpr, ALIGNED: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """BM rows times STEPS · BN columns, all of one member, whose columns of S begin at `skip`, and of dB at `inner`;
    OWN: rows of one job, and of the member's columns the job's."""
    begin, end, job = rows_of(program_ptr, tl.program_id(0), m, BM, OWN)
    row = (begin + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    first = tl.program_id(1) * STEPS * BN
    member = (first >= end_0).to(tl.int32) + (first >= end_1).to(tl.int32)
    skip, inner = member * rank, 0
    if OWN:
        skip, rank, inner = place_of(job_ptr, member * jobs + job, ALIGNED)
    narrow = (row[:, None] < end) & (r[None, :] < rank)
    s = tl.load(s_ptr + row[:, None] * s_row + skip + r[None, :], mask=narrow, other=0.0)
    acc = tl.zeros((BM, R), tl.float32)
    for i in range(STEPS):
        col = first + i * BN + tl.arange(0, BN)
        inside = (row[:, None] < end) & (col[None, :] < n)
        dy = tl.load(dy_ptr + row[:, None] * dy_row + col[None, :], mask=inside, other=0.0)
        known = (col[:, None] < n) & (r[None, :] < rank)
        sb = tl.load(sb_ptr + col[:, None].to(tl.int64) * sb_row + skip + r[None, :], mask=known, other=0.0)
        acc = tl.dot(dy, sb, acc, input_precision="ieee")
        db = tl.dot(tl.trans(dy), s, input_precision="ieee")
        spot = db_ptr + col[:, None].to(tl.int64) * db_row + inner + r[None, :]
        tl.atomic_add(spot, db, mask=known, sem="relaxed")
    tl.atomic_add(ds_ptr + row[:, None] * ds_row + skip + r[None, :], acc, mask=narrow, sem="relaxed")


@kernel
def _ds_and_db_down_kernel(
    dy_ptr, sb_ptr, s_ptr, ds_ptr, db_ptr, program_ptr, job_ptr, m, n, end_0, end_1, rank, jobs,
    dy_row, sb_row, s_row, ds_row, db_row,
    OWN: tl.constexpr, ALIGNED: tl.constexpr, WITH_DS: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows times BN columns, all of one member: sB is read once, dB is added once. OWN: as above."""
    begin, end, job = rows_of(program_ptr, tl.program_id(1), m, STEPS * BM, OWN)
    first = tl.program_id(0) * BN
    col = first + tl.arange(0, BN)
    r = tl.arange(0, R)
    member = (first >= end_0).to(tl.int32) + (first >= end_1).to(tl.int32)
    skip, inner, steps = member * rank, 0, STEPS
    if OWN:
        skip, rank, inner = place_of(job_ptr, member * jobs + job, ALIGNED)
        steps = tl.minimum(STEPS, tl.cdiv(end - begin, BM))
    if WITH_DS:
        known = (col[:, None] < n) & (r[None, :] < rank)
        sb = tl.load(sb_ptr + col[:, None].to(tl.int64) * sb_row + skip + r[None, :], mask=known, other=0.0)
    acc = tl.zeros((R, BN), tl.float32)
    for i in range(steps):
        row = (begin + i * BM + tl.arange(0, BM)).to(tl.int64)
        inside = (row[:, None] < end) & (col[None, :] < n)
        dy = tl.load(dy_ptr + row[:, None] * dy_row + col[None, :], mask=inside, other=0.0)
        narrow = (row[:, None] < end) & (r[None, :] < rank)
        s = tl.load(s_ptr + row[:, None] * s_row + skip + r[None, :], mask=narrow, other=0.0)
        if WITH_DS:
            ds = tl.dot(dy, sb, input_precision="ieee")
            tl.atomic_add(ds_ptr + row[:, None] * ds_row + skip + r[None, :], ds, mask=narrow, sem="relaxed")
        acc = tl.dot(tl.trans(s), dy, acc, input_precision="ieee")
    mine = (r[:, None] < rank) & (col[None, :] < n)
    spot = db_ptr + col[None, :].to(tl.int64) * db_row + inner + r[:, None]
    tl.atomic_add(spot, acc, mask=mine, sem="relaxed")


@kernel
def _a_kernel(
    h_ptr, w_ptr, rstd_ptr, ds_ptr, seed_ptr, da_ptr, m, n, rank, h_row, ds_row, offset, threshold, scale,
    NORM: tl.constexpr, ON_H: tl.constexpr, DROP: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows times BN columns of X. Behind a norm, X is made from h in registers (ON_H), or rstd goes to the
    narrow dS and w to the result. DROP: dropout(X)."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    acc = tl.zeros((BN, R), tl.float32)
    w = tl.load(w_ptr + col, mask=col < n, other=0.0).to(tl.float32) + offset
    seed = tl.load(seed_ptr) if DROP else 0
    for i in range(STEPS):
        row = ((tl.program_id(1) * STEPS + i) * BM + tl.arange(0, BM)).to(tl.int64)
        inside = (row[:, None] < m) & (col[None, :] < n)
        x = tl.load(h_ptr + row[:, None] * h_row + col[None, :], mask=inside, other=0.0)
        narrow = (row[:, None] < m) & (r[None, :] < rank)
        ds = tl.load(ds_ptr + row[:, None] * ds_row + r[None, :], mask=narrow, other=0.0)
        if NORM:
            rstd = tl.load(rstd_ptr + row, mask=row < m, other=0.0)
            if ON_H:
                x = x.to(tl.float32) * rstd[:, None] * w[None, :]
            else:
                ds = (ds.to(tl.float32) * rstd[:, None]).to(ds_ptr.dtype.element_ty)
        if DROP:
            x = tl.where(keep_tile(seed, row, tl.program_id(0) * BN, n, threshold, BM, BN), x, 0.0)
        acc = tl.dot(tl.trans(x.to(ds_ptr.dtype.element_ty)), ds, acc, input_precision="ieee")
    if NORM and not ON_H:
        acc = acc * w[:, None]
    if DROP:
        acc = acc * scale
    known = (col[:, None] < n) & (r[None, :] < rank)
    tl.atomic_add(da_ptr + r[None, :].to(tl.int64) * n + col[:, None], acc, mask=known, sem="relaxed")


def fitting_tiles(
    dy: torch.Tensor, widths: list[int], ranks: list[int], tiles: Mapping[str, tuple] = DS_DB_TILES
) -> list[str]:
    """Which of the tiles take members (their widths of dY (M, N), their ranks): of one rank, and ending where a tile
    ends."""
    if len(widths) > 3 or len(set(ranks)) > 1 or not 0 < ranks[0] <= MAX_RANK or not tensor_cores(dy):
        return []
    return [t for t, (_, bn, *_) in tiles.items() if len(widths) == 1 or math.gcd(*widths) % bn == 0]


def ds_and_db(
    dy: torch.Tensor, out: torch.Tensor, adapters: AdapterColumns, tile: str = "one_read",
    accumulator: GradAccumulator | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes dS = dY · sB to out (M, p), which may lie behind dY (M, N); returns dB (N, rank) in float32. Where rows
    have columns of their own, dS has zeros in the others.

    tile: one of `fitting_tiles`; accumulator: where both grow. Raises ValueError where the shapes do not fit.
    """
    sb, s, widths, rank, own = adapters
    m, n, p = dy.shape[0], sum(widths), sb.shape[1]
    fits = dy.shape[1] == n == sb.shape[0] and s.shape == out.shape == (m, p)
    check(fits, "dY, dS, sB and S do not fit", dy=dy, out=out, sb=sb, s=s)
    if own is not None:
        check_own(own, dy, out)
    bm, bn, warps, stages, most, down = DS_DB_TILES[tile]
    ends = _ends(widths)
    into = GradAccumulator(dy.device, n * rank, m * p) if accumulator is None else accumulator
    ds, db = into.scratch(m, p), into.gradient(n, rank)
    launched: Any = _ds_and_db_kernel
    options: dict[str, Any] = {}
    if down:
        launched, options, steps, of_rows = _ds_and_db_down_kernel, {"WITH_DS": True}, most, bm * most
    else:
        unit, of_rows = math.gcd(*widths), bm
        steps = next(i for i in range(most, 0, -1) if len(widths) == 1 or unit % (bn * i) == 0)
    tables, widest, programs, jobs = (db, db), rank, cdiv(m, of_rows), 1
    if own is not None:
        tables, widest, jobs = (own.rows.programs(of_rows), own.columns.of_jobs), own.columns.rank, own.columns.jobs
        programs = len(tables[0])
        m = rank = 0  # read by nobody, and another number of rows may be another kernel
    launched[(cdiv(n, bn), programs) if down else (programs, cdiv(n, bn * steps))](
        dy, sb, s, ds, db, *tables, m, n, *ends, rank, jobs,
        dy.stride(0), sb.stride(0), s.stride(0), ds.stride(0), db.stride(0),
        OWN=own is not None, ALIGNED=own is not None and own.columns.aligned, **options,
        STEPS=steps, BM=bm, BN=bn, R=rank_tile(widest), num_warps=warps, num_stages=stages_of(dy, stages),
    )  # fmt: skip
    out.copy_(ds)
    return db


def b_gradient(
    dy: torch.Tensor, scaled_s: torch.Tensor, widths: list[int], rank: int, tile: str = "b",
    accumulator: GradAccumulator | None = None,
) -> torch.Tensor:  # fmt: skip
    """dB = dYᵀ · sS of all members, (N, rank) in float32, for who makes dS elsewhere.

    dy: (M, N); scaled_s and widths as in `AdapterColumns`; tile: of B_TILES, one of `fitting_tiles`; accumulator: where
    dB grows. Raises ValueError where the shapes do not fit.
    """
    m, n = dy.shape
    check(n == sum(widths) and scaled_s.shape[0] == m, "dY and S do not fit", dy=dy, s=scaled_s)
    bm, bn, warps, stages, steps = B_TILES[tile]
    db = gradient_zeros(accumulator, n, rank, dy.device)
    _ds_and_db_down_kernel[(cdiv(n, bn), cdiv(m, bm * steps))](
        dy, dy, scaled_s, dy, db, db, db, m, n, *_ends(widths), rank, 1,
        dy.stride(0), 0, scaled_s.stride(0), 0, db.stride(0),
        OWN=False, ALIGNED=False, WITH_DS=False,
        STEPS=steps, BM=bm, BN=bn, R=rank_tile(rank), num_warps=warps, num_stages=stages_of(dy, stages),
    )  # fmt: skip
    return db


def _ends(widths: list[int]) -> tuple[int, int]:
    """Where the first member's columns end and where the second's do; behind all columns where there is none."""
    first, second = widths[0], sum(widths[:2])
    return first, second


def a_gradient(
    ds: torch.Tensor, h: torch.Tensor, factors: NormFactors | None = None, tile: str = "one_read",
    seed: torch.Tensor | None = None, dropout: float = 0.0, accumulator: GradAccumulator | None = None,
) -> torch.Tensor:  # fmt: skip
    """dA = dSᵀ · X (p, K) in float32, of ds (M, p) and h (M, K); X is h, or what a norm's factors make of it, and then
    dropout(X) where a seed (one int64) is given.

    tile: a key of A_TILES; dropout: the probability of a zero; accumulator: where dA grows. Raises ValueError where the
    shapes do not fit.
    """
    m, n = h.shape
    p = ds.shape[1]
    check(ds.shape[0] == m, "ds and h differ in rows", ds=ds, h=h)
    bm, bn, warps, stages, steps = A_TILES[tile]
    da = gradient_zeros(accumulator, p, n, h.device)
    rstd, weight, offset = (h, h, 0.0) if factors is None else (factors.rstd, factors.weight, factors.norm.offset)
    on_h = factors is not None and ds.dtype == torch.float16  # there rstd · dS could overflow
    _a_kernel[(cdiv(n, bn), cdiv(m, bm * steps))](
        h, weight, rstd, ds, h if seed is None else seed, da,
        m, n, p, h.stride(0), ds.stride(0), offset, *threshold_and_scale(dropout),
        NORM=factors is not None, ON_H=on_h, DROP=seed is not None, STEPS=steps, BM=bm, BN=bn, R=rank_tile(p),
        num_warps=warps, num_stages=stages_of(ds, stages),
    )  # fmt: skip
    return da
