"""The frozen product of rows of several adapters, with what each row's own adapter adds to it, in one launch:

    Y = X · Wᵀ + bias + S · B[job of the row]ᵀ + residual      dX = dY · W + Σ dropout(dS · A[job of the row])

X (M, K), W (N, K), S and dS (M, R) as `multi_lora.down` makes them, A (r, K) and B (N, r) of any rank up to 64. The one
GEMM over columns for every adapter (nodes/operand.py) grows with their number; this product does not. W may be the
weights of several linears, one below the other, each of which has its own adapters: Σ is over these.

A program has a tile of Y, whatever jobs its rows are of. After its walk down W it looks these up in a table of pieces,
each of which is rows of one job in one tile (`JobRows.pieces`), and their matrices by their addresses, as multi_lora.py
does. No tile is cut at a job's end: sixteen jobs of any lengths in 8192 rows would then leave an eighth of the tiles'
rows empty. All pieces of a tile are added into the same accumulators, because a second set of them would not stay in
registers; a piece's S is zero in the tile's other rows. Zero times what is no number would reach these, so an adapter
that is not finite comes in as zeros, and makes its own rows NaN through S: other jobs' rows stay bitwise as they were.

X, W, the residual and Y go through TMA, which wants rows at multiples of 16 bytes (`takes`). The order of the tiles is
that of Triton's tutorial on matrix multiplication. Run: python -m pytest tests/lorakernels/test_multi_product.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..runtime import (
    cdiv,
    check,
    kernel,
    rank_tile,
    stages_of,
    tensor_cores,
    through_tma,
    tl,
    tma_fits,
    use_triton,
    working_dtype,
)
from .adapter import TL, matrix_at
from .dropout import keep_tile
from .job_rows import JobRows
from .multi_lora import MAX_COLUMNS, AdapterTable, mask_of, up

# Tiles (rows, columns, depth, warps, stages). The larger one reads the least and has a multiprocessor for itself; of
# the smaller two share one, so that one's ends lie beside the other's products. A mask of dropout wants accumulators of
# its own, which leaves registers enough only where a small tile is spread over eight warps.
TILES = {"tail": (128, 256, 64, 8, 4), "tail_small": (128, 128, 64, 4, 3)}
DROPPED = (128, 128, 64, 8, 3)
GROUP = 16  # tiles below one another before the next columns: 132 programs then read the fewest rows of X and W


@kernel
def _multi_product_kernel(
    piece_ptr, end_ptr, x_desc, w_desc, y_desc, residual_desc, bias_ptr, s_ptr, number_ptr, factor_ptr, seed_ptr,
    n, k, down, jobs, s_row,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr, DROP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, LINEARS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, BN)
    group = tl.program_id(0) // (GROUP * across) * GROUP
    inside, size = tl.program_id(0) % (GROUP * across), tl.minimum(down - group, GROUP)
    tile = group + inside % size
    row0, start = tile * BM, inside // size * BN
    row = row0 + tl.arange(0, BM)
    col = start + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        x = x_desc.load([row0, at])
        if OF_B:
            acc = tl.dot(x, w_desc.load([start, at]).T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w_desc.load([at, start]), acc, input_precision="ieee")
    begin, behind = tl.load(end_ptr + tile), tl.load(end_ptr + tile + 1)
    for i in tl.range(begin, behind, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        piece = piece_ptr + 4 * i
        first, end, job, before = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        own = (row[:, None] >= first) & (row[:, None] < end)
        for linear in tl.static_range(LINEARS):  # pyright: ignore[reportGeneralTypeIssues]
            at = linear * jobs + job
            entry = number_ptr + 9 * at
            address, apart = tl.load(entry + OF_B), tl.load(entry + 7 + OF_B)
            rank, column = tl.load(entry + 2).to(tl.int32), tl.load(entry + 6)
            matrix = matrix_at(address, s_ptr, TYPE, ALIGNED)
            if ALIGNED:
                rank, column, apart = tl.multiple_of(rank, 8), tl.multiple_of(column, 8), tl.multiple_of(apart, 8)
            new = tl.zeros((BM, BN), tl.float32) if DROP else acc
            for skip in tl.static_range(0, R, 16):  # pyright: ignore[reportGeneralTypeIssues]
                r = skip + tl.arange(0, 16)
                spot = col[None, :] * apart + r[:, None] if OF_B else r[:, None] * apart + col[None, :]
                b = tl.load(matrix + spot, mask=(r[:, None] < rank) & (col[None, :] < n), other=0.0)
                b = b.to(y_desc.dtype)
                spot = row[:, None].to(tl.int64) * s_row + column + r[None, :]
                s = tl.load(s_ptr + spot, mask=own & (r[None, :] < rank), other=0.0)
                # The tile's other rows get zero times this adapter: what in it is no number goes to its own rows by S.
                number = tl.abs(b.to(tl.float32)) < float("inf")
                all_numbers = tl.min(tl.min(number.to(tl.int32), 0), 0) == 1
                s = tl.where(own & (all_numbers == 0), float("nan"), s)
                new = tl.dot(s, tl.where(number, b, 0.0), new, input_precision="ieee")
            if DROP:
                place = (before + row - first).to(tl.int64)  # among the job's rows, where it is one of them
                keep = keep_tile(tl.load(seed_ptr + at), place, start, n, tl.load(entry + 3), BM, BN)
                acc += tl.where(keep, new * tl.load(factor_ptr + 2 * at + 1), 0.0)
            else:
                acc = new
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += residual_desc.load([row0, start]).to(tl.float32)
    y_desc.store([row0, start], acc.to(y_desc.dtype))


def takes(x: torch.Tensor, w: torch.Tensor, rank: int, widths: Sequence[int], *others: torch.Tensor | None) -> bool:
    """Whether the kernel multiplies x (M, K) or (M, N) with w (N, K), of linears of these widths whose adapters have at
    most this rank; others: the residual and where the product goes, (M, …) each or None. What it does not take goes to
    the library."""
    wide = [x, w, *(t for t in others if t is not None)]
    narrow = rank <= MAX_COLUMNS and all(n * x.element_size() % 16 == 0 for n in widths)
    return narrow and tensor_cores(x, w) and all(t.dtype == x.dtype and tma_fits(t) for t in wide)


def multi_product(
    x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, tables: Sequence[AdapterTable], rows: JobRows,
    tile: str | None = None, *, of_b: bool = True, seeds: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Y (M, N) of x (M, K), w (N, K) and S (M, R), to out where given; not of_b: dX (M, K) of x = dY (M, N) and dS.

    tables: the adapters of each linear whose weight lies in w, in order; what they have in S lies in columns of their
    own where there are several. tile: a key of TILES, where `takes` says so; None takes library calls and `up` behind
    them, as a CPU does. seeds: of the dropout that X had, (linears · jobs,) int64, where dX is made; bias: (N,);
    residual: as Y, and may be out. Raises ValueError where the shapes do not fit.
    """
    m, (height, width) = rows.rows, w.shape
    n, k = (height, width) if of_b else (width, height)
    fits = x.shape == (m, k) and len(s) == m and height == sum(t.n for t in tables) and tables[0].k == width
    check(fits, f"the jobs' {m} rows, the weight and the adapters do not fit", x=x, w=w, s=s)
    check(
        all(t is None or t.shape == (m, n) for t in (residual, out)), f"no output of {n} columns", x=residual, out=out
    )
    if tile is None or not use_triton(x):
        y = F.linear(x, w, bias) if of_b else x @ w
        y = y if residual is None else y + residual
        each = [None] * len(tables) if seeds is None else seeds.view(len(tables), -1)
        for table, at, own in zip(tables, _columns(tables), each, strict=True):
            up(s, table, rows, y[:, at] if of_b else y, of_b=of_b, seeds=own)
        return y if out is None else out.copy_(y)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    if not of_b:
        _launch(x, w, s, tables, rows, tile, False, seeds, None, residual, y)
        return y
    for table, at in zip(tables, _columns(tables), strict=True):
        added, of_linear = None if residual is None else residual[:, at], None if bias is None else bias[at]
        _launch(x, w[at], s, [table], rows, tile, True, None, of_linear, added, y[:, at])
    return y


