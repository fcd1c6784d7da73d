"""Dropout whose mask is drawn again from its seed instead of being kept: y = x · keep / (1 - p), keep = u(seed, i) >=
p; and LoRA's products with it, which make the mask in registers, so that dropout(x) is never written:

    S = dropout(x) · Aᵀ      (`product_into`)          dX += dropout(dS · A)      (`add_product_into`)

(dA = dSᵀ · dropout(x) is `lora_grad.a_gradient`.) x, dX: (M, K), any row stride; A: (r, K); S, dS: (M, r). The mask
depends on the logical position (row, column) and on the seed alone, so forward, backward and a recomputation see the
same one. seed: one int64 *on the device*, drawn with torch's own generator: it costs no synchronization, follows
torch.manual_seed and checkpointing's saved states, and changes with each replay of a CUDA graph. On a GPU the mask is
Philox with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), of which 16 bits go to an
element: one call serves eight, because the generator, not the memory, is what a naive mask costs. On a CPU it is
torch's generator. A seed is below 2³¹; the bits above its 32nd are the row that the first row of x is in the whole
tensor (`of_rows`), so that a tile of rows has the mask of the untiled form.
Run: python -m pytest tests/lorakernels/test_dropout.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import (
    cdiv,
    check,
    contiguous_on_cpu,
    jit,
    kernel,
    next_power_of_2,
    rank_tile,
    rows,
    tensor_cores,
    tile_of,
    tl,
    use_triton,
    working_dtype,
)


def draw_seed(device: torch.device, count: int = 1) -> torch.Tensor:
    """Seeds (count,) int64 on the device, from torch's own generator."""
    return torch.randint(0, 2**31 - 1, (count,), dtype=torch.int64, device=device)


def of_rows(seeds: torch.Tensor | None, first: int) -> torch.Tensor | None:
    """The seeds (…,) for a tile of rows that begins with row `first` of the whole tensor; None of None."""
    return seeds + (first << 32) if first and seeds is not None else seeds


def keep_reference(shape: Sequence[int], seed: torch.Tensor, p: float) -> torch.Tensor:
    """The mask of the torch path, bool of this shape (M, K); seed: one int64, p: the probability of a zero."""
    first, word = divmod(int(seed), 1 << 32)
    generator = torch.Generator().manual_seed(word)  # whose numbers come row after row
    return (torch.rand(first + shape[0], *shape[1:], generator=generator)[first:] >= p).to(seed.device)


