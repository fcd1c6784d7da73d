"""An adapter into its places in the operand buffer: out_a = A, out_b = scale · B, cast on the way, in one launch.

A: (r, K), B: (N, r), of any floating dtype; out_a: (r, K) and out_b: (N, r), strided views of the buffer. It runs for
every adapter on every forward (see `projection.py`), so at small batches its launches count: one instead of two.
Run: python -m pytest tests/lorakernels/test_adapter.py
"""

from __future__ import annotations

import torch

from .runtime import cdiv, check, jit, tl, use_triton

BLOCK = 2048


@jit
def _load_kernel(
    a_ptr, b_ptr, out_a_ptr, out_b_ptr, k, r, n_a, n_b, out_a_row, out_b_row, a_blocks, scale, BLOCK: tl.constexpr
):
    """The first a_blocks programs copy A, the others B."""
    i = tl.program_id(0)
    if i < a_blocks:
        e = i * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + e, mask=e < n_a, other=0.0)
        row = (e // k).to(tl.int64)
        tl.store(out_a_ptr + row * out_a_row + e % k, a.to(out_a_ptr.dtype.element_ty), mask=e < n_a)
    else:
        e = (i - a_blocks) * BLOCK + tl.arange(0, BLOCK)
        b = tl.load(b_ptr + e, mask=e < n_b, other=0.0).to(tl.float32) * scale
        row = (e // r).to(tl.int64)
        tl.store(out_b_ptr + row * out_b_row + e % r, b.to(out_b_ptr.dtype.element_ty), mask=e < n_b)


def load_adapter_reference(a: torch.Tensor, b: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, scale · B) in float32."""
    return a.float(), b.float() * scale


def load_adapter(a: torch.Tensor, b: torch.Tensor, scale: float, out_a: torch.Tensor, out_b: torch.Tensor) -> None:
    """Writes out_a and out_b; nothing else of the buffer they are views of is touched."""
    check(
        out_a.shape == a.shape and out_b.shape == b.shape, "A, B and their places differ", a=a, b=b, out=out_a, to=out_b
    )
    a, b = a.detach(), b.detach()
    contiguous = a.is_contiguous() and b.is_contiguous() and out_a.stride(-1) == 1 and out_b.stride(-1) == 1
    if not use_triton(a, b, out_a, out_b) or not contiguous:
        out_a.copy_(a)
        torch.mul(b, scale, out=out_b)
        return
    blocks = cdiv(a.numel(), BLOCK)
    _load_kernel[(blocks + cdiv(b.numel(), BLOCK),)](
        a, b, out_a, out_b, a.shape[1], b.shape[1], a.numel(), b.numel(), out_a.stride(0), out_b.stride(0), blocks,
        scale, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
