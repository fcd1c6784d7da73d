"""The gated activation between products in FP8: LoRA's part of what goes in, and rows in e4m3 of what comes out.

    forward     gate, up += S · sBᵀ,   e4m3 of h = act(gate) · up,              S = h · Aᵀ of the down projection
    backward    dh += dS · A,          e4m3 of dY · factor, dY = [d gate | d up],  dA, dS and dB as in `glu.py`

gate_up: (M, 2·I); dh, h: (M, I); S, dS: (M, p); sB: (2·I, p); A: (p, I); factor: (2·I,) float32, the scales of W's
rows.

A row's scale is known when all of the row is, and no program of these shapes holds one. But a product in FP8 leaves
LoRA's part to be added in a pass of its own, over all that the activation will read. That pass takes the rows' maxima
along, by atomic maxima, which have no order. So the pass behind it writes e4m3 at once: neither h nor dY is written in
the compute dtype, because whatever LoRA wants of them is made of the tile in registers. For each element of h that
moves 13 bytes in place of 17 forward, and 16 in place of 20 backward.
The numbers in e4m3 are those of `quantize_rows` of h and of dY, rounded to the compute dtype.
Run: python -m pytest tests/lorakernels/test_quantized_glu.py
"""

from __future__ import annotations

import torch

from ..runtime import INTERPRET, MAX_FUSED_RANK, cdiv, check, kernel, rank_tile, tensor_cores, tile_of, tl
from . import glu
from .concat_operand import LoraColumns, s_into, store_s
from .glu import ACTIVATIONS, GluBackward, RowsInFp8, act_and_slope
from .grad_accumulator import GradAccumulator
from .linear_cross_entropy import mm_in
from .quantize_rows import Quantized, largest_bits, new_quantized, quantize_rows, quantized_tile, row_scale

SUM_TILE = 64, 128, 8  # rows, columns, warps of a pass that adds LoRA's part: two inputs of 64 registers a thread


