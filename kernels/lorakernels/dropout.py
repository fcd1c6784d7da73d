"""Dropout whose mask is drawn again from its seed instead of being kept: y = x · keep / (1 - p), keep = u(seed, i) >=
p.

x: (M, K), any row stride; the mask depends on the logical index i = row · K + column and on the seed alone, so forward,
backward and a recomputation see the same one. seed: one int64 *on the device*, drawn with torch's own generator: it
costs no synchronization, follows torch.manual_seed and checkpointing's saved states, and changes with each replay of a
CUDA graph. On a GPU the mask is Triton's Philox; on a CPU it is torch's generator. Run: python -m pytest
tests/lorakernels/test_dropout.py
"""

from __future__ import annotations

import torch

from .runtime import cdiv, check, jit, next_power_of_2, rows, tl, use_triton, working_dtype


def draw_seed(device: torch.device, count: int = 1) -> torch.Tensor:
    return torch.randint(0, 2**31 - 1, (count,), dtype=torch.int64, device=device)


def keep_reference(shape, seed: torch.Tensor, p: float) -> torch.Tensor:
    """The mask of the torch path, bool (M, K)."""
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(tuple(shape), generator=generator) >= p).to(seed.device)


@jit
def _keep(seed_ptr, row, col, n, p):
    return tl.rand(tl.load(seed_ptr), (row * n + col).to(tl.uint32)) >= p


@jit
def _dropout_kernel(x_ptr, y_ptr, seed_ptr, n, x_row, y_row, p, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """y = mask · x / (1 - p), or y += that."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n
    x = tl.load(x_ptr + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(_keep(seed_ptr, row, col, n, p), x / (1.0 - p), 0.0)
    if ADD:
        y += tl.load(y_ptr + row * y_row + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_row + col, y.to(y_ptr.dtype.element_ty), mask=inside)


def dropout_into(x, seed, p: float, out, add: bool = False) -> None:
    """out = dropout(x), or out += dropout(x) with add. Both (M, K)."""
    check(out.shape == x.shape and x.dim() == 2, "out and x differ", x=x, out=out)
    if not use_triton(x, out):
        wide = x.to(working_dtype(x))
        y = torch.where(keep_reference(x.shape, seed, p), wide / (1 - p) if p < 1 else torch.zeros_like(wide), 0)
        out.copy_(out + y if add else y)
        return
    m, n = x.shape
    block = min(1024, next_power_of_2(n))
    # p == 1 would divide zero by zero; no element is kept then, so any smaller divisor gives the same zeros.
    _dropout_kernel[(m, cdiv(n, block))](
        x, out, seed, n, x.stride(0), out.stride(0), min(p, 1.0), ADD=add, BLOCK=block, num_warps=4
    )


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            dropout_into(rows(x), seed, p, rows(out))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        if grad.numel():
            dropout_into(rows(grad), ctx.saved_tensors[0], ctx.p, rows(out))
        return out, None, None


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """x (..., K) with a share p of its elements zeroed and the others divided by 1 - p; seed as draw_seed gives it."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability must be between 0 and 1, not {p}")
    check(seed.numel() == 1, "seed must be a single integer", seed=seed)
    return x.clone() if p == 0 else Dropout.apply(x, seed, float(p))
