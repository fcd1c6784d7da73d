"""The gated activation behind `swiglu` and `geglu`: h = act(gate) * up, element by element.

gate, up: (M, I), any row stride, last dimension contiguous. h: (M, I), also into a wider buffer.
Forward reads 2 and writes 1 element, backward reads 3 and writes 2 (3 with h recomputed): nothing is saved but gate and
up. All arithmetic is in float32 and is rounded once, on the way out.

The down projection's LoRA wants h twice, and both times h is in registers anyway: `forward_lora_into` leaves S = h · Aᵀ
behind h in the same launch, `backward_a_into` makes dA = dSᵀ · h, so that backward neither writes h nor reads it.
`backward_whole_into` also makes what LoRA of gate and up wants of their gradients, dS = dY · sB and dB = dYᵀ · sS, so
that dY is not read again for them (`lora_grad.py` has these two alone). Rows of several adapters make their own one's
columns (own_columns.py).
Run: python -m pytest tests/lorakernels/test_swiglu.py tests/lorakernels/test_geglu.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..runtime import (
    INTERPRET,
    cdiv,
    check,
    fuses,
    jit,
    kernel,
    next_power_of_2,
    rank_tile,
    stages_of,
    tensor_cores,
    tile_of,
    tl,
    use_triton,
    working_dtype,
)
from .concat_operand import LoraColumns, s_into, store_s
from .fast_math import exp, sigmoid, tanh
from .grad_accumulator import GradAccumulator, gradient_zeros
from .job_rows import rows_of
from .own_columns import CLEARED, Own, check_own, place_of, store_own
from .quantize_rows import Quantized, quantized_tile, row_scale

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
# Backward with dA of the down projection: (rows, columns, warps, stages, steps). A low tile: three inputs, two outputs
# and h share the registers, and with 16 rows all of them stay there.
A_TILES = {"with_a": (16, 128, 4, 3, 8)}
MAX_A_RANK = 64
# The same with dS and dB of gate and up. 64 rows let dY · sB run in shapes that the tensor cores have, and three stages
# hide the barriers in between: of 24 tiles these alone beat two launches, the short one where columns are few
# (docs/lab-notes.md).
WHOLE_TILES = {"whole": (64, 64, 4, 3, 16), "whole_short": (64, 64, 4, 3, 4)}


class GluBackward(NamedTuple):
    """What every backward reads: gate, up and grad (the gradient of h), (M, I) each; act: a key of ACTIVATIONS."""

    gate: torch.Tensor
    up: torch.Tensor
    grad: torch.Tensor
    act: str

    def of(self, grad: torch.Tensor) -> GluBackward:
        """The same for another grad (M, I): a trial's copy, mostly this one's own."""
        return self if grad is self.grad else self._replace(grad=grad)


def activation(gate: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) of a gate of any shape, in its dtype; act: a key of ACTIVATIONS."""
    if act == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")


def activation_slope(gate: torch.Tensor, act: str) -> torch.Tensor:
    """d act / d gate of a gate of any shape, in its dtype."""
    if act == "silu":
        s = torch.sigmoid(gate)
        return s * (1 + gate * (1 - s))
    if act == "gelu":
        density = torch.exp(-0.5 * gate * gate) * 0.3989422804014327
        return 0.5 * (1 + torch.erf(gate * 0.7071067811865476)) + gate * density
    t = torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3))
    return 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * gate * gate)