def _columns(tables: Sequence[AdapterTable]) -> list[slice]:
    """Of Y, of each linear."""
    ends = [sum(t.n for t in tables[: i + 1]) for i in range(len(tables))]
    return [slice(end - t.n, end) for t, end in zip(tables, ends, strict=True)]


def _launch(
    x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, tables: Sequence[AdapterTable], rows: JobRows, tile: str,
    of_b: bool, seeds: torch.Tensor | None, bias: torch.Tensor | None, residual: torch.Tensor | None, y: torch.Tensor,
) -> None:  # fmt: skip
    bm, bn, bk, warps, stages = TILES[tile] if seeds is None else DROPPED
    (m, n), first = y.shape, tables[0]
    pieces, ends = rows.pieces(bm)
    parts = zip(*(table.on_device() for table in tables), strict=True)
    numbers, factors = (part[0] if len(part) == 1 else torch.cat(part) for part in parts)
    of_y = through_tma(y, bm, bn)
    _multi_product_kernel[(cdiv(m, bm) * cdiv(n, bn),)](
        pieces, ends, through_tma(x, bm, bk), through_tma(w, *((bn, bk) if of_b else (bk, bn))), of_y,
        of_y if residual is None else through_tma(residual, bm, bn), numbers if bias is None else bias,
        s, numbers, factors, numbers if seeds is None else seeds,
        n, x.shape[1], cdiv(m, bm), len(first.adapters), s.stride(0),
        TYPE=getattr(tl, TL[first.sample.dtype]), ALIGNED=all(table.aligned_with(s) for table in tables),
        OF_B=of_b, DROP=seeds is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, LINEARS=len(tables), GROUP=GROUP, BM=bm, BN=bn, BK=bk,
        R=rank_tile(max(table.rank for table in tables)), num_warps=warps, num_stages=stages_of(x, stages),
    )  # fmt: skip


def multi_product_reference(
    x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, tables: Sequence[AdapterTable], rows: JobRows,
    *, of_b: bool = True, seeds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Y (M, N) or dX (M, K), without bias and residual, in float32 (float64 for float64), by the torch path's masks."""
    dtype = working_dtype(x)
    y = x.to(dtype) @ (w.t() if of_b else w).to(dtype)
    each = [None] * len(tables) if seeds is None else seeds.view(len(tables), -1)
    for table, at, own in zip(tables, _columns(tables), each, strict=True):
        for job in rows.present:
            if (adapter := table.adapters[job]) is None:
                continue
            where, r = rows.of(job).to(x.device), adapter.a.shape[0]
            narrow = s[where, adapter.column : adapter.column + r].to(dtype)
            if of_b:
                y[where, at] += narrow @ adapter.b.to(dtype).t()
            else:
                mask = mask_of(rows, job, table.k, adapter, own, x.device, dtype)
                y[where] += mask * (narrow @ adapter.a.to(dtype))
    return y
