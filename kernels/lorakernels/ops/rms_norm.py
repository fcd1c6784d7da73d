"""RMSNorm, with the residual add before it folded in: h = x + residual, y = h · rstd · (w + offset),
rstd = 1 / sqrt(mean(h²) + eps).

x, residual, h, y: (M, K), last dimension contiguous, any row stride; w: (K,); rstd: (M,) float32. offset is 1 for
Gemma, whose weights are stored minus one, else 0. Everything is computed in float32 and rounded once. Backward needs h
and rstd, not y: dh = rstd · (g - h·rstd · mean(g · h·rstd)) + d_residual with g = dy · (w + offset). Who needs y again
recomputes it (or, for dA = dSᵀ y, does without: see `adapter_grad.py`). With `LoraColumns` the same launch leaves
S = y · Aᵀ behind y, from the tile in registers; with a `Quantized` it leaves y in e4m3 beside y, as `quantize_rows`
would make it of y: a product in FP8 reads that, LoRA reads y.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Run: python -m pytest
tests/lorakernels/test_rms_norm.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime import (
    INTERPRET,
    cdiv,
    check,
    fuses,
    kernel,
    multiprocessors,
    next_power_of_2,
    rank_tile,
    rows,
    tile_of,
    tl,
    use_triton,
    working_dtype,
)
from .concat_operand import LoraColumns, s_into, store_s
from .quantize_rows import Quantized, largest_bits, quantize_rows_into, quantized_tile, row_scale

MAX_COLUMNS = 65536  # one row has to fit a program's registers


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm's constants; its weight travels as a tensor."""

    eps: float
    offset: float = 0.0


class NormInput(NamedTuple):
    """What a forward reads, and where it leaves the sum. All but weight (K,) are (M, K).

    residual: added to x; h, which a residual needs, takes that sum for backward; h_copy takes it once more, for a GEMM
    that is to add to h while h itself is saved: `addmm` would copy it in a launch of its own.
    """

    x: torch.Tensor
    weight: torch.Tensor
    norm: Norm
    residual: torch.Tensor | None = None
    h: torch.Tensor | None = None
    h_copy: torch.Tensor | None = None


class NormFactors(NamedTuple):
    """What y = h · rstd · (weight + offset) multiplies h (M, K) with, for backward: rstd (M,) float32, weight (K,)."""

    rstd: torch.Tensor
    weight: torch.Tensor
    norm: Norm


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, residual: torch.Tensor | None = None
) -> Any:
    """y (…, K) in float32 (float64 for float64) of x, residual (…, K) and weight (K,); with residual (y, h)."""
    dtype = working_dtype(x)
    h = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * (weight.to(dtype) + offset)
    return y if residual is None else (y, h)


