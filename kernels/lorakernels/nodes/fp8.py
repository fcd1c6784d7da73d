"""The frozen weight's GEMMs in FP8 (e4m3), LoRA's in the compute dtype: Y ≈ (Xq · Wqᵀ) · sx · sw, with one scale a row
of X and one a row of W, scale = max|row| / 448 (`quantize_rows.py`).

X: (M, K), W: (N, K). Backward multiplies with the same Wq, so that dX belongs to the Y that forward made: sw, a scale a
column of dY, goes into dY before that is quantized, and Wqᵀ is written anew, since Hopper's FP8 instructions read both
operands along K alone. The weight stays with the module and is quantized at each product: PEFT merges through
`.data`, which no version counter sees, and a replayed graph has to read today's weights. The adapters and their
gradients never pass through FP8.

Error: e4m3 keeps 3 bits of mantissa, a relative error of up to 2⁻⁴ an element; for random operands a product is off by
about 3.5 % of its size (test_fp8.py holds forward and backward below 5 %). So this is a toggle that changes the
mathematics. Micikevicius et al., "FP8 formats for deep learning" (2022). Run: python -m pytest
tests/lorakernels/test_fp8.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..ops.quantize_rows import FP8, Quantized, quantize_rows, quantize_rows_into
from .member import Member


def fp8_mm_reference(x: Quantized, w: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product (M, N) of x (M, K) and w (N, K) in float32, cast to dtype: what the tensor cores compute, emulated.
    bias: (N,)."""
    y = (x.q.float() @ w.q.float().t()) * x.scale * w.scale.t()
    return (y if bias is None else y + bias).to(dtype)


def fp8_mm(
    x: Quantized, w: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x (M, K) · wᵀ of w (N, K), plus bias (N,): (M, N) in dtype, in out where that is given."""
    if x.q.is_cuda:
        return scaled_mm(x, w, dtype, bias, out)
    y = fp8_mm_reference(x, w, dtype, bias)
    return y if out is None else out.copy_(y)


def scaled_mm(
    x: Quantized, w: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `fp8_mm`, by torch's product of FP8 operands. It has scales of rows in bfloat16 only; another dtype gets the
    sums in float32 and is rounded once, after the scales. An out whose rows lie apart is copied to: a form that torch
    takes for some shapes writes as if they did not. The bias is added behind the product: cuBLASLt 13.0 has none for
    scales of rows (CUBLAS_STATUS_NOT_SUPPORTED on an H100)."""
    if dtype == torch.bfloat16:
        into = out if out is not None and out.is_contiguous() else None
        y = torch._scaled_mm(
            x.q, w.q.t(), scale_a=x.scale, scale_b=w.scale.t(), out_dtype=dtype, use_fast_accum=True, out=into
        )
        y = y if bias is None else y.add_(bias)
        return y if out is None or into is not None else out.copy_(y)
    one = torch.ones((), device=x.q.device)
    sums = torch._scaled_mm(x.q, w.q.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    sums = sums.mul_(x.scale).mul_(w.scale.t())
    sums = sums if bias is None else sums.add_(bias)
    return sums.to(dtype) if out is None else out.copy_(sums)


class FrozenFp8:
    """The products with a projection's frozen weight w (N, K), which may be a view into an operand buffer."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (M, K) · wᵀ plus bias (N,): (M, N) in the dtype of x, in out where that is given."""
        return self.product(quantize_rows(x), w, x.dtype, bias, out)

    def product(
        self, x: Quantized, w: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same of an x (M, K) that who made it has quantized: (M, N) in dtype."""
        return fp8_mm(x, quantize_rows(w), dtype, bias, out)

    def backward(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """dy (M, N) · w: (M, K) in the dtype of dy."""
        transposed = self.transposed(w)
        return transposed.product(quantize_rows(dy, transposed.factor), dy.dtype)

    def transposed(self, w: torch.Tensor) -> TransposedWeight:
        """The operand of the backward of w (N, K)."""
        n, k = w.shape
        q = torch.empty(k, n, dtype=FP8, device=w.device)
        scale = torch.empty(n, 1, dtype=torch.float32, device=w.device)
        quantize_rows_into(w, q.t(), scale)
        return TransposedWeight(q, scale[:, 0])


class TransposedWeight(NamedTuple):
    """Of a weight (N, K): q (K, N) e4m3, and factor (N,) float32, which belongs into the columns of dY before they are
    quantized."""

    q: torch.Tensor
    factor: torch.Tensor

    def product(self, dy: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """dX (M, K) in dtype, of dY · factor (M, N) in e4m3."""
        one = torch.ones(self.q.shape[0], 1, dtype=torch.float32, device=self.q.device)
        return fp8_mm(dy, Quantized(self.q, one), dtype)


def supported(device: torch.device) -> str | None:
    """None, or why FP8 cannot be used there."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 needs compute capability 8.9"
    return None


def why_not(members: Sequence[Member]) -> str | None:
    """None, or why the product with these frozen weights stays in the compute dtype."""
    first = members[0]
    if any(m.quantized is not None for m in members):
        return "its base is quantized already"
    sizes = sum(m.shape[0] for m in members), first.shape[1]
    if first.weight.is_cuda and any(n % 16 for n in sizes):
        return f"FP8 products need multiples of 16, not {sizes[0]} x {sizes[1]}"
    return supported(first.weight.device)