def reference(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up in float32 (float64 for float64), of gate and up of one shape."""
    dtype = working_dtype(gate)
    return activation(gate.to(dtype), act) * up.to(dtype)


@jit
def act_and_slope(g, ACT: tl.constexpr):
    """(act(g), act'(g)) of a float32 tile."""
    if ACT == 0:
        s = sigmoid(g)
        a = g * s
        d = s + a * (1.0 - s)
    elif ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        a = g * cdf
        d = cdf + g * 0.3989422804014327 * exp(-0.5 * g * g)
    else:
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        t = tanh(z)
        a = 0.5 * g * (1.0 + t)
        d = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    return a, d


@kernel
def _glu_forward_kernel(g_ptr, u_ptr, h_ptr, n, g_row, u_row, h_row, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n
    g = tl.load(g_ptr + row * g_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + col, mask=inside, other=0.0).to(tl.float32)
    a, _ = act_and_slope(g, ACT)
    tl.store(h_ptr + row * h_row + col, (a * u).to(h_ptr.dtype.element_ty), mask=inside)


@kernel
def _glu_forward_lora_kernel(
    g_ptr, u_ptr, h_ptr, a_ptr, scaled_ptr, scale_ptr, program_ptr, job_ptr, m, n, g_row, u_row, h_row, a_row, rank, p,
    ACT: tl.constexpr, STORE_SCALED_S: tl.constexpr, OWN: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """A block of rows walks over all columns; S = h Aᵀ grows in registers and lands in the columns n … n + p; OWN: of
    one job's rows in that job's, zeros in the others."""
    first, end, job = rows_of(program_ptr, tl.program_id(0), m, BM, OWN)
    row = (first + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    skip = 0
    if OWN:
        skip, rank, _inner = place_of(job_ptr, job, ALIGNED)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < end) & (col[None, :] < n)
        g = tl.load(g_ptr + row[:, None] * g_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + row[:, None] * u_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        a, _ = act_and_slope(g, ACT)
        h = (a * u).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * h_row + col[None, :], h, mask=inside)
        spot = a_ptr + (skip + r)[None, :] * a_row + col[:, None]
        w = tl.load(spot, mask=(col[:, None] < n) & (r[None, :] < rank), other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    s_rows = h_ptr + row[:, None] * h_row + n
    if OWN:
        known = (r // 8 * 8 if ALIGNED else r) < rank
        store_own(
            s_rows, scaled_ptr + row[:, None] * p, scale_ptr, acc, row[:, None] < end, skip + r, known,
            job_ptr, job, 0, 0, 0, p, STORE_SCALED_S, 1, ALIGNED, BM, CLEARED,
        )  # fmt: skip
    else:
        store_s(s_rows, scaled_ptr, scale_ptr, acc, row, m, p, STORE_SCALED_S, BM, R)


@kernel
def _glu_backward_kernel(
    g_ptr, u_ptr, dh_ptr, dg_ptr, du_ptr, h_ptr, n, g_row, u_row, dh_row, dg_row, du_row, h_row,
    ACT: tl.constexpr, WITH_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n
    g = tl.load(g_ptr + row * g_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + col, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * dh_row + col, mask=inside, other=0.0).to(tl.float32)
    a, d = act_and_slope(g, ACT)
    tl.store(dg_ptr + row * dg_row + col, (dh * u * d).to(dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + row * du_row + col, (dh * a).to(du_ptr.dtype.element_ty), mask=inside)
    if WITH_H:
        tl.store(h_ptr + row * h_row + col, (a * u).to(h_ptr.dtype.element_ty), mask=inside)


@kernel
def _glu_backward_a_kernel(
    g_ptr, u_ptr, dh_ptr, dg_ptr, du_ptr, ds_ptr, da_ptr, s_ptr, sb_ptr, tail_ptr, db_ptr,
    bits_ptr, f_ptr, scale_ptr, program_ptr, job_ptr, of_down_ptr, m, n, rank, jobs,
    g_row, u_row, dh_row, dg_row, du_row, ds_row, s_row, sb_row, tail_row, db_row,
    ACT: tl.constexpr, WHOLE: tl.constexpr, QUANTIZE: tl.constexpr, ROUND: tl.constexpr,
    OWN: tl.constexpr, ALIGNED: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows times BN columns; dA of these columns grows in registers. WHOLE: dB of gate and of up too, and
    their dS (tail) by atomic adds; s: their sS side by side; sb: (2 · n, p), block-diagonal. QUANTIZE: dg and du times
    f (2 · n,) go out in e4m3, of the rows' `largest_bits`. OWN: rows of one job, whose columns of gate and up the table
    at job_ptr tells, and of down the one at of_down_ptr."""
    first, end, job = rows_of(program_ptr, tl.program_id(1), m, STEPS * BM, OWN)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    steps, at, at_g, at_u, in_g, in_u, rank_g, rank_u = STEPS, 0, 0, rank, 0, 0, rank, rank
    if OWN:
        steps = tl.minimum(STEPS, tl.cdiv(end - first, BM))
        at, rank, _inner = place_of(of_down_ptr, job, ALIGNED)
        at_g, rank_g, in_g = place_of(job_ptr, job, ALIGNED)
        at_u, rank_u, in_u = place_of(job_ptr, jobs + job, ALIGNED)
    acc = tl.zeros((R, BN), tl.float32)
    if WHOLE:
        acc_g, acc_u = tl.zeros((R, BN), tl.float32), tl.zeros((R, BN), tl.float32)
        of_gate = sb_ptr + col[:, None].to(tl.int64) * sb_row + at_g + r[None, :]
        sb_g = tl.load(of_gate, mask=(col[:, None] < n) & (r[None, :] < rank_g), other=0.0)
        of_up = sb_ptr + (n + col[:, None]).to(tl.int64) * sb_row + at_u + r[None, :]
        sb_u = tl.load(of_up, mask=(col[:, None] < n) & (r[None, :] < rank_u), other=0.0)
    for i in range(steps):
        row = (first + i * BM + tl.arange(0, BM)).to(tl.int64)
        inside = (row[:, None] < end) & (col[None, :] < n)
        g = tl.load(g_ptr + row[:, None] * g_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + row[:, None] * u_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + row[:, None] * dh_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        narrow = (row[:, None] < end) & (r[None, :] < rank)
        ds = tl.load(ds_ptr + row[:, None] * ds_row + at + r[None, :], mask=narrow, other=0.0)
        a, d = act_and_slope(g, ACT)
        if QUANTIZE:
            dg, du = (dh * u * d).to(ds_ptr.dtype.element_ty), (dh * a).to(ds_ptr.dtype.element_ty)
            f_g = tl.load(f_ptr + col, mask=col < n, other=0.0)[None, :]
            f_u = tl.load(f_ptr + n + col, mask=col < n, other=0.0)[None, :]
            bits = tl.load(bits_ptr + row, mask=row < end, other=0)
            finite, scale, inverse = row_scale(bits)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr + row, scale, mask=row < end)
            out_g = quantized_tile(dg.to(tl.float32) * f_g, finite, inverse, dg_ptr, ROUND)
            out_u = quantized_tile(du.to(tl.float32) * f_u, finite, inverse, du_ptr, ROUND)
        else:
            dg, du = (dh * u * d).to(dg_ptr.dtype.element_ty), (dh * a).to(du_ptr.dtype.element_ty)
            out_g, out_u = dg, du
        tl.store(dg_ptr + row[:, None] * dg_row + col[None, :], out_g, mask=inside)
        tl.store(du_ptr + row[:, None] * du_row + col[None, :], out_u, mask=inside)
        acc = tl.dot(tl.trans(ds), (a * u).to(ds_ptr.dtype.element_ty), acc, input_precision="ieee")
        if WHOLE:
            of_g = (row[:, None] < end) & (r[None, :] < rank_g)
            of_u = (row[:, None] < end) & (r[None, :] < rank_u)
            s_g = tl.load(s_ptr + row[:, None] * s_row + at_g + r[None, :], mask=of_g, other=0.0)
            s_u = tl.load(s_ptr + row[:, None] * s_row + at_u + r[None, :], mask=of_u, other=0.0)
            acc_g = tl.dot(tl.trans(s_g), dg, acc_g, input_precision="ieee")
            acc_u = tl.dot(tl.trans(s_u), du, acc_u, input_precision="ieee")
            tail = tail_ptr + row[:, None] * tail_row + r[None, :]
            tl.atomic_add(tail + at_g, tl.dot(dg, sb_g, input_precision="ieee"), mask=of_g, sem="relaxed")
            tl.atomic_add(tail + at_u, tl.dot(du, sb_u, input_precision="ieee"), mask=of_u, sem="relaxed")
    spot = da_ptr + (at + r)[:, None].to(tl.int64) * n + col[None, :]
    tl.atomic_add(spot, acc, mask=(r[:, None] < rank) & (col[None, :] < n), sem="relaxed")
    if WHOLE:
        spot = db_ptr + col[None, :].to(tl.int64) * db_row + in_g + r[:, None]
        tl.atomic_add(spot, acc_g, mask=(r[:, None] < rank_g) & (col[None, :] < n), sem="relaxed")
        spot = db_ptr + (n + col[None, :]).to(tl.int64) * db_row + in_u + r[:, None]
        tl.atomic_add(spot, acc_u, mask=(r[:, None] < rank_u) & (col[None, :] < n), sem="relaxed")


def forward_into(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, act: str) -> None:
    """out = act(gate) * up, (M, I) each; out may be a slice of a wider buffer."""
    if not use_triton(gate, up, out):
        out.copy_(reference(gate, up, act))
        return
    m, n = gate.shape
    block = min(1024, next_power_of_2(n))
    _glu_forward_kernel[(m, cdiv(n, block))](
        gate, up, out, n, gate.stride(0), up.stride(0), out.stride(0), ACT=ACTIVATIONS[act], BLOCK=block, num_warps=4
    )


def forward_lora_into(
    gate: torch.Tensor, up: torch.Tensor, buffer: torch.Tensor, columns: LoraColumns, act: str, tile: str = "fused",
    own: Own | None = None,
) -> None:  # fmt: skip
    """buffer (M, I + p) = [h | h · aᵀ] in one launch, of gate, up (M, I) and columns.a (p, I). own: where these are
    the columns of several jobs, of which a row makes its own and zeros in the others; only where the kernel runs.

    tile is a key of TILES; above MAX_FUSED_RANK it takes library calls. Raises ValueError where buffer does not fit.
    """
    m, n = gate.shape
    lora_a, rank = columns.a, columns.rows if own is None else own.columns.rank
    p = lora_a.shape[0]
    check(
        buffer.shape == (m, n + p), "buffer needs a spare column for each row of lora_a", buffer=buffer, lora_a=lora_a
    )
    if not fuses(rank, (gate, up), (buffer, lora_a)):
        forward_into(gate, up, buffer[:, :n], act)
        s_into(buffer[:, :n], columns, buffer[:, n:], None)
        return
    bm, bn, warps, stages = tile_of(tile, gate)
    programs, tables = cdiv(m, bm), (lora_a, lora_a)
    if own is not None:
        check_own(own, gate, buffer[:, n:])
        tables = own.rows.programs(bm), own.columns.of_jobs
        programs = len(tables[0])
        m = 0  # read by nobody, and another number of rows may be another kernel
    _glu_forward_lora_kernel[(programs,)](
        gate, up, buffer, lora_a, *columns.scaled_s_pointers(buffer), *tables, m, n,
        gate.stride(0), up.stride(0), buffer.stride(0), lora_a.stride(0), rank, p,
        ACT=ACTIVATIONS[act], STORE_SCALED_S=columns.scaled_s is not None,
        OWN=own is not None, ALIGNED=own is not None and own.columns.aligned,
        BM=bm, BN=bn, R=rank_tile(rank), CLEARED=CLEARED, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def backward_into(inputs: GluBackward, d_gate: torch.Tensor, d_up: torch.Tensor, h_into_grad: bool = False) -> None:
    """Writes d_gate and d_up (M, I), also over gate and up themselves; with h_into_grad the recomputed h = act(gate) *
    up replaces grad (it is overwritten)."""
    gate, up, grad, act = inputs
    if not use_triton(gate, up, grad, d_gate):
        g, u, dh = (t.to(working_dtype(gate)) for t in (gate, up, grad))
        a = activation(g, act)
        new = (
            dh * u * activation_slope(g, act),
            dh * a,
            a * u,
        )  # all before any is written: they may lie over the inputs
        d_gate.copy_(new[0])
        d_up.copy_(new[1])
        if h_into_grad:
            grad.copy_(new[2])
        return
    m, n = gate.shape
    block = min(1024, next_power_of_2(n))
    _glu_backward_kernel[(m, cdiv(n, block))](
        gate, up, grad, d_gate, d_up, grad, n,
        gate.stride(0), up.stride(0), grad.stride(0), d_gate.stride(0), d_up.stride(0), grad.stride(0),
        ACT=ACTIVATIONS[act], WITH_H=h_into_grad, BLOCK=block, num_warps=4,
    )  # fmt: skip


def backward_a_into(
    inputs: GluBackward, d_gate: torch.Tensor, d_up: torch.Tensor, ds: torch.Tensor, tile: str = "with_a",
    accumulator: GradAccumulator | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes d_gate and d_up (M, I), also over gate and up themselves; returns dA = dsᵀ · h (rank, I) in float32.

    ds: (M, rank), in the dtype that h is rounded to; rank <= MAX_A_RANK, above it library calls; tile is a key of
    A_TILES; accumulator: where dA grows. Raises ValueError where the shapes do not fit.
    """
    gate, up, grad, act = inputs
    m, n = gate.shape
    rank = ds.shape[1]
    check(ds.shape[0] == m and grad.shape == gate.shape, "ds, grad and gate do not fit", ds=ds, grad=grad, gate=gate)
    if not use_triton(gate, up, grad, d_gate) or not tensor_cores(ds) or rank > MAX_A_RANK:
        h, wide = reference(gate, up, act).to(ds.dtype), working_dtype(ds)
        backward_into(inputs, d_gate, d_up)
        return ds.t().to(wide) @ h.to(wide)
    bm, bn, warps, stages, steps = A_TILES[tile]
    da = gradient_zeros(accumulator, rank, n, gate.device)
    _glu_backward_a_kernel[(cdiv(n, bn), cdiv(m, bm * steps))](
        gate, up, grad, d_gate, d_up, ds, da, ds, ds, da, da, da, da, da, da, da, da, m, n, rank, 1,
        gate.stride(0), up.stride(0), grad.stride(0), d_gate.stride(0), d_up.stride(0), ds.stride(0), 0, 0, 0, 0,
        ACT=ACTIVATIONS[act], WHOLE=False, QUANTIZE=False, ROUND=False, OWN=False, ALIGNED=False,
        STEPS=steps, BM=bm, BN=bn, R=rank_tile(rank),
        num_warps=warps, num_stages=stages_of(gate, stages),
    )  # fmt: skip
    return da


def whole_fits(ds: torch.Tensor, ranks: list[int], widths: list[int]) -> bool:
    """Whether `backward_whole_into` takes members of these ranks and widths beside a down projection's ds (M, rank)."""
    return (
        len(ranks) == 2
        and ranks[0] == ranks[1] == ds.shape[1] <= MAX_A_RANK
        and widths[0] == widths[1]
        and tensor_cores(ds)
    )


class OwnOfMLP(NamedTuple):
    """Whose columns are whose, of gate and up and of the down projection, with the same rows."""

    gate_up: Own
    down: Own


def own_whole_fits(own: OwnOfMLP, ds: torch.Tensor, ranks: list[int], widths: list[int]) -> bool:
    """`whole_fits` of rows of several adapters, each of which has columns of its own."""
    widest = max(own.gate_up.columns.rank, own.down.columns.rank)
    alike = len(ranks) == 2 and ranks[0] == ranks[1] and widths[0] == widths[1]
    return alike and 0 < widest <= MAX_A_RANK and tensor_cores(ds)


def backward_whole_into(
    inputs: GluBackward, wide: torch.Tensor, ds: torch.Tensor, sb: torch.Tensor, scaled_s: torch.Tensor,
    tile: str = "whole", accumulator: GradAccumulator | None = None, own: OwnOfMLP | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """wide (M, 2·I + p) = [d gate ∣ d up ∣ dS], also over gate and up where they are its views; returns dA = dsᵀ · h
    (rank, I) and dB (2·I, rank) in float32.

    ds: (M, rank) of the down projection; sb (2·I, p) and scaled_s (M, p) as in `lora_grad.ds_and_db`, for two members
    of the same rank and width. Needs `whole_fits`, or `own_whole_fits` of own: where these are the columns of several
    jobs, as many of gate and of up, of which a row makes its own; dB has those of a member side by side. tile is a key
    of WHOLE_TILES; accumulator: where dA, dB and dS grow. Raises ValueError where the shapes do not fit.
    """
    gate = inputs.gate
    m, n = gate.shape
    rank, p = ds.shape[1], sb.shape[1]
    fits = wide.shape == (m, 2 * n + p) and sb.shape[0] == 2 * n and scaled_s.shape == (m, p)
    fits = fits and (own is not None or 2 * rank <= p)
    check(fits, "gate, the gradient, sB and S do not fit", gate=gate, wide=wide, sb=sb, s=scaled_s)
    if own is not None:
        check_own(own.gate_up, gate, scaled_s)
    da, db, tail = whole_launch(inputs, wide, ds, sb, scaled_s, tile, accumulator, own=own)
    wide[:, 2 * n :].copy_(tail)
    return da, db


class RowsInFp8(NamedTuple):
    """Where `whole_launch` leaves dY · factor (M, 2·I) in e4m3, of the `largest_bits` (M,) of its rows; factor:
    (2·I,)."""

    out: Quantized
    bits: torch.Tensor
    factor: torch.Tensor


def whole_launch(
    inputs: GluBackward, wide: torch.Tensor, ds: torch.Tensor, sb: torch.Tensor, scaled_s: torch.Tensor, tile: str,
    accumulator: GradAccumulator | None, in_fp8: RowsInFp8 | None = None, own: OwnOfMLP | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dA (rank, I), dB (2·I, rank), dS (M, p)) in float32; [d gate ∣ d up] to the first columns of wide (M, ≥ 2·I),
    which in_fp8 stands in for where it is given. Otherwise as in `backward_whole_into`."""
    gate, up, grad, act = inputs
    (m, n), rank, p = gate.shape, ds.shape[1], sb.shape[1]
    of_gate = None if own is None else own.gate_up.columns.linears[0].columns
    of_b = rank if of_gate is None else of_gate.stop - of_gate.start
    into = GradAccumulator(gate.device, (rank + 2 * of_b) * n, m * p) if accumulator is None else accumulator
    ds = ds.contiguous()  # every block of columns reads it, and behind dY its rows would lie far apart
    da, db, tail = into.gradient(rank, n), into.gradient(2 * n, of_b), into.scratch(m, p)
    bm, bn, warps, stages, steps = WHOLE_TILES[tile]
    bits = factor = scale = da  # read by nobody
    if in_fp8 is not None:
        (wide, scale), bits, factor = in_fp8
        warps *= 2  # a thread has no registers left for the scales beside half of a tile
    d_gate, d_up = wide[:, :n], wide[:, n : 2 * n]
    tables, programs, widest, jobs, aligned = (da, da, da), cdiv(m, bm * steps), rank, 1, False
    if own is not None:
        gate_up, of_down = own.gate_up.columns, own.down.columns
        tables = own.down.rows.programs(bm * steps), gate_up.of_jobs, of_down.of_jobs
        programs, widest, jobs = len(tables[0]), max(gate_up.rank, of_down.rank), gate_up.jobs
        aligned = gate_up.aligned and of_down.aligned
        m = rank = 0  # as in `forward_lora_into`
    _glu_backward_a_kernel[(cdiv(n, bn), programs)](
        gate, up, grad, d_gate, d_up, ds, da, scaled_s, sb, tail, db, bits, factor, scale, *tables, m, n, rank, jobs,
        gate.stride(0), up.stride(0), grad.stride(0), wide.stride(0), wide.stride(0), ds.stride(0),
        scaled_s.stride(0), sb.stride(0), tail.stride(0), db.stride(0),
        ACT=ACTIVATIONS[act], WHOLE=True, QUANTIZE=in_fp8 is not None, ROUND=INTERPRET,
        OWN=own is not None, ALIGNED=aligned,
        STEPS=steps, BM=bm, BN=bn, R=rank_tile(widest), num_warps=warps, num_stages=stages_of(gate, stages),
    )  # fmt: skip
    return da, db, tail


class GatedActivation(torch.autograd.Function):
    """`gated` as one node, which saves gate and up alone, (…, I) each."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if out.numel():
            forward_into(_flat(gate), _flat(up), out.view(-1, out.shape[-1]), act)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = (torch.empty(gate.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        if gate.numel():
            n = gate.shape[-1]
            inputs = GluBackward(_flat(gate), _flat(up), _flat(grad), ctx.act)
            backward_into(inputs, d_gate.view(-1, n), d_up.view(-1, n))
        return d_gate, d_up, None


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up, (…, I) each, with its gradients; act: a key of ACTIVATIONS. Raises ValueError where gate and up
    differ in shape or dtype."""
    check(gate.shape == up.shape and gate.dim() >= 1, "gate and up differ", gate=gate, up=up)
    check(gate.dtype == up.dtype, "gate and up differ in dtype", gate=gate, up=up)
    return GatedActivation.apply(gate, up, act)