@kernel
def _norm_forward_kernel(
    x_ptr, r_ptr, h_ptr, c_ptr, w_ptr, y_ptr, rstd_ptr, q_ptr, scale_ptr, m, n,
    x_row, r_row, h_row, c_row, y_row, q_row, eps, offset,
    ADD: tl.constexpr, COPY: tl.constexpr, QUANTIZE: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < m) & (col[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + row[:, None] * r_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        # What backward and the next residual see is the rounded sum; the norm must be of the same numbers.
        rounded = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * h_row + col[None, :], rounded, mask=inside)
        if COPY:
            tl.store(c_ptr + row[:, None] * c_row + col[None, :], rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / n + eps)
    w = tl.load(w_ptr + col, mask=col < n, other=0.0).to(tl.float32) + offset
    y = (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * y_row + col[None, :], y, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < m)
    if QUANTIZE:
        wide = tl.where(inside, y.to(tl.float32), 0.0)  # a row's end times an infinite rstd is NaN
        finite, scale, inverse = row_scale(largest_bits(wide))
        tl.store(scale_ptr + row, scale, mask=row < m)
        q = quantized_tile(wide, finite, inverse, q_ptr, ROUND)
        tl.store(q_ptr + row[:, None] * q_row + col[None, :], q, mask=inside)


@kernel
def _norm_forward_lora_kernel(
    x_ptr, r_ptr, h_ptr, c_ptr, w_ptr, y_ptr, rstd_ptr, a_ptr, scaled_ptr, scale_ptr, m, n,
    x_row, r_row, h_row, c_row, y_row, a_row, rank, p, eps, offset,
    ADD: tl.constexpr, COPY: tl.constexpr, STORE_SCALED_S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Two walks over a block of rows: the sum of squares, then y and S. The second finds its rows in L2."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(r_ptr + row[:, None] * r_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
            rounded = x.to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + row[:, None] * h_row + col[None, :], rounded, mask=inside)
            if COPY:
                tl.store(c_ptr + row[:, None] * c_row + col[None, :], rounded, mask=inside)
            x = rounded.to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    rstd = 1.0 / tl.sqrt(squares / n + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < m)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if ADD:
            # Added again rather than read back from h: another thread may have written it, and no barrier lies between.
            x += tl.load(r_ptr + row[:, None] * r_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
            x = x.to(h_ptr.dtype.element_ty).to(tl.float32)
        w = tl.load(w_ptr + col, mask=col < n, other=0.0).to(tl.float32) + offset
        y = (x * rstd[:, None] * w[None, :]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row[:, None] * y_row + col[None, :], y, mask=inside)
        a = tl.load(a_ptr + r[None, :] * a_row + col[:, None], mask=(col[:, None] < n) & (r[None, :] < rank), other=0.0)
        acc = tl.dot(y, a, acc, input_precision="ieee")
    store_s(y_ptr + row[:, None] * y_row + n, scaled_ptr, scale_ptr, acc, row, m, p, STORE_SCALED_S, BM, R)


@kernel
def _norm_backward_kernel(
    dy_ptr, h_ptr, w_ptr, rstd_ptr, dr_ptr, dx_ptr, dw_ptr, m, n, dy_row, h_row, dr_row, dx_row, offset,
    ADD: tl.constexpr, WITH_DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every n_programs-th row, so that dw needs one partial sum a program and no atomics."""
    col = tl.arange(0, BLOCK)
    inside = col < n
    w = tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.program_id(0), m, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + i  # the interpreter's loop variable is a plain integer
        dy = tl.load(dy_ptr + row * dy_row + col, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = tl.load(h_ptr + row * h_row + col, mask=inside, other=0.0).to(tl.float32) * rstd
        g = dy * w
        dx = rstd * (g - normed * (tl.sum(g * normed, axis=0) / n))
        if ADD:
            dx += tl.load(dr_ptr + row * dr_row + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * dx_row + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WITH_DW:
            dw += dy * normed
    if WITH_DW:
        tl.store(dw_ptr + tl.program_id(0) * n + col, dw, mask=inside)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def forward_into(inputs: NormInput, y: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
    """Writes y (M, K), h and h_copy where there is a residual, and y in e4m3 to quantized (M, K) where that is given;
    returns rstd (M,) float32. Raises ValueError above MAX_COLUMNS columns, where a residual has no h, and where
    quantized does not fit."""
    x, weight, norm, residual, h, h_copy = inputs
    m, n = x.shape
    check(n <= MAX_COLUMNS, f"RMSNorm takes at most {MAX_COLUMNS} columns", x=x)
    if residual is not None and h is None:
        raise ValueError("a residual needs h")
    if quantized is not None:
        check(quantized.q.shape == (m, n) and quantized.scale.shape == (m, 1), "quantized does not fit", x=x)
    others = [t for t in (weight, y, residual) if t is not None]
    if not use_triton(x, *others):
        rstd = _forward_torch(inputs, y)
        if quantized is not None:
            quantize_rows_into(y, *quantized)
        return rstd
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    block = next_power_of_2(n)
    n_rows = max(1, 1024 // block)
    r, hh = (x, x) if residual is None or h is None else (residual, h)
    c = hh if h_copy is None else h_copy
    q, scale = (y, rstd) if quantized is None else quantized
    _norm_forward_kernel[(cdiv(m, n_rows),)](
        x, r, hh, c, weight, y, rstd, q, scale, m, n,
        x.stride(0), r.stride(0), hh.stride(0), c.stride(0), y.stride(0), q.stride(0), norm.eps, norm.offset,
        ADD=residual is not None, COPY=h_copy is not None, QUANTIZE=quantized is not None, ROUND=INTERPRET,
        ROWS=n_rows, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return rstd


def _forward_torch(inputs: NormInput, y: torch.Tensor) -> torch.Tensor:
    x, weight, norm, residual, h, h_copy = inputs
    dtype = working_dtype(x)
    if residual is not None and h is not None:
        h.copy_(x.to(dtype) + residual.to(dtype))
        x = h
        if h_copy is not None:
            h_copy.copy_(h)
    wide = x.to(dtype)
    rstd = torch.rsqrt(wide.pow(2).mean(-1) + norm.eps)
    y.copy_(wide * rstd[:, None] * (weight.to(dtype) + norm.offset))
    return rstd


def forward_lora_into(
    inputs: NormInput, buffer: torch.Tensor, columns: LoraColumns, tile: str = "fused"
) -> torch.Tensor:
    """buffer (M, K + p) = [y | y · aᵀ] in one launch; the rest as in `forward_into`. tile is a key of TILES. Raises
    ValueError where buffer has no room for the columns, and where a residual has no h."""
    x, weight, norm, residual, h, h_copy = inputs
    m, n = x.shape
    lora_a, rank = columns.a, columns.rows
    p = lora_a.shape[0]
    if residual is not None and h is None:
        raise ValueError("a residual needs h")
    check(
        buffer.shape == (m, n + p), "buffer needs a spare column for each row of lora_a", buffer=buffer, lora_a=lora_a
    )
    if not fuses(rank, (x, weight), (buffer, lora_a)):
        rstd = forward_into(inputs, buffer[:, :n])
        s_into(buffer[:, :n], columns, buffer[:, n:], None)
        return rstd
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    r, hh = (x, x) if residual is None or h is None else (residual, h)
    c = hh if h_copy is None else h_copy
    bm, bn, warps, stages = tile_of(tile, buffer)
    _norm_forward_lora_kernel[(cdiv(m, bm),)](
        x, r, hh, c, weight, buffer, rstd, lora_a, *columns.scaled_s_pointers(buffer), m, n,
        x.stride(0), r.stride(0), hh.stride(0), c.stride(0), buffer.stride(0), lora_a.stride(0), rank, p,
        norm.eps, norm.offset, ADD=residual is not None, COPY=h_copy is not None,
        STORE_SCALED_S=columns.scaled_s is not None, BM=bm, BN=bn, R=rank_tile(rank),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return rstd


def backward_into(
    dy: torch.Tensor, h: torch.Tensor, factors: NormFactors, dx: torch.Tensor,
    d_residual: torch.Tensor | None = None, with_dw: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """dx = gradient of h (+ d_residual); returns the gradient of weight (K,) in float32 if asked for.

    dy, h, dx, d_residual: (M, K).
    """
    rstd, weight, offset = factors.rstd, factors.weight, factors.norm.offset
    m, n = h.shape
    if not use_triton(h, dy, weight, dx):
        dtype = working_dtype(h)
        normed, g0 = h.to(dtype) * rstd[:, None].to(dtype), dy.to(dtype)
        g = g0 * (weight.to(dtype) + offset)
        out = rstd[:, None].to(dtype) * (g - normed * (g * normed).mean(-1, keepdim=True))
        dx.copy_(out if d_residual is None else out + d_residual.to(dtype))
        return (g0 * normed).sum(0) if with_dw else None
    block = next_power_of_2(n)
    programs = min(m, 8 * multiprocessors(h))
    dw = torch.empty((programs if with_dw else 1, n), dtype=torch.float32, device=h.device)
    dr = dy if d_residual is None else d_residual
    _norm_backward_kernel[(programs,)](
        dy, h, weight, rstd, dr, dx, dw, m, n, dy.stride(0), h.stride(0), dr.stride(0), dx.stride(0), offset,
        ADD=d_residual is not None, WITH_DW=with_dw, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return dw.sum(0) if with_dw else None


class RMSNorm(torch.autograd.Function):
    """`rms_norm` as one node, which saves h, weight and rstd. x, residual: (…, K), weight: (K,)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        h = None
        if residual is not None:
            h = torch.empty(x.shape, dtype=torch.result_type(x, residual), device=x.device)
        flat_residual, flat_h = (None if t is None else rows(t) for t in (residual, h))
        rstd = forward_into(NormInput(rows(x), weight, norm, flat_residual, flat_h), rows(y))
        ctx.save_for_backward(x if h is None else h, weight, rstd)
        ctx.norm, ctx.dtypes = norm, (x.dtype, None if residual is None else residual.dtype)
        return y if h is None else (y, h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dh: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        h, weight, rstd = ctx.saved_tensors
        dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        dh = None if dh is None else rows(dh)
        with_dw = ctx.needs_input_grad[1]
        dw = backward_into(rows(dy), rows(h), NormFactors(rstd, weight, ctx.norm), rows(dx), dh, with_dw)
        d_residual = None if ctx.dtypes[1] is None else dx.to(ctx.dtypes[1])
        return dx.to(ctx.dtypes[0]), None if dw is None else dw.to(weight.dtype), d_residual, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, residual: torch.Tensor | None = None
) -> Any:
    """y, or (y, x + residual) when a residual is given. x, residual, y: (…, K), weight (K,). Raises ValueError where
    they do not fit."""
    check(weight.shape == x.shape[-1:], "weight must have one entry a column of x", x=x, weight=weight)
    if residual is not None:
        check(residual.shape == x.shape, "residual and x differ", x=x, residual=residual)
    return RMSNorm.apply(x, weight, residual, Norm(eps, offset))
