"""Rows of several adapters as rows of one: the adapters' columns lie side by side in S = X · Aᵀ and dS = dY · sB, and a
row keeps those of its own job's adapter. Every other column of it becomes zero, in place. The same launch can make sS
(M, p), each column of S times its adapter's scale.

S, dS: (M, p), any row stride; job of a row: (M,), of a column: (p,), int32, none of which is the job of a spare column.
With such an S and dS the products of one adapter, Y, dX, dA and dB, are those of all of them. Whole rows are read and
written, because zeros between the columns that stay would be stored one by one. Zeros are chosen, not multiplied with:
a row keeps no other adapter's NaN. Run: python -m pytest tests/lorakernels/test_job_columns.py
"""

from __future__ import annotations

import torch

from ..runtime import cdiv, check, kernel, next_power_of_2, tl, use_triton

SPARE = -1  # the job of a column that is no adapter's
BLOCK = 4096  # elements of a program
MAX_COLUMNS = 256  # of a program


@kernel
def _keep_own_kernel(
    s_ptr, scaled_ptr, scale_ptr, row_job_ptr, column_job_ptr, m, p, s_row, scaled_row,
    BOTH: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(1) * P + tl.arange(0, P)
    own = tl.load(row_job_ptr + row, mask=row < m, other=0)
    job = tl.load(column_job_ptr + column, mask=column < p, other=0)
    inside = (row[:, None] < m) & (column[None, :] < p)
    stays = own[:, None] == job[None, :]
    spot = s_ptr + row[:, None] * s_row + column[None, :]
    s = tl.where(stays, tl.load(spot, mask=inside, other=0.0), 0.0)
    tl.store(spot, s, mask=inside)
    if BOTH:
        spot = scaled_ptr + row[:, None] * scaled_row + column[None, :]
        if SCALE:
            scale = tl.load(scale_ptr + column, mask=column < p, other=0.0)
            s = (s * scale[None, :]).to(s.dtype)
        else:
            s = tl.where(stays, tl.load(spot, mask=inside, other=0.0), 0.0)
        tl.store(spot, s, mask=inside)


def keep_own_columns_reference(
    s: torch.Tensor, job_of_row: torch.Tensor, job_of_column: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """S (M, p) with zeros in the columns of other jobs than the row's, of job_of_row (M,) and job_of_column (p,)."""
    return s.masked_fill(job_of_row[:, None] != job_of_column[None, :], 0)


def keep_own_columns(
    s: torch.Tensor, job_of_row: torch.Tensor, job_of_column: torch.Tensor, scaled_s: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Zeros into the columns of S (M, p), and of sS (M, p) where given, that are of other jobs than the row's:
    job_of_row (M,) and job_of_column (p,), int32. With scales (p,), in float32 or wider, sS is made here, whatever was
    in it. Raises ValueError where the shapes do not fit."""
    m, p = s.shape
    fits = job_of_row.shape == (m,) and job_of_column.shape == (p,)
    check(fits, "S and its rows' and columns' jobs do not fit", s=s, rows=job_of_row, columns=job_of_column)
    check(scaled_s is None or scaled_s.shape == s.shape, "S and sS do not fit", s=s, scaled_s=scaled_s)
    check(scales is None or scales.shape == (p,), "S and its scales do not fit", s=s, scales=scales)
    both = [s] if scaled_s is None else [s, scaled_s]
    if not use_triton(*both) or any(t.stride(-1) != 1 for t in both) or len({t.dtype for t in both}) > 1:
        foreign = job_of_row[:, None] != job_of_column[None, :]
        if scaled_s is not None and scales is not None:
            torch.mul(s, scales, out=scaled_s)
        for t in both:
            t.masked_fill_(foreign, 0)
        return
    columns = min(MAX_COLUMNS, next_power_of_2(p))
    rows = BLOCK // columns
    last = both[-1]
    _keep_own_kernel[(cdiv(m, rows), cdiv(p, columns))](
        s, last, job_of_row if scales is None else scales, job_of_row, job_of_column, m, p, s.stride(0), last.stride(0),
        BOTH=scaled_s is not None, SCALE=scales is not None, BM=rows, P=columns, num_warps=4,
    )  # fmt: skip
