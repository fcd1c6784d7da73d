"""The frozen weight's GEMMs in FP8 (e4m3), LoRA's in the compute dtype: Y ≈ (Xq · Wqᵀ) · sx · sw, with one scale a row
of X and one a row of W, scale = max|row| / 448; backward likewise with dY and Wᵀ.

X: (M, K), W: (N, K). Two quantized copies of W are kept (each direction needs its own scales and layout), 2 bytes an
element as bf16 has; the bf16 weight stays with the module. The adapters and their gradients never pass through FP8.
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
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


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
    # Row-wise scaling gives bfloat16 only.
    out = torch._scaled_mm(xq, wq.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16)
    return out.to(dtype)


class FrozenFp8:
    """The quantized weights of the members of one projection, stacked to (N, K), and (K, N) for backward."""

    def __init__(self, members: Sequence[Member]):
        self.members = members
        self._of: list[tuple[int, int]] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Quantizes the weights if they are not those of the last time: loaded, merged or moved since."""
        of = [(m.weight.data_ptr(), m.weight._version) for m in self.members]
        if of != self._of:
            with torch.inference_mode(False), torch.no_grad():
                w = torch.cat([m.weight for m in self.members])
                self.forward_weight = quantize_rows(w)
                self.backward_weight = quantize_rows(w.t().contiguous())
            self._of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (M, K) · Wᵀ, (M, N) in the dtype of x."""
        return fp8_mm(*quantize_rows(x), *self.forward_weight, x.dtype)

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """dy (M, N) · W, (M, K) in the dtype of dy."""
        return fp8_mm(*quantize_rows(dy), *self.backward_weight, dy.dtype)


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
