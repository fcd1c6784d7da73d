"""The operand [x | x · Aᵀ] of the one-GEMM form, in one read of x: x (M, K) is copied, S = x · Aᵀ (M, p) lands behind
it.

x: last dimension contiguous, any row stride; A: (p, K), any strides (backward passes the view (sB)ᵀ, which makes this
dS = dY · sB); out: (M, K + p), of A's dtype. S is accumulated in float32. Backward's dB = dYᵀ · sS wants S once more,
times each adapter's scale and without X around it: the same launch leaves it in a `ScaledS`. Needed where the tensor
comes from someone else's kernel, as attention's output does; norm and SwiGLU write their operand themselves, and a
gradient that a norm's backward writes has spare columns from the beginning (`with_spare_columns`). `s_into` is the same
without the copy, for an X that lies where it is read.
Run: python -m pytest tests/lorakernels/test_concat_operand.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..runtime import cdiv, check, contiguous_on_cpu, fuses, jit, kernel, rank_tile, tile_of, tl


@dataclass(slots=True)
class ScaledS:
    """Where backward's operand sS goes (dB = dYᵀ · sS): out (M, p), contiguous; scales: the factor of each column of S,
    (p,) in float32 or wider."""

    out: torch.Tensor
    scales: torch.Tensor

    def write(self, s: torch.Tensor) -> None:
        """out = s · scales, for an S (M, p) that the library made."""
        torch.mul(s, self.scales, out=self.out)


class LoraColumns(NamedTuple):
    """The columns S = x · Aᵀ that a launch leaves behind the x that it reads or writes.

    a: (p, K); rank: how many rows of a can differ from zero, all of them if None (the kernels read no others);
    scaled_s: where sS goes, too.
    """

    a: torch.Tensor
    rank: int | None = None
    scaled_s: ScaledS | None = None

    @property
    def rows(self) -> int:
        """Rows of a that are read."""
        return self.a.shape[0] if self.rank is None else self.rank

    def scaled_s_pointers(self, placeholder: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, scales) as `store_s` takes them; twice the placeholder, of any shape, where sS is not wanted."""
        wanted = self.scaled_s
        return (placeholder, placeholder) if wanted is None else (wanted.out, wanted.scales)


