"""Adapters into their places in the operand buffers: out_a = A, out_b = scale · B, cast on the way, in one launch for
all that are given.

A: (r, K), B: (N, r), of any floating dtype; out_a: (r, K) and out_b: (N, r), strided views of the buffer. It runs for
every adapter on every forward (see `operand.py`), so at small batches its launches count: one a decoder layer
(`Loader`) instead of two an adapter.

In float16 the scale · B of a young adapter is subnormal (below 6e-5), and so would dS = dY · sB be, of which dA is
made. Backward therefore has a B of its own (`raised_b`), whose columns are multiplied by a power of two that dA takes
back; nothing but dA is that sensitive. Run: python -m pytest tests/lorakernels/test_adapter.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..runtime import capturing, cdiv, check, jit, kernel, next_power_of_2, table, tl, use_triton, working_dtype

BLOCK = 2048
MOST_PLANS = 64  # of a Loader: a module's adapters, by which jobs have rows
UNIT = 8  # elements that a program loads and stores at once
TL = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


# One adapter and its places: A (r, K), B (N, r), its factor, out_a (r, K), out_b (N, r). A plain tuple: one is made for
# each linear on each forward.
AdapterCopy = tuple[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor]


@kernel
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
    """(A (r, K), scale · B (N, r)) in float32."""
    return a.float(), b.float() * scale


def load_adapter(a: torch.Tensor, b: torch.Tensor, scale: float, out_a: torch.Tensor, out_b: torch.Tensor) -> None:
    """out_a (r, K) = a (r, K) and out_b (N, r) = scale · b (N, r); nothing else of the buffer they are views of is
    touched. Raises ValueError where a place differs in shape."""
    check(
        out_a.shape == a.shape and out_b.shape == b.shape, "A, B and their places differ", a=a, b=b, out=out_a, to=out_b
    )
    a, b = a.detach(), b.detach()
    contiguous = a.is_contiguous() and b.is_contiguous() and out_a.stride(-1) == 1 and out_b.stride(-1) == 1
    if not use_triton(a, b, out_a, out_b) or not contiguous:
        out_a.copy_(a)
        torch.mul(b.to(working_dtype(b)), scale, out=out_b)  # rounded once, as in the kernel
        return
    blocks = cdiv(a.numel(), BLOCK)
    _load_kernel[(blocks + cdiv(b.numel(), BLOCK),)](
        a, b, out_a, out_b, a.shape[1], b.shape[1], a.numel(), b.numel(), out_a.stride(0), out_b.stride(0), blocks,
        scale, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def in_units(numbers: Iterable[int], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all numbers, and the addresses of tensors of any shape, are multiples of UNIT elements."""
    return all(n % UNIT == 0 for n in numbers) and all(t.data_ptr() % (UNIT * t.element_size()) == 0 for t in tensors)