@jit
def keep_tile(seed, row, start, n, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """The mask (BM, BN) of the columns start … start + BN, both multiples of 8. row: (BM,); threshold: p · 2¹⁶."""
    group = start // 8 + tl.arange(0, BN // 8)
    row = row + (seed >> 32)  # `of_rows`
    offset = (row[:, None] * ((n + 7) // 8) + group[None, :]).to(tl.uint32)
    words = tl.randint4x(seed & 0xFFFFFFFF, offset, n_rounds=7)  # pyright: ignore[reportArgumentType]  # Triton wraps it
    words = tl.join(tl.join(words[0], words[1]), tl.join(words[2], words[3]))
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    return tl.reshape(halves, (BM, BN)) >= threshold


@kernel
def _dropout_kernel(
    x_ptr, y_ptr, seed_ptr, m, n, x_row, y_row, threshold, scale,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y = mask · x · scale, or y += that."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    start = tl.program_id(1) * BN
    col = start + tl.arange(0, BN)
    inside = (row[:, None] < m) & (col[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keep_tile(tl.load(seed_ptr), row, start, n, threshold, BM, BN), x * scale, 0.0)
    if ADD:
        y += tl.load(y_ptr + row[:, None] * y_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * y_row + col[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _product_kernel(
    x_ptr, a_ptr, seed_ptr, s_ptr, m, n, rank, x_row, a_row, s_row, threshold, scale,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    seed = tl.load(seed_ptr)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0)
        x = tl.where(keep_tile(seed, row, start, n, threshold, BM, BN), x, 0.0).to(a_ptr.dtype.element_ty)
        known = (col[:, None] < n) & (r[None, :] < rank)
        a = tl.load(a_ptr + r[None, :].to(tl.int64) * a_row + col[:, None], mask=known, other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    spot = s_ptr + row[:, None] * s_row + r[None, :]
    tl.store(spot, (acc * scale).to(s_ptr.dtype.element_ty), mask=(row[:, None] < m) & (r[None, :] < rank))


@kernel
def _add_product_kernel(
    ds_ptr, a_ptr, seed_ptr, dx_ptr, m, n, rank, ds_row, a_row, dx_row, threshold, scale,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    start = tl.program_id(1) * BN
    col = start + tl.arange(0, BN)
    r = tl.arange(0, R)
    narrow = (row[:, None] < m) & (r[None, :] < rank)
    ds = tl.load(ds_ptr + row[:, None] * ds_row + r[None, :], mask=narrow, other=0.0)
    known = (r[:, None] < rank) & (col[None, :] < n)
    a = tl.load(a_ptr + r[:, None].to(tl.int64) * a_row + col[None, :], mask=known, other=0.0)
    new = tl.dot(ds, a, input_precision="ieee") * scale
    inside = (row[:, None] < m) & (col[None, :] < n)
    spot = dx_ptr + row[:, None] * dx_row + col[None, :]
    dx = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    dx += tl.where(keep_tile(tl.load(seed_ptr), row, start, n, threshold, BM, BN), new, 0.0)
    tl.store(spot, dx.to(dx_ptr.dtype.element_ty), mask=inside)


MAX_RANK = 64  # of the fused products: above it the tile of A leaves the registers


def threshold_and_scale(p: float) -> tuple[int, float]:
    """(p · 2¹⁶, 1 / (1 - p)), as the kernels take them. With p = 1 nothing is kept, whatever the scale."""
    return round(p * 65536), 1.0 / (1.0 - p) if p < 1 else 0.0


def dropout_into(x: torch.Tensor, seed: torch.Tensor, p: float, out: torch.Tensor, add: bool = False) -> None:
    """out = dropout(x), or out += dropout(x) with add. x, out: (M, K); seed: one int64; p: the probability of a zero.
    Raises ValueError where x and out differ in shape."""
    check(out.shape == x.shape and x.dim() == 2, "out and x differ", x=x, out=out)
    if not use_triton(x, out):
        _, scale = threshold_and_scale(p)
        y = torch.where(keep_reference(x.shape, seed, p), x.to(working_dtype(x)) * scale, 0)
        out.copy_(out + y if add else y)
        return
    m, n = x.shape
    bn = min(512, max(16, next_power_of_2(n)))
    _dropout_kernel[(cdiv(m, 4), cdiv(n, bn))](
        x, out, seed, m, n, x.stride(0), out.stride(0), *threshold_and_scale(p), ADD=add, BM=4, BN=bn, num_warps=4
    )


def dropped(x: torch.Tensor, seed: torch.Tensor, p: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """dropout(x) (M, K) of x (M, K), in dtype or that of x; seed: one int64; p: the probability of a zero."""
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    dropout_into(x, seed, p, out)
    return out


def product_into(
    x: torch.Tensor, a: torch.Tensor, seed: torch.Tensor, p: float, s: torch.Tensor, tile: str | None = "fused"
) -> None:
    """s (M, r) = dropout(x) · aᵀ of x (M, K) and a (r, K).

    seed: one int64; p: the probability of a zero; tile: a key of TILES. None, and a rank above MAX_RANK, take a library
    product. Raises ValueError where the shapes do not fit.
    """
    m, n = x.shape
    rank = a.shape[0]
    check(a.shape[1] == n and s.shape == (m, rank), "x, a and s do not fit", x=x, a=a, s=s)
    if tile is None or rank > MAX_RANK or not use_triton(x, s) or not tensor_cores(a):
        s.copy_(dropped(x, seed, p, a.dtype) @ a.t())
        return
    bm, bn, warps, stages = tile_of(tile, x)
    _product_kernel[(cdiv(m, bm),)](
        x, a, seed, s, m, n, rank, x.stride(0), a.stride(0), s.stride(0), *threshold_and_scale(p),
        BM=bm, BN=bn, R=rank_tile(rank), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def add_product_into(
    ds: torch.Tensor, a: torch.Tensor, seed: torch.Tensor, p: float, dx: torch.Tensor, *, fused: bool = True
) -> None:
    """dx (M, K) += dropout(ds · a) of ds (M, r) and a (r, K), with the mask of x.

    seed: one int64; p: the probability of a zero. Not fused, and with a rank above MAX_RANK, it takes a library
    product. Raises ValueError where the shapes do not fit.
    """
    m, n = dx.shape
    rank = a.shape[0]
    check(a.shape[1] == n and ds.shape == (m, rank), "ds, a and dx do not fit", ds=ds, a=a, dx=dx)
    if not fused or rank > MAX_RANK or not use_triton(dx) or not tensor_cores(ds, a):
        dropout_into(contiguous_on_cpu(ds) @ a, seed, p, dx, add=True)
        return
    _add_product_kernel[(cdiv(m, 32), cdiv(n, 128))](
        ds, a, seed, dx, m, n, rank, ds.stride(0), a.stride(0), dx.stride(0), *threshold_and_scale(p),
        BM=32, BN=128, R=rank_tile(rank), num_warps=4,
    )  # fmt: skip


class Dropout(torch.autograd.Function):
    """`dropout` as one node, which saves the seed alone. x, grad: (…, K)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            dropout_into(rows(x), seed, p, rows(out))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        if grad.numel():
            dropout_into(rows(grad), ctx.saved_tensors[0], ctx.p, rows(out))
        return out, None, None


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """x (…, K) with a share p of its elements zeroed and the others divided by 1 - p; seed: (1,) int64 as `draw_seed`
    gives it. Raises ValueError where p is no probability, or seed no single number."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability must be between 0 and 1, not {p}")
    check(seed.numel() == 1, "seed must be a single integer", seed=seed)
    return x.clone() if p == 0 else Dropout.apply(x, seed, float(p))
