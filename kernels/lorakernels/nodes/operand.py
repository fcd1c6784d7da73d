"""The operand of a projection, one buffer that holds frozen weights and adapters side by side, and who lies in it.

    [W | sB]      (N + p) × (K + p)      W: (N, K), sB: (N, p), A: (p, K)
    [A |  – ]

Rows of several adapters: each adapter is a member of its own over its linear's weight (`Member.shares`), with its rows
of A and its columns of B beside those of the others; S and dS are then zero in another job's columns (job_columns.py).

[W | sB] is the operand of forward, [W ; A] that of backward: both are strided views, so the frozen weight is stored
once, and the module's own parameter becomes a view into the buffer (`adopt`, undone by `release`). Several members (q,
k, v; gate, up) stack their rows in W and their A's in A, and B becomes block-diagonal. p is the sum of the ranks
rounded up, because GEMMs like a multiple of 64: those of an 8B take 338 ms with 64 columns a linear, 342 with 16.
A buffer that somebody else holds, because FSDP2 shards it, comes and goes with each gather (`Holder`).
sB and A are written anew on every forward: optimizers that update through raw pointers change no version counter, and a
CUDA graph has to contain the refresh.
Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ..ops.adapter import AdapterCopy, Loader, load_adapter
from ..ops.nf4 import dequantize_into
from ..runtime import capturing, compute_dtype, round_up
from .fp8 import FrozenFp8, why_not
from .member import Member, SavedAdapters

WIDE = 2048  # columns of the input from which on the spare ones are a multiple of 64, however few the adapters need


@dataclass(slots=True)
class Operand:
    """w (N, K); sb (N, p); a (p, K).

    full: the buffer (N + p, K + p) that they are views of, None where they are not (gathered weights); places:
    where each member's A (r, K) and scaled B (N, r) lie in a and sb.
    """

    w: torch.Tensor
    sb: torch.Tensor
    a: torch.Tensor
    full: torch.Tensor | None
    places: list[tuple[torch.Tensor, torch.Tensor]]


class Holder(Protocol):
    """Who holds a buffer in which the members' weights lie already: a parameter of the model that FSDP2 shards.

    shape: of the buffer. Each gather may bring it to another address, or to the same one; either way its spare columns
    are then those of the parts that are stored, without adapters.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def buffer(self) -> torch.Tensor:
        """The buffer (N + p, K + p), while it is gathered: one object for as long as its storage is one."""
        ...