@jit
def matrix_at(address, near_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to a matrix whose address was read from a table. ALIGNED: found from another tensor's, near_ptr of
    the same dtype, because Triton forgets of an address that is made a pointer what it is a multiple of, and would
    load element by element, and wait each time."""
    if ALIGNED:
        width = near_ptr.dtype.element_ty.primitive_bitwidth // 8
        return near_ptr + tl.multiple_of((address - near_ptr.to(tl.int64)) // width, 8)
    return address.to(tl.pointer_type(TYPE))  # pyright: ignore[reportArgumentType]


@kernel
def _load_many_kernel(
    table_ptr, scale_ptr, item_ptr, near_from_ptr, near_to_ptr,
    IN: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i copies a block of one matrix. item: (matrix, block of it); table: (from, to, elements, columns, row
    stride of the target) a matrix, pointers as integers."""
    i = tl.program_id(0)
    matrix = tl.load(item_ptr + 2 * i)
    e = tl.load(item_ptr + 2 * i + 1) * BLOCK + tl.arange(0, BLOCK)
    entry = table_ptr + 5 * matrix
    source = matrix_at(tl.load(entry), near_from_ptr, IN, ALIGNED)
    target = matrix_at(tl.load(entry + 1), near_to_ptr, OUT, ALIGNED)
    n, columns, row = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    if ALIGNED:
        n, columns, row = tl.multiple_of(n, 8), tl.multiple_of(columns, 8), tl.multiple_of(row, 8)
    x = tl.load(source + e, mask=e < n, other=0.0).to(tl.float32) * tl.load(scale_ptr + matrix)
    tl.store(target + (e // columns) * row + e % columns, x.to(OUT), mask=e < n)


class Loader:
    """Loads the same adapters again and again: what a launch needs to know of them stays on the device. An adapter that
    is another tensor, in another place, or of another scale is another one; batches of one job after another come back
    to each."""

    def __init__(self) -> None:
        self._plans: dict[tuple, tuple] = {}  # (): adapters that are not alike
        self._captured: list[tuple] = []  # plans that a CUDA graph reads on every replay: they must outlive a change

    def load(self, items: Sequence[AdapterCopy]) -> None:
        """`load_adapter` for every item (their shapes: `AdapterCopy`), in one launch where they are alike. Raises
        ValueError where a place differs in shape."""
        known = tuple((a.data_ptr(), b.data_ptr(), a.shape, a.dtype, f, to.data_ptr()) for a, b, f, to, _ in items)
        captured = bool(items) and capturing(items[0][0])
        plan = self._plans.get(known)
        if plan is None:
            if captured:  # a table cannot be brought to the device inside a capture
                return _one_by_one(items)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[known] = _plan(items) or ()
        if not plan:
            return _one_by_one(items)
        if captured:
            self._captured.append(plan)
        matrices, scales, blocks, dtypes, aligned = plan
        in_dtype, out_dtype = (getattr(tl, TL[d]) for d in dtypes)
        _load_many_kernel[(blocks.shape[0],)](
            matrices, scales, blocks, items[0][0].detach(), items[0][3],
            IN=in_dtype, OUT=out_dtype, ALIGNED=aligned, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def _one_by_one(items: Sequence[AdapterCopy]) -> None:
    for item in items:
        load_adapter(*item)


def _plan(items: Sequence[AdapterCopy]) -> tuple | None:
    """(table, scales, blocks, dtypes) on the device, and whether all lies at multiples of UNIT elements; None where
    these adapters are not alike."""
    pairs = [(t.detach(), out, f) for a, b, scale, x, y in items for t, out, f in ((a, x, 1.0), (b, y, scale))]
    dtypes = {(t.dtype, out.dtype) for t, out, _ in pairs}
    alike = len(dtypes) == 1 and all(t.is_contiguous() and out.stride(-1) == 1 for t, out, _ in pairs)
    if not alike or not use_triton(*(t for t, _, _ in pairs), *(out for _, out, _ in pairs)):
        return None
    for a, b, _, out_a, out_b in items:
        fits = out_a.shape == a.shape and out_b.shape == b.shape
        check(fits, "A, B and their places differ", a=a, b=b, out=out_a, to=out_b)
    device = pairs[0][0].device
    rows = [(t.data_ptr(), out.data_ptr(), t.numel(), t.shape[1], out.stride(0)) for t, out, _ in pairs]
    aligned = in_units((n for row in rows for n in row[2:]), (t for pair in pairs for t in pair[:2]))
    blocks = [(i, j) for i, row in enumerate(rows) for j in range(cdiv(row[2], BLOCK))]
    return (
        table(rows, torch.int64, device),
        table([f for _, _, f in pairs], torch.float32, device),
        table(blocks, torch.int32, device),
        dtypes.pop(),
        aligned,
    )


# ---- s·B for a backward in float16 -----------------------------------------------------------------------------------
MAX_RAISED = 60  # the power of two at the most, far below what float32 holds; B = 0 would have none


class RaisedB(NamedTuple):
    """sb (N, p) = s·B · c of members one below the other, each in its own columns, zero elsewhere; c, a power of two
    for each column, gives it a norm of 1 to 2, so that dY · sb is as large as dY. It is 1 where the norm already is
    above 1. back (p,) = 1 / c in float32, zero for spare columns."""

    sb: torch.Tensor
    back: torch.Tensor


@kernel
def _raise_kernel(
    b0_ptr, b1_ptr, b2_ptr, out_ptr, back_ptr, n0, n1, n2, r0, r1, r2, s0, s1, s2, p, last,
    MOST: tl.constexpr, BN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """A member a program: the norms of its columns first, then its rows of the output."""
    i = tl.program_id(0)
    if i == 0:
        b_ptr, n, rank, scale, first, skip = b0_ptr, n0, r0, s0, n0 * 0, r0 * 0
    elif i == 1:
        b_ptr, n, rank, scale, first, skip = b1_ptr, n1, r1, s1, n0, r0
    else:
        b_ptr, n, rank, scale, first, skip = b2_ptr, n2, r2, s2, n0 + n1, r0 + r1
    col = tl.arange(0, P)
    own = (col >= skip) & (col < skip + rank)
    total = tl.zeros((P,), tl.float32)
    for start in range(0, n, BN):
        row = start + tl.arange(0, BN)
        mask = (row[:, None] < n) & own[None, :]
        b = tl.load(b_ptr + row[:, None] * rank + (col - skip)[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        total += tl.sum(b * b, axis=0)
    # The exponent of a float32 lies above its 23 bits of mantissa, with 127 added.
    exponent = (tl.sqrt(total).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -MOST), 0)
    raised = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    back = tl.where(own, ((127 + exponent) << 23).to(tl.float32, bitcast=True), 0.0)
    end = tl.where(i == last, p, skip + rank)  # the last member's program writes the spare columns, too
    tl.store(back_ptr + col, back, mask=(col >= skip) & (col < end))
    for start in range(0, n, BN):
        row = start + tl.arange(0, BN)
        mask = (row[:, None] < n) & own[None, :]
        b = tl.load(b_ptr + row[:, None] * rank + (col - skip)[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        to = out_ptr + (first + row)[:, None].to(tl.int64) * p + col[None, :]
        inside = (row[:, None] < n) & (col[None, :] < p)
        tl.store(to, (b * raised[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


def raised_b_reference(b: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale · B · c (N, r), 1 / c (r,)) in float32 of one member's B (N, r)."""
    b = b.float() * scale
    exponent = (torch.frexp(b.norm(dim=0)).exponent - 1).clamp(-MAX_RAISED, 0)
    one = torch.ones_like(b[0])
    return b * torch.ldexp(one, -exponent), torch.ldexp(one, exponent)


def raised_b(
    members: Sequence[tuple[torch.Tensor | None, int, float]], p: int, dtype: torch.dtype, device: torch.device
) -> RaisedB:
    """Of members (B (N, r) or None, N, scale), of p columns in all, in dtype."""
    sizes = [n for _, n, _ in members]
    ranks = [0 if b is None else b.shape[1] for b, _, _ in members]
    known = [b.detach() for b, _, _ in members if b is not None]
    alike = len({b.dtype for b in known}) == 1 and all(b.is_contiguous() for b in known)
    if len(members) <= 3 and alike and use_triton(*known):
        sb = torch.empty(sum(sizes), p, dtype=dtype, device=device)
        back = torch.empty(p, dtype=torch.float32, device=device)
        more = 3 - len(members)
        pointers = [known[0] if b is None else b.detach() for b, _, _ in members] + [known[0]] * more
        scales = [float(s) for *_, s in members] + [1.0] * more
        columns = next_power_of_2(p)
        _raise_kernel[(len(members),)](
            *pointers, sb, back, *sizes, *[0] * more, *ranks, *[0] * more, *scales, p, len(members) - 1,
            MOST=MAX_RAISED, BN=max(4, 16384 // columns), P=columns, num_warps=8,
        )  # fmt: skip
        return RaisedB(sb, back)
    sb = torch.zeros(sum(sizes), p, dtype=dtype, device=device)
    back = torch.zeros(p, dtype=torch.float32, device=device)
    row = column = 0
    for (b, n, scale), rank in zip(members, ranks, strict=True):
        if b is not None:
            of_member, taken_back = raised_b_reference(b.detach(), scale)
            sb[row : row + n, column : column + rank] = of_member.to(dtype)
            back[column : column + rank] = taken_back
        row, column = row + n, column + rank
    return RaisedB(sb, back)
