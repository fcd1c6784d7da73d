"""Rows in e4m3 with a float32 scale each, for products in FP8: q = x · factor / scale, scale = max|x · factor| / 448.

x: (…, K), the last dimension contiguous, any row stride, bf16, f16 or f32; factor: (K,) float32, on the columns, or
None; q: (…, K), which reaches e4m3's largest number in each row; scale: (…, 1). A row is read once where
it fits a program's registers, up to 32,768 columns of two bytes; else its second read finds it in L2. q may lie
anywhere, a transposed view too: that is how the operand of a backward is written.

A row of zeros has q = 0. A row with a NaN or an infinity has q = 0 and the scale NaN, so that each product of it is
NaN. Rows below 2⁻¹⁰⁰ are scaled as if they reached it, so that every scale and its inverse are normal numbers.
Micikevicius et al., "FP8 formats for deep learning" (2022). Run: python -m pytest
tests/lorakernels/test_quantize_rows.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime import INTERPRET, cdiv, check, jit, kernel, next_power_of_2, rows, tl, use_triton

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_ROW = 2.0**-100
SMALLEST: Any = tl.constexpr(SMALLEST_ROW)  # the same for kernels, in which a constexpr is the number that it holds
ONE_READ = 65536  # bytes of a row that a program keeps


class Quantized(NamedTuple):
    """q (…, K) e4m3 and scale (…, 1) float32: q · scale is what was quantized."""

    q: torch.Tensor
    scale: torch.Tensor


@jit
def _scaled_tile(x_ptr, f_ptr, row, col, m, k, x_row, FACTOR: tl.constexpr):
    inside = (row[:, None] < m) & (col[None, :] < k)
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(f_ptr + col, mask=col < k, other=0.0)[None, :]
    return x


@jit
def largest_bits(x):
    """max|x| of each row, as the bits of a float: compared as integers, NaN is the largest of all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@jit
def rounded(x):
    """x rounded to e4m3's numbers, ties to even, as the device's cast does it: the interpreter's does not."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 121)  # below 2⁻⁶ the numbers are 2⁻⁹ apart
    shift = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)  # its last bit is worth their distance
    size = (tl.abs(x) + shift) - shift
    return tl.where(bits < 0, -size, size)


@jit
def row_scale(bits):
    """(whether a row is finite, its scale, what its elements are multiplied with) of the `largest_bits` of each row."""
    finite = bits < 0x7F800000
    largest = tl.maximum(tl.where(finite, bits, 0).to(tl.float32, bitcast=True), SMALLEST)
    scale = tl.where(finite, largest * (1.0 / 448.0), float("nan"))
    inverse = tl.where(finite, tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest), 0.0)
    return finite, scale, inverse


@jit
def quantized_tile(x, finite, inverse, q_ptr, ROUND: tl.constexpr):
    """A tile x (rows, columns) of float32 in the dtype that q_ptr points to; finite, inverse: (rows,) of
    `row_scale`."""
    y = tl.where(finite[:, None], x * inverse[:, None], 0.0)
    if ROUND:
        y = rounded(y)
    return y.to(q_ptr.dtype.element_ty)


@kernel
def _quantize_kernel(
    x_ptr, f_ptr, q_ptr, scale_ptr, m, k, x_row, q_row, q_col,
    FACTOR: tl.constexpr, ONE: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ONE: BLOCK holds a whole row, which stays in registers."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = _scaled_tile(x_ptr, f_ptr, row, col, m, k, x_row, FACTOR)
    bits = largest_bits(x)
    for start in range(BLOCK, k, BLOCK):
        x = _scaled_tile(x_ptr, f_ptr, row, start + col, m, k, x_row, FACTOR)
        bits = tl.maximum(bits, largest_bits(x))
    finite, scale, inverse = row_scale(bits)
    tl.store(scale_ptr + row, scale, mask=row < m)
    for start in range(0, k, BLOCK):
        if not ONE:
            x = _scaled_tile(x_ptr, f_ptr, row, start + col, m, k, x_row, FACTOR)
        at = row[:, None] * q_row + (start + col)[None, :].to(tl.int64) * q_col
        inside = (row[:, None] < m) & ((start + col)[None, :] < k)
        tl.store(q_ptr + at, quantized_tile(x, finite, inverse, q_ptr, ROUND), mask=inside)


def quantize_rows_reference(x: torch.Tensor, factor: torch.Tensor | None = None) -> Quantized:
    """As `quantize_rows`; its bits are those of the kernel."""
    wide = x.float() if factor is None else x.float() * factor
    largest = wide.abs().amax(-1, keepdim=True) if x.shape[-1] else wide.new_zeros(*x.shape[:-1], 1)
    finite = largest.isfinite()
    largest = largest.clamp_min(SMALLEST_ROW)
    scale = torch.where(finite, largest * (1.0 / LARGEST), torch.nan)
    inverse = torch.full_like(largest, LARGEST) / largest  # a number over a tensor would be rounded twice
    return Quantized(torch.where(finite, wide * inverse, 0.0).to(FP8), scale)


def quantize_rows_into(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None = None
) -> None:
    """q (M, K), anywhere, and scale (M, 1), contiguous, of x (M, K). Raises ValueError where they do not fit."""
    m, k = x.shape
    check(q.shape == x.shape and scale.shape == (m, 1), "q and scale do not fit x", x=x, q=q, scale=scale)
    check(factor is None or factor.shape == (k,), "factor must have one entry a column of x", x=x, factor=factor)
    if not use_triton(x, scale):
        made = quantize_rows_reference(x, factor)
        q.copy_(made.q)
        scale.copy_(made.scale)
        return
    transposed = q.stride(1) != 1
    block, n_rows, warps = _tile(x, transposed)
    _quantize_kernel[(cdiv(m, n_rows),)](
        x, scale if factor is None else factor, q, scale, m, k, x.stride(0), *q.stride(),
        FACTOR=factor is not None, ONE=block >= k, ROUND=INTERPRET, ROWS=n_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _tile(x: torch.Tensor, transposed: bool) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program. Transposed, 32 rows lie side by side in the output: a sector of memory."""
    block = next_power_of_2(x.shape[1])
    if transposed:
        return min(block, 256), 32, 8
    if block * x.element_size() > ONE_READ:
        return 8192, 1, 8
    return block, max(1, 1024 // block), 4 if block <= 2048 else min(32, block // 1024)


def quantize_rows(x: torch.Tensor, factor: torch.Tensor | None = None) -> Quantized:
    """q (…, K) and scale (…, 1) of x (…, K), in one launch."""
    flat = rows(x)
    out = new_quantized(flat.shape[0], flat.shape[1], x.device)
    quantize_rows_into(flat, *out, factor)
    return Quantized(out.q.view(x.shape), out.scale.view(*x.shape[:-1], 1))


def new_quantized(m: int, k: int, device: torch.device) -> Quantized:
    """Room for m rows of k columns."""
    q = torch.empty(m, k, dtype=FP8, device=device)
    return Quantized(q, torch.empty(m, 1, dtype=torch.float32, device=device))