@kernel
def _forward_sum_kernel(
    y_ptr, s_ptr, sb_ptr, bits_ptr, m, n, rank, y_row, s_row, sb_row,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of gate and the same of up, in place; the maxima of h in them to bits (M,)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    inside = (row[:, None] < m) & (col[None, :] < n)
    known = (r[:, None] < rank) & (col[None, :] < n)
    s = tl.load(s_ptr + row[:, None] * s_row + r[None, :], mask=(row[:, None] < m) & (r[None, :] < rank), other=0.0)
    of_g = sb_ptr + col[None, :].to(tl.int64) * sb_row + r[:, None]
    of_u = sb_ptr + (n + col[None, :]).to(tl.int64) * sb_row + r[:, None]
    at_g = y_ptr + row[:, None] * y_row + col[None, :]
    g = tl.load(at_g, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at_g + n, mask=inside, other=0.0).to(tl.float32)
    g = tl.dot(s, tl.load(of_g, mask=known, other=0.0), g, input_precision="ieee").to(y_ptr.dtype.element_ty)
    u = tl.dot(s, tl.load(of_u, mask=known, other=0.0), u, input_precision="ieee").to(y_ptr.dtype.element_ty)
    tl.store(at_g, g, mask=inside)
    tl.store(at_g + n, u, mask=inside)
    a, _ = act_and_slope(g.to(tl.float32), ACT)
    h = (a * u.to(tl.float32)).to(y_ptr.dtype.element_ty)
    h = tl.where(inside, h.to(tl.float32), 0.0)
    tl.atomic_max(bits_ptr + row, largest_bits(h), mask=row < m, sem="relaxed")


@kernel
def _forward_quantize_kernel(
    y_ptr, bits_ptr, q_ptr, scale_ptr, a_ptr, t_ptr, scaled_ptr, factor_ptr, m, n, y_row, q_row, a_row, t_row, rank, p,
    ACT: tl.constexpr, STORE_SCALED_S: tl.constexpr, ROUND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A block of rows walks over all columns; S = h Aᵀ grows in registers and lands in t (M, p)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    finite, scale, inverse = row_scale(tl.load(bits_ptr + row, mask=row < m, other=0))
    tl.store(scale_ptr + row, scale, mask=row < m)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        at_g = y_ptr + row[:, None] * y_row + col[None, :]
        g = tl.load(at_g, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(at_g + n, mask=inside, other=0.0).to(tl.float32)
        a, _ = act_and_slope(g, ACT)
        h = (a * u).to(y_ptr.dtype.element_ty)
        q = quantized_tile(h.to(tl.float32), finite, inverse, q_ptr, ROUND)
        tl.store(q_ptr + row[:, None] * q_row + col[None, :], q, mask=inside)
        w = tl.load(a_ptr + r[None, :] * a_row + col[:, None], mask=(col[:, None] < n) & (r[None, :] < rank), other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    store_s(t_ptr + row[:, None] * t_row, scaled_ptr, factor_ptr, acc, row, m, p, STORE_SCALED_S, BM, R)


@kernel
def _backward_sum_kernel(
    dh_ptr, ds_ptr, a_ptr, g_ptr, u_ptr, f_ptr, bits_ptr, m, n, rank, dh_row, ds_row, a_row, g_row, u_row,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of dh, in place; the maxima of dY · f to bits (M,)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    inside = (row[:, None] < m) & (col[None, :] < n)
    known = (r[:, None] < rank) & (col[None, :] < n)
    ds = tl.load(ds_ptr + row[:, None] * ds_row + r[None, :], mask=(row[:, None] < m) & (r[None, :] < rank), other=0.0)
    a_tile = tl.load(a_ptr + r[:, None].to(tl.int64) * a_row + col[None, :], mask=known, other=0.0)
    at = dh_ptr + row[:, None] * dh_row + col[None, :]
    dh = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dh = tl.dot(ds, a_tile, dh, input_precision="ieee").to(dh_ptr.dtype.element_ty)
    tl.store(at, dh, mask=inside)
    dh = dh.to(tl.float32)
    g = tl.load(g_ptr + row[:, None] * g_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row[:, None] * u_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    a, d = act_and_slope(g, ACT)
    dg, du = (dh * u * d).to(dh_ptr.dtype.element_ty), (dh * a).to(dh_ptr.dtype.element_ty)
    f_g = tl.load(f_ptr + col, mask=col < n, other=0.0)[None, :]
    f_u = tl.load(f_ptr + n + col, mask=col < n, other=0.0)[None, :]
    dg = tl.where(inside, dg.to(tl.float32) * f_g, 0.0)
    du = tl.where(inside, du.to(tl.float32) * f_u, 0.0)
    bits = tl.maximum(largest_bits(dg), largest_bits(du))
    tl.atomic_max(bits_ptr + row, bits, mask=row < m, sem="relaxed")


def _by_kernels(rank: int, *tensors: torch.Tensor) -> bool:
    return 0 < rank <= MAX_FUSED_RANK and tensor_cores(*tensors) and all(t.stride(-1) == 1 for t in tensors)


def forward(
    gate_up: torch.Tensor, s: torch.Tensor, sb: torch.Tensor, act: str, columns: LoraColumns, t: torch.Tensor,
    rank: int | None = None, tile: str = "fused",
) -> Quantized:  # fmt: skip
    """h in e4m3, (M, I) with a scale a row, of gate_up (M, 2·I), the frozen product, which becomes the whole output by
    S · sBᵀ, s (M, p) and sb (2·I, p). t (M, p of down) = S of the down projection, of columns.a (p, I).

    act: a key of ACTIVATIONS; rank: how many columns of s can differ from zero, all if None; tile: a key of TILES.
    Raises ValueError where the shapes do not fit.
    """
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    a, rank = columns.a, s.shape[1] if rank is None else rank
    fits = s.shape[0] == m and sb.shape == (2 * n, s.shape[1]) and a.shape[1] == n and t.shape == (m, a.shape[0])
    check(fits, "gate_up, S, sB and A do not fit", gate_up=gate_up, s=s, sb=sb, a=a, t=t)
    if not _by_kernels(rank, gate_up, s, sb) or not _by_kernels(columns.rows, a, t):
        gate_up.addmm_(s, sb.t())
        h = glu.reference(gate_up[:, :n], gate_up[:, n:], act).to(gate_up.dtype)
        s_into(h, columns, t, None)
        return quantize_rows(h)
    out, bits = new_quantized(m, n, s.device), torch.zeros(m, dtype=torch.int32, device=s.device)
    bm, bn, warps = SUM_TILE
    _forward_sum_kernel[(cdiv(m, bm), cdiv(n, bn))](
        gate_up, s, sb, bits, m, n, rank, gate_up.stride(0), s.stride(0), sb.stride(0),
        ACT=ACTIVATIONS[act], BM=bm, BN=bn, R=rank_tile(rank), num_warps=warps,
    )  # fmt: skip
    bm, bn, warps, stages = tile_of(tile, gate_up)
    _forward_quantize_kernel[(cdiv(m, bm),)](
        gate_up, bits, *out, a, t, *columns.scaled_s_pointers(t), m, n,
        gate_up.stride(0), out.q.stride(0), a.stride(0), t.stride(0), columns.rows, a.shape[0],
        ACT=ACTIVATIONS[act], STORE_SCALED_S=columns.scaled_s is not None, ROUND=INTERPRET,
        BM=bm, BN=bn, R=rank_tile(columns.rows), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def backward_fits(rank: int, ranks: list[int], widths: list[int]) -> bool:
    """Whether `backward` takes gate and up of these ranks and widths beside a down projection of this rank."""
    return len(ranks) == 2 and 0 < rank == ranks[0] == ranks[1] <= glu.MAX_A_RANK and widths[0] == widths[1]


def backward(
    inputs: GluBackward, ds: torch.Tensor, a: torch.Tensor, factor: torch.Tensor, sb: torch.Tensor,
    scaled_s: torch.Tensor, ds_out: torch.Tensor, tile: str = "whole", accumulator: GradAccumulator | None = None,
) -> tuple[Quantized, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dY · factor in e4m3, (M, 2·I) with a scale a row; dA (rank, I) of down and dB (2·I, rank) in float32) of
    inputs.grad, the frozen product (M, I), which becomes dh by dS · A, ds (M, rank) and a (rank, I) of down. ds_out
    (M, p) = dY · sB.

    sb (2·I, p) and scaled_s (M, p) as in `glu.backward_whole_into`, whose tile and accumulator these are. Needs
    `backward_fits`. Raises ValueError where the shapes do not fit.
    """
    gate, up, grad, act = inputs
    (m, n), rank, p = gate.shape, ds.shape[1], sb.shape[1]
    fits = grad.shape == (m, n) and a.shape == (rank, n) and factor.shape == (2 * n,) and 2 * rank <= p
    fits = fits and sb.shape[0] == 2 * n and scaled_s.shape == ds_out.shape == (m, p)
    check(fits, "grad, dS, A, factor, sB and S do not fit", grad=grad, ds=ds, a=a, factor=factor, sb=sb, s=scaled_s)
    # Every block of columns reads it; and oneDNN, on a CPU with AMX, reads past the end of a row of odd length.
    ds = ds.contiguous()
    if not _by_kernels(rank, gate, up, grad, ds, a, sb):
        grad.addmm_(ds, a)
        dy, h = torch.empty(m, 2 * n, dtype=grad.dtype, device=grad.device), glu.reference(gate, up, act)
        glu.backward_into(inputs, dy[:, :n], dy[:, n:])
        torch.mm(dy, sb, out=ds_out)
        of_members = [mm_in(dy[:, i * n :][:, :n].t(), scaled_s[:, i * rank :][:, :rank], h.dtype) for i in range(2)]
        return quantize_rows(dy, factor), mm_in(ds.t(), h.to(ds.dtype), h.dtype), torch.cat(of_members)
    bits = torch.zeros(m, dtype=torch.int32, device=grad.device)
    bm, bn, warps = SUM_TILE
    _backward_sum_kernel[(cdiv(m, bm), cdiv(n, bn))](
        grad, ds, a, gate, up, factor, bits, m, n, rank,
        grad.stride(0), ds.stride(0), a.stride(0), gate.stride(0), up.stride(0),
        ACT=ACTIVATIONS[act], BM=bm, BN=bn, R=rank_tile(rank), num_warps=warps,
    )  # fmt: skip
    in_fp8 = RowsInFp8(new_quantized(m, 2 * n, grad.device), bits, factor)
    da, db, tail = glu.whole_launch(inputs, grad, ds, sb, scaled_s, tile, accumulator, in_fp8)
    ds_out.copy_(tail)
    return in_fp8.out, da, db
