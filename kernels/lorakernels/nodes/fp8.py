"""The frozen weight's GEMMs in FP8 (e4m3), LoRA's in the compute dtype: Y ≈ (Xq · Wqᵀ) · sx · sw, with one scale a row
of X and one a row of W, scale = max|row| / 448; backward likewise with dY and Wᵀ.

X: (M, K), W: (N, K). The weight stays with the module and is quantized at each product, as X is: PEFT merges through
`.data`, which no version counter sees, so a copy could be old. The adapters and their gradients never pass through FP8.
Error: e4m3 keeps 3 bits of mantissa, a relative error of up to 2⁻⁴ an element; for random operands a product is off by
about 3.5 % of its size (test_fp8.py holds forward and backward below 5 %). So this is a toggle that changes the
mathematics. Micikevicius et al., "FP8 formats for deep learning" (2022). Run: python -m pytest
tests/lorakernels/test_fp8.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .member import Member

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / scale in e4m3 (M, K), scale (M, 1) float32) of x (M, K)."""
    largest = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).float()  # max|row|, in one launch
    scale = largest.clamp_min(1e-12) / LARGEST
    return (x / scale).to(FP8), scale


def fp8_mm_reference(
    xq: torch.Tensor, sx: torch.Tensor, wq: torch.Tensor, sw: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product (M, N) of the quantized operands in float32, cast to dtype: what the tensor cores compute, emulated.
    xq: (M, K), sx: (M, 1), wq: (N, K), sw: (N, 1)."""
    return ((xq.float() @ wq.float().t()) * sx * sw.t()).to(dtype)


def fp8_mm(xq: torch.Tensor, sx: torch.Tensor, wq: torch.Tensor, sw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """xq (M, K) · wq (N, K)ᵀ with row scales sx (M, 1) and sw (N, 1): (M, N) in dtype."""
    if not xq.is_cuda:
        return fp8_mm_reference(xq, sx, wq, sw, dtype)
    return scaled_mm(xq, sx, wq, sw, dtype)


def scaled_mm(
    xq: torch.Tensor, sx: torch.Tensor, wq: torch.Tensor, sw: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As `fp8_mm`, by torch's product of FP8 operands. It has scales of rows in bfloat16 only; another dtype gets the
    sums in float32 and is rounded once, after the scales."""
    if dtype == torch.bfloat16:
        return torch._scaled_mm(xq, wq.t(), scale_a=sx, scale_b=sw.t(), out_dtype=dtype)
    one = torch.ones((), device=xq.device)
    sums = torch._scaled_mm(xq, wq.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums.mul_(sx).mul_(sw.t()).to(dtype)


class FrozenFp8:
    """The products with the frozen weights of the members of one projection, stacked to (N, K)."""

    def __init__(self, members: Sequence[Member]):
        self.members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (M, K) · Wᵀ, (M, N) in the dtype of x."""
        return fp8_mm(*quantize_rows(x), *quantize_rows(self._weight()), x.dtype)

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """dy (M, N) · W, (M, K) in the dtype of dy."""
        return fp8_mm(*quantize_rows(dy), *quantize_rows(self._weight().t().contiguous()), dy.dtype)

    def _weight(self) -> torch.Tensor:
        weights = [m.weight.detach() for m in self.members]
        return weights[0] if len(weights) == 1 else torch.cat(weights)


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