def concat_operand_reference(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[x | x · Aᵀ] (M, K + p) in float32, of x (M, K) and a (p, K)."""
    return torch.cat((x.float(), x.float() @ a.float().t()), 1)


@jit
def store_s(y, scaled_ptr, scale_ptr, acc, row, m, p, STORE_SCALED_S: tl.constexpr, BM: tl.constexpr, R: tl.constexpr):
    """S (BM, R) of the rows `row` into the p spare columns that begin at the pointers y (BM, 1), zeros into those
    beyond R; STORE_SCALED_S: sS to scaled (M, p), too."""
    r = tl.arange(0, R)
    dtype = y.dtype.element_ty
    inside = (row[:, None] < m) & (r[None, :] < p)
    tl.store(y + r[None, :], acc.to(dtype), mask=inside)
    if STORE_SCALED_S:
        scale = tl.load(scale_ptr + r, mask=r < p, other=0.0)
        tl.store(scaled_ptr + row[:, None] * p + r[None, :], (acc * scale[None, :]).to(dtype), mask=inside)
    for start in range(R, p, R):
        inside = (row[:, None] < m) & (start + r[None, :] < p)
        tl.store(y + start + r[None, :], tl.zeros((BM, R), dtype), mask=inside)
        if STORE_SCALED_S:
            tl.store(scaled_ptr + row[:, None] * p + start + r[None, :], tl.zeros((BM, R), dtype), mask=inside)


@kernel
def _concat_operand_kernel(
    x_ptr, a_ptr, y_ptr, s_ptr, scaled_ptr, scale_ptr, m, n, rank, p, x_row, a_row, a_col, y_row, s_row,
    COPY: tl.constexpr, STORE_SCALED_S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
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
        if COPY:
            # Its use waits for the product. Triton gives an x that is stored, too, one buffer too few, and the rows of
            # a later iteration would be copied into the one that tensor cores still read (triton-lang/triton#6691).
            acc = tl.where(row[:, None] < m, acc, 0.0)
    store_s(s_ptr + row[:, None] * s_row, scaled_ptr, scale_ptr, acc, row, m, p, STORE_SCALED_S, BM, R)


def _launch(x: torch.Tensor, copy: torch.Tensor | None, s: torch.Tensor, columns: LoraColumns, tile: str) -> None:
    """S to s (M, p) and, unless copy is None, x to copy (M, K)."""
    m, n = x.shape
    a, rank, to = columns.a, columns.rows, x if copy is None else copy
    bm, bn, warps, stages = tile_of(tile, s)
    _concat_operand_kernel[(cdiv(m, bm),)](
        x, a, to, s, *columns.scaled_s_pointers(s), m, n, rank, a.shape[0],
        x.stride(0), a.stride(0), a.stride(1), to.stride(0), s.stride(0),
        COPY=copy is not None, STORE_SCALED_S=columns.scaled_s is not None, BM=bm, BN=bn, R=rank_tile(rank),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _by_kernel(x: torch.Tensor, columns: LoraColumns, out: torch.Tensor, tile: str | None) -> bool:
    return tile is not None and x.stride(-1) == 1 and fuses(columns.rows, (x,), (columns.a, out))


def s_into(x: torch.Tensor, columns: LoraColumns, out: torch.Tensor, tile: str | None = "fused") -> None:
    """out (M, p) = S = x · aᵀ of an x (M, K) in a's dtype, which stays where it is; out may lie behind x.

    tile is a key of TILES, None takes library calls instead of the kernel. Raises ValueError where the shapes do not
    fit.
    """
    a = columns.a
    fits = a.shape[1] == x.shape[1] and out.shape == (x.shape[0], a.shape[0])
    check(fits, "x, a and out do not fit", x=x, a=a, out=out)
    if _by_kernel(x, columns, out, tile):
        _launch(x, None, out, columns, str(tile))
        return
    torch.mm(contiguous_on_cpu(x), a.t(), out=out)
    if columns.scaled_s is not None:
        columns.scaled_s.write(out)


def concat_operand_into(x: torch.Tensor, columns: LoraColumns, out: torch.Tensor, tile: str | None = "fused") -> None:
    """out (M, K + p) = [x | x · aᵀ] of an x (M, K); tile is a key of TILES, None takes a copy and library calls instead
    of the kernel. Raises ValueError where the shapes do not fit."""
    (m, n), p = x.shape, columns.a.shape[0]
    check(columns.a.shape[1] == n and out.shape == (m, n + p), "x, a and out do not fit", x=x, a=columns.a, out=out)
    if _by_kernel(x, columns, out, tile):
        _launch(x, out[:, :n], out[:, n:], columns, str(tile))
        return
    out[:, :n].copy_(x)
    s_into(out[:, :n], columns, out[:, n:], None)


SPARE = "_lorakernels_spare"


def with_spare_columns(shape: torch.Size, spare: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialized gradient of `shape` (…, K) whose rows have room for `spare` more columns; like: a tensor of any
    shape, whose dtype and device it has. The mark on it tells the node that receives it that the room is ours: a view
    of somebody else's tensor could look the same."""
    wide = torch.empty(shape[:-1].numel(), shape[-1] + spare, dtype=like.dtype, device=like.device)
    out = wide[:, : shape[-1]].view(shape)
    setattr(out, SPARE, wide)
    return out


def spare_columns(dy: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The buffer (M, width) in dtype that dy (…, N) is the beginning of, if `with_spare_columns` made it so; else
    None."""
    wide = getattr(dy, SPARE, None)
    if wide is None or wide.shape[1] < width or wide.dtype != dtype or wide.data_ptr() != dy.data_ptr():
        return None
    return wide[:, :width]
