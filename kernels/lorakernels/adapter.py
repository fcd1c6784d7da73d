"""Adapters into their places in the operand buffers: out_a = A, out_b = scale · B, cast on the way, in one launch for
all that are given.

A: (r, K), B: (N, r), of any floating dtype; out_a: (r, K) and out_b: (N, r), strided views of the buffer. It runs for
every adapter on every forward (see `operand.py`), so at small batches its launches count: one a decoder layer
(`Loader`) instead of two an adapter. Run: python -m pytest tests/lorakernels/test_adapter.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .runtime import capturing, cdiv, check, kernel, tl, use_triton, working_dtype

BLOCK = 2048
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


@kernel
def _load_many_kernel(table_ptr, scale_ptr, item_ptr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """Program i copies a block of one matrix. item: (matrix, block of it); table: (from, to, elements, columns, row
    stride of the target) a matrix, pointers as integers."""
    i = tl.program_id(0)
    matrix = tl.load(item_ptr + 2 * i)
    e = tl.load(item_ptr + 2 * i + 1) * BLOCK + tl.arange(0, BLOCK)
    entry = table_ptr + 5 * matrix
    source = tl.load(entry).to(tl.pointer_type(IN))  # pyright: ignore[reportArgumentType]  # Triton unwraps it
    target = tl.load(entry + 1).to(tl.pointer_type(OUT))  # pyright: ignore[reportArgumentType]  # Triton unwraps it
    n, columns, row = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    x = tl.load(source + e, mask=e < n, other=0.0).to(tl.float32) * tl.load(scale_ptr + matrix)
    tl.store(target + (e // columns) * row + e % columns, x.to(OUT), mask=e < n)


class Loader:
    """Loads the same adapters again and again: what a launch needs to know of them stays on the device until one of
    them is another tensor, in another place, or of another scale."""

    def __init__(self) -> None:
        self._known: tuple = ()
        self._plan: tuple | None = None
        self._captured: list[tuple] = []  # plans that a CUDA graph reads on every replay: they must outlive a change

    def load(self, items: Sequence[AdapterCopy]) -> None:
        """`load_adapter` for every item (their shapes: `AdapterCopy`), in one launch where they are alike. Raises
        ValueError where a place differs in shape."""
        known = tuple((a.data_ptr(), b.data_ptr(), a.shape, a.dtype, f, to.data_ptr()) for a, b, f, to, _ in items)
        captured = bool(items) and capturing(items[0][0])
        if known != self._known:
            if captured:  # a table cannot be brought to the device inside a capture
                return _one_by_one(items)
            self._plan, self._known = _plan(items), known
        if self._plan is None:
            return _one_by_one(items)
        if captured:
            self._captured.append(self._plan)
        table, scales, blocks, dtypes = self._plan
        in_dtype, out_dtype = (getattr(tl, TL[d]) for d in dtypes)
        _load_many_kernel[(blocks.shape[0],)](
            table, scales, blocks, IN=in_dtype, OUT=out_dtype, BLOCK=BLOCK, num_warps=4
        )


def _one_by_one(items: Sequence[AdapterCopy]) -> None:
    for item in items:
        load_adapter(*item)


def _plan(items: Sequence[AdapterCopy]) -> tuple | None:
    """(table, scales, blocks, dtypes) on the device, or None where these adapters are not alike."""
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
    blocks = [(i, j) for i, row in enumerate(rows) for j in range(cdiv(row[2], BLOCK))]
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor([f for _, _, f in pairs], dtype=torch.float32, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
        dtypes.pop(),
    )