class OperandBuffer:
    """Members that share an input of K columns, and the buffer that their weights and adapters lie in.

    fp8: the products with the weights in FP8; holder: of the buffer, where it is not our own, and has room for today's
    ranks. Raises ValueError where the members' inputs differ in width.
    """

    def __init__(self, members: list[Member], fp8: bool = False, holder: Holder | None = None):
        self.members = members
        self.k = members[0].shape[1]
        wrong = [m.name for m in members if m.shape[1] != self.k]
        if wrong:
            raise ValueError(f"{wrong} do not share an input of {self.k} columns: {[m.shape for m in members]}")
        self.linears = [m for m in members if not m.shares]  # the members without the further slots
        linear = [count - 1 for count in itertools.accumulate(not m.shares for m in members)]
        ranks = [m.rank for m in members]
        self.widths = [m.shape[0] for m in self.linears]
        self.slot_ranks = [[r for r, i in zip(ranks, linear, strict=True) if i == j] for j in range(len(self.linears))]
        self.ranks = [sum(own) for own in self.slot_ranks]
        self.n, self.rank = sum(self.widths), sum(ranks)
        self.p = round_up(self.rank, 64 if self.k >= WIDE else 16)
        self.linear_columns = _slices(self.ranks)  # each linear's columns of S and rows of A
        self.linear_rows = _slices(self.widths)  # each linear's rows of W and B
        self.linear_of = linear  # of each member the number of its linear
        self.slot_of = [linear[:i].count(j) for i, j in enumerate(linear)]  # and which of the linear's slots it is
        self.rows = [self.linear_rows[i] for i in linear]  # each member's
        self.columns = _slices(ranks)
        self.quantized = any(m.quantized is not None for m in members)
        self.not_fp8 = why_not(self.linears) if fp8 else None  # the reason, where FP8 was asked for
        self.fp8 = FrozenFp8() if fp8 and self.not_fp8 is None else None
        fits = holder is not None and not fp8 and tuple(holder.shape) == (self.n + self.p, self.k + self.p)
        self.holder = holder if fits else None
        self.apart = self.holder is None and any(m.gathered for m in members)  # the weights stay with the modules
        self.buffer: torch.Tensor | None = None
        self._loaded: tuple = ()
        self._empty: set[int] = set()  # members whose slots in our own buffer have been emptied
        self._operand: Operand | None = None  # of our own buffer
        self._fresh = False  # `places` has just been asked for, and its adapters are what the next `operand` would load
        self._released = False  # a backward may still come, which must not take the weights again

    # ---- whose weights lie in the buffer ----------------------------------------------------------------------------
    def owns_weights(self) -> bool:
        """True if the modules' weights still are the views that `adopt` made (a merge may have replaced them)."""
        if self.holder is not None:
            self.buffer = self.holder.buffer()
            return True
        buffer = self.buffer
        if buffer is None:
            return False
        start, step = buffer.data_ptr(), buffer.stride(0) * buffer.element_size()
        return all(
            m.weight.dtype == buffer.dtype
            and m.weight.device == buffer.device
            and m.weight.data_ptr() == start + rows.start * step
            for m, rows in zip(self.linears, self.linear_rows, strict=True)
        )

    def adopt(self) -> None:
        """Moves the frozen weights into the buffer, one by one, so that they are stored once."""
        if self.quantized or self.apart or self.holder is not None:
            return
        first = self.members[0].weight
        with torch.inference_mode(False), torch.no_grad():  # what is born in inference mode cannot be trained with
            buffer = torch.zeros(self.n + self.p, self.k + self.p, dtype=first.dtype, device=first.device)
            for m, at in zip(self.linears, self.linear_rows, strict=True):
                buffer[at, : self.k].copy_(m.weight.data)
                m.weight.data = buffer[at, : self.k]
        self.buffer = buffer
        self._empty.clear()

    def hand_over(self) -> torch.Tensor:
        """The buffer that `adopt` has made, whose views the weights remain; from here on it is not ours."""
        assert self.buffer is not None
        buffer, self.buffer, self._operand = self.buffer, None, None
        return buffer

    def release(self) -> None:
        """Gives each module a contiguous weight of its own again, but where the buffer is not ours to leave."""
        if self.holder is not None:
            return
        if self.owns_weights():
            with torch.inference_mode(False), torch.no_grad():
                for m in self.linears:
                    m.weight.data = m.weight.data.clone(memory_format=torch.contiguous_format)
        self.buffer = self._operand = None
        self._released = True
        self._loaded = ()

    # ---- the operand of a forward, and of its backward --------------------------------------------------------------
    def operand(self, dtype: torch.dtype) -> Operand:
        """The operand in dtype, with today's A and B in it."""
        if self._fresh and self.members[0].weight.dtype == dtype:
            self._fresh = False
            return self._own()
        if self.apart and len(self.linears) == 1 and self.members[0].weight.dtype == dtype:
            return self._adapters_apart(self.members[0].weight.detach(), dtype)
        if not self.quantized and not self.apart and self.members[0].weight.dtype == dtype and not self._released:
            if not self.owns_weights():
                self.adopt()
            op = self._own()
            if self._loaded != self._identity() or capturing(op.a):
                self._clear_absent(op)
            self._load(op)
            self._loaded = self._identity()
            return op
        return self._scratch(dtype)

    def operand_again(self, dtype: torch.dtype) -> Operand:
        """For backward: what forward used. Loaded once more only if another adapter has been there since, or where
        FSDP2 may have gathered the buffer again, which no address would tell."""
        loaded = self.buffer is not None and self.holder is None and self._loaded == self._identity()
        if loaded and self.members[0].weight.dtype == dtype:
            return self._own()
        return self.operand(dtype)

    def places(self, dtype: torch.dtype) -> list[AdapterCopy] | None:
        """The adapters and their places in the buffer, where today's weights lie there in dtype; else None. Places of a
        holder's buffer have other addresses at each gather: to bring a table of them to the device would take longer
        than the launches that it saves."""
        if self.quantized or self.apart or self.holder is not None:
            return None
        if self.members[0].weight.dtype != dtype or not self.owns_weights():
            return None
        op = self._own()
        if self._loaded != self._identity() or capturing(op.a):
            self._clear_absent(op)
        self._fresh, self._loaded = True, self._identity()
        return self._copies(op)

    def forget_places(self) -> None:
        """The next `operand` loads the adapters itself."""
        self._fresh = False

    def _copies(self, op: Operand) -> list[AdapterCopy]:
        """Every adapter with its place in the operand."""
        placed = zip(self.members, op.places, strict=True)
        return [(*lying, m.scale, *at) for m, at in placed if (lying := m.lying) is not None]

    def _load(self, op: Operand) -> None:
        with torch.no_grad():
            for copy in self._copies(op):
                load_adapter(*copy)

    def _clear_absent(self, op: Operand) -> None:
        """Zeros in the slot of an adapter without rows, which another batch may have left there: its columns of S are
        zero, and zero times what has become infinite would be NaN in every row. One that is known to be finite may
        stay (`Member.resident`)."""
        in_graph = capturing(op.a)  # which has to contain it, and each replay fills slots that were empty
        if in_graph:
            self._empty.clear()
        remembered = op is self._operand and self.holder is None and not in_graph
        empty = self._empty if remembered else set[int]()
        for number, (m, (a, b)) in enumerate(zip(self.members, op.places, strict=True)):
            if m.lying is not None:
                empty.discard(number)
            elif number not in empty and len(a):
                empty.add(number)
                a.zero_()
                b.zero_()

    def _identity(self) -> tuple:
        return tuple((*map(id, m.lying or ()), m.scale) for m in self.members)

    def _own(self) -> Operand:
        """The views of our own buffer, made once: some views a forward and linear add up on the host."""
        if self._operand is None or self._operand.full is not self.buffer:
            assert self.buffer is not None
            self._operand = self._views(self.buffer)
        return self._operand

    def _scratch(self, dtype: torch.dtype) -> Operand:
        """A buffer for this call only: quantized weights, and weights that autocast casts."""
        dev = self.members[0].weight.device
        full = torch.empty(self.n + self.p, self.k + self.p, dtype=dtype, device=dev)
        op = self._views(full)
        for m, at in zip(self.linears, self.linear_rows, strict=True):
            if m.quantized is not None:
                dequantize_into(m.weight, m.quantized, op.w[at])
            else:
                op.w[at].copy_(m.weight)
        op.sb.zero_()
        op.a[self.rank :].zero_()
        self._clear_absent(op)
        self._load(op)
        return op

    def _adapters_apart(self, w: torch.Tensor, dtype: torch.dtype) -> Operand:
        """The adapters in tensors of this call, beside a module's own weight w (N, K)."""
        dev = self.members[0].weight.device
        sb = torch.zeros(self.n, self.p, dtype=dtype, device=dev)
        a = torch.zeros(self.p, self.k, dtype=dtype, device=dev)
        op = self._operand_of(w, sb, a, None)
        self._load(op)
        return op

    def _views(self, full: torch.Tensor) -> Operand:
        n, k = self.n, self.k
        return self._operand_of(full[:n, :k], full[:n, k:], full[n:, :k], full)

    def _operand_of(
        self, w: torch.Tensor, sb: torch.Tensor, a: torch.Tensor, full: torch.Tensor | None
    ) -> Operand:  # fmt: skip
        places = [(a[cols], sb[rows, cols]) for rows, cols in zip(self.rows, self.columns, strict=True)]
        return Operand(w, sb, a, full, places)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the members compute in where autocast does not say otherwise."""
        m = self.members[0]
        return m.weight.dtype if m.quantized is None else m.compute_dtype or m.quantized.dtype


def adapters_of(groups: Sequence[OperandBuffer]) -> SavedAdapters:
    """Every member of the groups with the adapter that it has now, for `with_saved_adapters`."""
    return [(m, m.adapter) for g in groups for m in g.members]


@contextmanager
def with_loaded_adapters(groups: Sequence[OperandBuffer], loader: Loader, x: torch.Tensor) -> Iterator[None]:
    """Inside, the groups' operands hold today's adapters, brought there in one launch instead of one an adapter.

    x: the input (…, K) of the module that the groups are of, which says where autocast is on.
    """
    try:
        copies = [g.places(compute_dtype(x, g.compute_dtype)) for g in groups]
        loader.load([copy for of_group in copies for copy in of_group or ()])
        yield
    finally:
        for g in groups:
            g.forget_places()


def _slices(sizes: list[int]) -> list[slice]:
    """Slices of these sizes, each behind the one before."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
