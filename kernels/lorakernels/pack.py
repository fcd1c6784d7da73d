"""The operand [x | x · Aᵀ] of the one-GEMM form, in one read of x: x (M, K) is copied, S = x · Aᵀ (M, p) lands behind
it.

x: last dimension contiguous, any row stride; A: (p, K), any strides (backward passes the view (sB)ᵀ, which makes this
dS = dY · sB); out: (M, K + p), of A's dtype. S is accumulated in float32. Backward's dB = dYᵀ · sS wants S once more,
times each adapter's scale and without X around it: `Kept` takes it from the same launch. Needed where the tensor comes
from someone else's kernel, as attention's output does; norm and SwiGLU write their operand themselves, and a gradient
that a norm's backward writes has spare columns from the beginning (`with_spare_columns`). `s_into` is the same without
the copy, for an X that lies where it is read. Run: python -m pytest tests/lorakernels/test_pack.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .runtime import alone, cdiv, check, fuses, jit, kernel, rank_tile, tile_of, tl


def pack_reference(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[x | x · Aᵀ] in float32."""
    return torch.cat((x.float(), x.float() @ a.float().t()), 1)


@dataclass
class Kept:
    """Where sS (M, p) goes, contiguous, and the factor of each of its columns, (p,) in float32 or wider."""

    s: torch.Tensor
    scales: torch.Tensor

    def write(self, s: torch.Tensor) -> None:
        """For an S (M, p) that the library made."""
        torch.mul(s, self.scales, out=self.s)


@jit
def store_s(y, kept_ptr, scale_ptr, acc, row, m, p, KEEP: tl.constexpr, BM: tl.constexpr, R: tl.constexpr):
    """S (BM, R) of the rows `row` into the p spare columns that begin at the pointers y (BM, 1), zeros into those
    beyond R; KEEP: sS to kept (M, p), too."""
    r = tl.arange(0, R)
    dtype = y.dtype.element_ty
    inside = (row[:, None] < m) & (r[None, :] < p)
    tl.store(y + r[None, :], acc.to(dtype), mask=inside)
    if KEEP:
        scale = tl.load(scale_ptr + r, mask=r < p, other=0.0)
        tl.store(kept_ptr + row[:, None] * p + r[None, :], (acc * scale[None, :]).to(dtype), mask=inside)
    for start in range(R, p, R):
        inside = (row[:, None] < m) & (start + r[None, :] < p)
        tl.store(y + start + r[None, :], tl.zeros((BM, R), dtype), mask=inside)
        if KEEP:
            tl.store(kept_ptr + row[:, None] * p + start + r[None, :], tl.zeros((BM, R), dtype), mask=inside)


@kernel
def _pack_kernel(
    x_ptr, a_ptr, y_ptr, s_ptr, kept_ptr, scale_ptr, m, n, rank, p, x_row, a_row, a_col, y_row, s_row,
    COPY: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(s_ptr.dtype.element_ty)
        if COPY:
            tl.store(y_ptr + row[:, None] * y_row + col[None, :], x, mask=inside)
        spot = a_ptr + r[None, :].to(tl.int64) * a_row + col[:, None].to(tl.int64) * a_col
        a = tl.load(spot, mask=(col[:, None] < n) & (r[None, :] < rank), other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    store_s(s_ptr + row[:, None] * s_row, kept_ptr, scale_ptr, acc, row, m, p, KEEP, BM, R)


def _launch(x, a, copy, s, tile: str, rank: int, kept: Kept | None) -> None:
    """S to s (M, p) and, unless copy is None, x to copy (M, K)."""
    m, n = x.shape
    bm, bn, warps, stages = tile_of(tile, s)
    to = x if copy is None else copy
    _pack_kernel[(cdiv(m, bm),)](
        x, a, to, s, *arguments_of(kept, s), m, n, rank, a.shape[0],
        x.stride(0), a.stride(0), a.stride(1), to.stride(0), s.stride(0),
        COPY=copy is not None, KEEP=kept is not None, BM=bm, BN=bn, R=rank_tile(rank),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _by_kernel(x: torch.Tensor, a: torch.Tensor, out: torch.Tensor, tile: str | None, rank: int) -> bool:
    return tile is not None and x.stride(-1) == 1 and fuses(rank, (x,), (a, out))


def s_into(
    x: torch.Tensor, a: torch.Tensor, out: torch.Tensor, tile: str | None = "fused", rank: Any = None,
    kept: Kept | None = None,
) -> None:  # fmt: skip
    """out (M, p) = S = x · aᵀ of an x (M, K) in a's dtype, which stays where it is; out may lie behind x. tile is a key
    of TILES, None takes library calls instead of the kernel; rank and kept as in `pack_into`."""
    p = a.shape[0]
    check(a.shape[1] == x.shape[1] and out.shape == (x.shape[0], p), "x, a and out do not fit", x=x, a=a, out=out)
    rank = p if rank is None else rank
    if _by_kernel(x, a, out, tile, rank):
        _launch(x, a, None, out, str(tile), rank, kept)
        return
    torch.mm(alone(x), a.t(), out=out)
    if kept is not None:
        kept.write(out)


def pack_into(
    x: torch.Tensor, a: torch.Tensor, out: torch.Tensor, tile: str | None = "fused", rank: Any = None,
    kept: Kept | None = None,
) -> None:  # fmt: skip
    """out = [x | x · aᵀ]; tile is a key of TILES, None takes a copy and library calls instead of the kernel.

    kept: where sS goes, too. rank: how many rows of a can differ from zero, all of them if not given: the kernel reads
    no others.
    """
    m, n = x.shape
    p = a.shape[0]
    check(a.shape[1] == n and out.shape == (m, n + p), "x, a and out do not fit", x=x, a=a, out=out)
    rank = p if rank is None else rank
    if _by_kernel(x, a, out, tile, rank):
        _launch(x, a, out[:, :n], out[:, n:], str(tile), rank, kept)
        return
    out[:, :n].copy_(x)
    s_into(out[:, :n], a, out[:, n:], None, rank, kept)


def arguments_of(kept: Kept | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `store_s` is given; some other tensor where nothing is kept."""
    return (other, other) if kept is None else (kept.s, kept.scales)


SPARE = "_lorakernels_spare"


def with_spare_columns(shape, spare: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialized gradient of `shape` whose rows have room for `spare` more columns. The mark on it tells the node
    that receives it that the room is ours: a view of somebody else's tensor could look the same."""
    wide = torch.empty(shape[:-1].numel(), shape[-1] + spare, dtype=like.dtype, device=like.device)
    out = wide[:, : shape[-1]].view(shape)
    setattr(out, SPARE, wide)
    return out


def spare_columns(dy: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The buffer (M, width) that dy is the beginning of, if `with_spare_columns` made it so; else None."""
    wide = getattr(dy, SPARE, None)
    if wide is None or wide.shape[1] < width or wide.dtype != dtype or wide.data_ptr() != dy.data_ptr():
        return None
    return wide[:, :width]
