"""LoRA projections that share an input, as one library GEMM:

    Y = [X | S] · [W | sB]ᵀ        S = X · Aᵀ                 forward
    dX = [dY | dS] · [W ; A]       dS = dY · sB               backward
    dA = dSᵀ · X,  dB = dYᵀ · sS

X: (M, K), W: (N, K), A: (p, K), sB: (N, p), Y: (M, N). One buffer of (N + p) × (K + p) holds [W | sB ; A | –] and
serves both directions as strided views; the frozen weight is stored once, the module's own parameter becomes a view
into it. Several projections (q, k, v; gate, up) stack their rows in W, their A's in A, and B becomes block-diagonal. p
is the sum of the ranks rounded up, because GEMMs like a multiple of 64. sB and A are written anew on every forward:
optimizers that update through raw pointers change no version counter, and a CUDA graph has to contain the refresh.

Why: `Y += S · (sB)ᵀ` as a GEMM of its own reads and writes Y once more. Where the plain form is measured to be faster
it is taken (`tune`). Hu et al., "LoRA" (2021). Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from . import tune
from .adapter import Item, load_adapter
from .branch import Branch
from .dropout import add_product_into, draw_seed, dropped, product_into
from .linear_cross_entropy import mm_in
from .lora_grad import A_TILES, B_TILES, Source, a_gradient, b_gradient, tail_and_b, tails_that_fit
from .pack import Kept, s_into, spare_columns
from .runtime import MAX_FUSED_RANK, TILES, alone, capturing, check, round_up, tensor_cores, use_triton
from .runtime import rows as flat_rows
from .sums import Sums


@dataclass
class Member:
    """One frozen linear with at most one adapter: W (N, K), A (r, K), B (N, r); y = x Wᵀ + bias + scale · (x Aᵀ Bᵀ +
    lora_bias).
    """

    name: str
    weight: nn.Parameter
    bias: Any = None
    a: Any = None  # these three tensors or None
    b: Any = None
    lora_bias: Any = None
    scale: float = 1.0
    dropout: float = 0.0
    quantized: Any = None  # bitsandbytes' quant_state of an NF4 weight
    shape: tuple[int, int] = field(default=(0, 0))
    compute_dtype: torch.dtype | None = None  # of a quantized weight

    def __post_init__(self):
        if self.shape == (0, 0):
            n, k = self.weight.shape if self.quantized is None else self.quantized.shape
            self.shape = (n, k)
        n, k = self.shape
        if self.a is not None:
            check(self.a.dim() == 2 and self.a.shape[1] == k, f"lora_A of {self.name} does not fit", a=self.a)
            fits = self.b is not None and self.b.shape == (n, self.a.shape[0])
            check(fits, f"lora_B of {self.name} does not fit", a=self.a, b=self.b)

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    @property
    def adapter(self) -> tuple[Any, ...]:
        """What a site reads anew on each forward."""
        return self.a, self.b, self.lora_bias, self.scale, self.dropout

    @adapter.setter
    def adapter(self, values: tuple[Any, ...]) -> None:
        self.a, self.b, self.lora_bias, self.scale, self.dropout = values

    @property
    def parameters(self) -> tuple[torch.Tensor | None, ...]:
        """In the order in which the autograd functions take them and return their gradients."""
        return self.a, self.b, self.lora_bias, self.bias


@dataclass
class Operand:
    """w (N, K), sb (N, p), a (p, K); full is the buffer they are views of, None where they are not (FP8); places: where
    each member's A and scaled B lie in a and sb."""

    w: Any
    sb: torch.Tensor
    a: torch.Tensor
    full: Any
    places: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Saved:
    """What one projection's backward starts from: the operand that forward used, its sS (M, p), the seeds of its
    dropout or None, and where the float32 sums of the gradients go (None: into tensors of their own). branch: where the
    adapters' gradients are made beside the chain, in a captured graph; then the sums are that branch's alone."""

    op: Operand
    scaled_s: torch.Tensor
    seeds: Any = None
    sums: Sums | None = None
    branch: Branch | None = None

    @property
    def chain_sums(self) -> Sums | None:
        """Where kernels of the chain put theirs."""
        return self.sums if self.branch is None else None


@dataclass
class Gradient:
    """dY (M, N) and dS (M, p) of one projection. both: [dY | dS] where they lie side by side, else None; db: dB of all
    members (N, r) in float32 where the read that made dS gave it, else None."""

    dy: torch.Tensor
    ds: torch.Tensor
    both: Any = None
    db: Any = None


class Projection:
    """Members that share an input, and their operand buffer."""

    def __init__(self, members: list[Member], one_gemm: bool = True, fp8: bool = False):
        self.members, self.one_gemm = members, one_gemm
        self.k = members[0].shape[1]
        wrong = [m.name for m in members if m.shape[1] != self.k]
        if wrong:
            raise ValueError(f"{wrong} do not share an input of {self.k} columns: {[m.shape for m in members]}")
        self.widths, self.ranks = [m.shape[0] for m in members], [m.rank for m in members]
        self.n, self.rank = sum(self.widths), sum(self.ranks)
        self.p = round_up(self.rank, 64 if self.k >= 2048 else 16)
        self.rows = _slices(self.widths)  # each member's rows of W and B
        self.columns = _slices(self.ranks)  # each member's columns of S and rows of A
        self.quantized = any(m.quantized is not None for m in members)
        self.fp8: Any = None
        self.not_fp8: str | None = None  # the reason, where FP8 was asked for
        self.buffer: Any = None
        self._scales: tuple[Any, Any] = None, None  # the factors of `kept`, behind what they were made for
        self._loaded: tuple = ()
        self._operand: Operand | None = None  # of our own buffer
        self._fresh = False  # `refreshed` has just loaded what the next `operand` would load
        self._released = False  # a backward may still come, which must not take the weights again
        if fp8:
            from .fp8 import FrozenFp8, why_not

            self.not_fp8 = why_not(members)
            self.fp8 = FrozenFp8(members) if self.not_fp8 is None else None

    @property
    def compute_dtype(self) -> torch.dtype:
        m = self.members[0]
        return m.weight.dtype if m.quantized is None else m.compute_dtype or m.quantized.dtype

    # ---- the buffer -------------------------------------------------------------------------------------------------
    def owns_weights(self) -> bool:
        """True if the modules' weights still are the views that `adopt` made (a merge may have replaced them)."""
        buffer = self.buffer
        if buffer is None:
            return False
        start, step = buffer.data_ptr(), buffer.stride(0) * buffer.element_size()
        return all(
            m.weight.dtype == buffer.dtype
            and m.weight.device == buffer.device
            and m.weight.data_ptr() == start + rows.start * step
            for m, rows in zip(self.members, self.rows, strict=True)
        )

    def adopt(self) -> None:
        """Moves the frozen weights into the buffer, one by one, so that they are stored once."""
        if self.quantized or self.fp8 is not None:
            return
        first = self.members[0].weight
        with torch.inference_mode(False), torch.no_grad():  # what is born in inference mode cannot be trained with
            buffer = torch.zeros(self.n + self.p, self.k + self.p, dtype=first.dtype, device=first.device)
            for m, at in zip(self.members, self.rows, strict=True):
                buffer[at, : self.k].copy_(m.weight.data)
                m.weight.data = buffer[at, : self.k]
        self.buffer = buffer

    def release(self) -> None:
        """Gives each module a contiguous weight of its own again."""
        if self.owns_weights():
            with torch.inference_mode(False), torch.no_grad():
                for m in self.members:
                    m.weight.data = m.weight.data.clone(memory_format=torch.contiguous_format)
        self.buffer = self._operand = None
        self._released = True
        self._loaded = ()

    def operand(self, dtype: torch.dtype) -> Operand:
        """The operand with today's A and B in it."""
        if self._fresh and self.members[0].weight.dtype == dtype:
            self._fresh = False
            return self._own()
        if self.fp8 is not None:
            self.fp8.refresh()
            dev = self.members[0].weight.device
            sb = torch.zeros(self.n, self.p, dtype=dtype, device=dev)
            op = self._operand_of(None, sb, torch.zeros(self.p, self.k, dtype=dtype, device=dev), None)
            self._load(op)
            return op
        if not self.quantized and self.members[0].weight.dtype == dtype and not self._released:
            if not self.owns_weights():
                self.adopt()
            op = self._own()
            self._load(op)
            self._loaded = self._identity()
            return op
        return self._scratch(dtype)

    def stale(self) -> None:
        """The next `operand` loads the adapters itself."""
        self._fresh = False

    def places(self, dtype: torch.dtype) -> list[Item] | None:
        """The adapters and their places in the buffer, where today's weights lie there in dtype; else None."""
        if self.quantized or self.fp8 is not None or self.members[0].weight.dtype != dtype or not self.owns_weights():
            return None
        self._fresh, self._loaded = True, self._identity()
        return self._items(self._own())

    def _items(self, op: Operand) -> list[Item]:
        """Every adapter with its place in the operand."""
        return [(m.a, m.b, m.scale, *at) for m, at in zip(self.members, op.places, strict=True) if m.a is not None]

    def operand_again(self, dtype: torch.dtype) -> Operand:
        """For backward: what forward used. Loaded once more only if another adapter has been there since."""
        if self.buffer is not None and self._loaded == self._identity() and self.members[0].weight.dtype == dtype:
            return self._own()
        return self.operand(dtype)

    def _identity(self) -> tuple:
        return tuple((id(m.a), id(m.b), m.scale) for m in self.members)

    def _views(self, full) -> Operand:
        n, k = self.n, self.k
        return self._operand_of(full[:n, :k], full[:n, k:], full[n:, :k], full)

    def _operand_of(self, w, sb, a, full) -> Operand:
        places = [(a[cols], sb[rows, cols]) for rows, cols in zip(self.rows, self.columns, strict=True)]
        return Operand(w, sb, a, full, places)

    def _own(self) -> Operand:
        """The views of our own buffer, made once: some views a forward and linear add up on the host."""
        if self._operand is None or self._operand.full is not self.buffer:
            self._operand = self._views(self.buffer)
        return self._operand

    def _scratch(self, dtype: torch.dtype) -> Operand:
        """A buffer for this call only: quantized weights, and weights that autocast casts."""
        from .nf4 import dequantize_into

        dev = self.members[0].weight.device
        full = torch.empty(self.n + self.p, self.k + self.p, dtype=dtype, device=dev)
        op = self._views(full)
        for m, at in zip(self.members, self.rows, strict=True):
            if m.quantized is not None:
                dequantize_into(m.weight, m.quantized, op.w[at])
            else:
                op.w[at].copy_(m.weight)
        op.sb.zero_()
        op.a[self.rank :].zero_()
        self._load(op)
        return op

    def _load(self, op: Operand) -> None:
        with torch.no_grad():
            for item in self._items(op):
                load_adapter(*item)

    def total_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Bias of all members, with scale · lora_B.bias added, or None."""
        if all(m.bias is None and m.lora_bias is None for m in self.members):
            return None
        if len(self.members) == 1 and self.members[0].lora_bias is None:
            return self.members[0].bias.to(dtype)
        parts = []
        for m in self.members:
            part = torch.zeros(m.shape[0], dtype=torch.float32, device=m.weight.device)
            part = part if m.bias is None else part + m.bias
            parts.append(part if m.lora_bias is None else part + m.scale * m.lora_bias)
        return torch.cat(parts).to(dtype)

    def kept(self, m: int, dtype: torch.dtype, device: torch.device) -> Kept:
        """Room for sS of m rows: S with each member's columns multiplied by its scale, as dB = dYᵀ · sS needs it."""
        exact = torch.promote_types(dtype, torch.float32)
        key = (tuple(x.scale for x in self.members), exact, device)
        known, scales = self._scales
        if known != key:
            sizes = [*zip(self.ranks, key[0], strict=True), (self.p - self.rank, 0.0)]
            scales = torch.cat([torch.full((n,), scale, dtype=exact, device=device) for n, scale in sizes])
            if not capturing(scales):  # what a capture makes has no values before the first replay
                self._scales = key, scales
        return Kept(torch.empty(m, self.p, dtype=dtype, device=device), scales)

    # ---- dropout ----------------------------------------------------------------------------------------------------
    @property
    def dropped(self) -> bool:
        return any(m.dropout > 0 and m.rank for m in self.members)

    def seeds(self, device) -> torch.Tensor | None:
        """A seed a member: PEFT draws one mask for each projection, so these do too."""
        return draw_seed(device, len(self.members)) if self.dropped else None

    def lora_input(self, x, op: Operand, seeds, out, kept: Kept) -> None:
        """out (M, p) = S = dropout(x) · Aᵀ, member by member where their masks differ; sS to kept."""
        if not self.p:
            return
        if seeds is None:
            _by_tile("S", self.rank, x, op.a, lambda tile: s_into(x, op.a, out, tile, self.rank, kept))
            return
        self._dropped_input(x, op, seeds, out)
        kept.write(out)

    def _dropped_input(self, x, op: Operand, seeds, out) -> None:
        out.zero_()
        for i, (m, cols) in enumerate(zip(self.members, self.columns, strict=True)):
            if m.rank:
                arguments = x, op.a[cols], seeds[i : i + 1], m.dropout, out[:, cols]
                _by_tile("dropped product", m.rank, x, op.a, partial(product_into, *arguments))

    # ---- the products -----------------------------------------------------------------------------------------------
    def forward_apart(self, x, s, op: Operand, out: Any = None, residual=None) -> torch.Tensor:
        """Y of x (M, K) and S (M, p) wherever they lie: the frozen GEMM, and S · (sB)ᵀ added in place."""
        bias = self.total_bias(x.dtype)
        y = _product(x, op.w.t(), bias, out, residual) if self.fp8 is None else self._fp8(x, bias, out, residual)
        return y.addmm_(s, op.sb.t()) if self.p else y

    def forward(self, xs, op: Operand, out: Any = None, residual=None) -> torch.Tensor:
        """Y of the packed xs = [X | S] (M, K + p); written to out, added to residual, where given. residual may be out
        itself."""
        m = xs.shape[0]
        in_place = residual is not None and residual is out

        def one(into):
            bias = self.total_bias(xs.dtype)
            return _product(xs, op.full[: self.n].t(), bias, into, into if in_place else residual)

        def addmm(into):
            return self.forward_apart(xs[:, : self.k], xs[:, self.k :], op, into, into if in_place else residual)

        if op.full is None or not self.p:
            return addmm(out)
        forms = {"one": one, "addmm": addmm} if self.one_gemm else {"addmm": addmm}
        key = (tune.bucket(m), self.k, self.n, self.p, xs.dtype, residual is not None)
        trials = tune.on_spare(forms, lambda: (torch.clone(out) if in_place else out,))
        return forms[tune.pick("forward", key, trials, xs.device)](out)

    def _fp8(self, x, bias, out, residual):
        y = self.fp8.forward(x)
        y = y if bias is None else y.add_(bias)
        y = y if residual is None else y.add_(residual)
        return y if out is None else out.copy_(y)

    def backward_input(self, gradient: Gradient, saved: Saved) -> torch.Tensor:
        """dX (M, K)."""
        dy, ds, both = gradient.dy, gradient.ds, gradient.both
        op, seeds = saved.op, saved.seeds

        def one():
            return both @ op.full[:, : self.k]

        def addmm():
            dx = dy @ op.w if self.fp8 is None else self.fp8.backward(dy)
            return dx.addmm_(ds, op.a) if self.p and seeds is None else dx

        if op.full is None or not self.p or seeds is not None:
            dx = addmm()
        else:
            forms = {"one": one, "addmm": addmm} if self.one_gemm and both is not None else {"addmm": addmm}
            key = (tune.bucket(dy.shape[0]), self.k, self.n, self.p, dy.dtype)
            dx = forms[tune.pick("backward", key, forms, dy.device)]()
        if seeds is not None:
            self._add_dropped(dx, ds, op, seeds)
        return dx

    def _add_dropped(self, dx, ds, op, seeds) -> None:
        for i, (m, cols) in enumerate(zip(self.members, self.columns, strict=True)):
            if not m.rank:
                continue
            arguments = ds[:, cols], op.a[cols], seeds[i : i + 1], m.dropout
            forms = {"plain": partial(add_product_into, *arguments, fused=False)}
            if tensor_cores(ds, op.a):
                forms = {"fused": partial(add_product_into, *arguments)} | forms
            key = (tune.bucket(dx.shape[0]), self.k, m.rank, dx.dtype)
            trials = tune.on_spare(forms, lambda: (dx.clone(),))
            forms[tune.pick("dropped sum", key, trials, dx.device)](dx)

    def gradient(self, dy, saved: Saved, with_dx: bool = True) -> Gradient:
        """Of a dY (…, N) that lies anywhere. Unless it came with spare columns it is copied in front of dS only where
        the one GEMM that this allows is measured to be worth it."""
        op = saved.op
        wide = spare_columns(dy, self.n + self.p, op.sb.dtype)
        if wide is not None:
            return self.gradient_of(wide, saved)
        flat = flat_rows(dy).to(op.sb.dtype)
        if not self.p:
            return Gradient(flat, flat[:, self.n :])

        def empty(columns):
            return torch.empty(flat.shape[0], columns, dtype=flat.dtype, device=flat.device)

        def packed():
            wide = empty(self.n + self.p)
            wide[:, : self.n].copy_(flat)
            return self.gradient_of(wide, saved)

        def apart():
            ds = empty(self.p)
            return Gradient(flat, ds, None, self._tail(flat, ds, saved))

        if op.full is None or saved.seeds is not None or not with_dx or not self.one_gemm:
            return apart()  # nothing would read the two as one
        forms = {"packed": packed, "apart": apart}
        trials = {name: partial(lambda form: self.backward_input(form(), saved), form) for name, form in forms.items()}
        key = (tune.bucket(flat.shape[0]), self.k, self.n, self.p, flat.dtype)
        return forms[tune.pick("gradient", key, trials, flat.device)]()

    def gradient_of(self, wide, saved: Saved) -> Gradient:
        """Of a dY that lies in the first columns of wide (M, N + p); dS is written behind it."""
        dy, ds = wide[:, : self.n], wide[:, self.n :]
        return Gradient(dy, ds, wide, self._tail(dy, ds, saved))

    def _tail(self, dy, ds, saved: Saved) -> torch.Tensor | None:
        """Writes dS = dY · sB. Where one read of dY for both is faster it returns dB of all members too, (N, r) in
        float32; else None."""
        if not self.p:
            return None
        sb, scaled_s = saved.op.sb, saved.scaled_s

        def library():
            torch.mm(alone(dy), sb, out=ds)

        if saved.branch is not None:
            with saved.branch:  # nobody but the optimizer waits for dB
                db = self._b_gradients(dy, saved)
            library()
            return db
        fitting = tails_that_fit(dy, self.widths, self.ranks)
        one_read: dict[str, Any] = {
            t: partial(tail_and_b, dy, ds, sb, scaled_s, self.widths, self.ranks[0], t, saved.sums) for t in fitting
        }

        def library_with_b():  # what the library's dS costs when dB's own products come later
            library()
            at = zip(self.rows, self.columns, strict=True)
            return [mm_in(dy[:, r].t(), scaled_s[:, c], torch.float32) for r, c in at]

        key = (tune.bucket(dy.shape[0]), self.n, self.p, len(self.widths), dy.dtype)
        form = tune.pick("tail and b", key, one_read | {"plain": library_with_b}, dy.device)
        if form in one_read:
            return one_read[form]()
        library()
        return None

    def _b_gradients(self, dy, saved: Saved) -> torch.Tensor | None:
        """dB of all members, (N, r) in float32, in one launch where a kernel fits them; else None."""
        fitting = tails_that_fit(dy, self.widths, self.ranks, B_TILES)
        if not fitting:
            return None
        return b_gradient(dy, saved.scaled_s, self.widths, self.ranks[0], fitting[0], saved.sums)

    def a_gradients(self, ds, source: Source, sums=None, seed: Any = None, dropout: float = 0.0) -> torch.Tensor:
        """dA (r, K) of dS (M, r) and the input, with dropout where a seed is given, in A's dtype or in float32."""
        dtype = next(m.a.dtype for m in self.members if m.a is not None)
        rank = ds.shape[1]

        def library():
            if seed is not None:
                return mm_in(ds.t(), dropped(source.tensor(), seed, dropout), dtype)
            if source.norm is None or ds.dtype == torch.float16:
                return mm_in(ds.t(), source.tensor(), dtype)
            # As X = rstd · h · w, dA = w · ((rstd · dS)ᵀ · h): X is not even made. In float16 rstd · dS could overflow.
            scaled = (ds * source.rstd[:, None]).to(ds.dtype)
            return mm_in(scaled.t(), source.h.to(ds.dtype), dtype) * (source.weight + source.norm.offset)

        forms: dict[str, Any] = {"plain": library}
        if rank <= MAX_FUSED_RANK and use_triton(source.h) and tensor_cores(ds):
            norm = source.norm
            parts = (source.rstd, source.weight, norm.offset) if norm else (None, None, 0.0)
            forms = {t: partial(a_gradient, ds, source.h, *parts, t, seed, dropout, sums) for t in A_TILES} | forms
        key = (tune.bucket(ds.shape[0]), self.k, rank, ds.dtype, source.norm is not None, seed is not None)
        return forms[tune.pick("a gradient", key, forms, ds.device)]()

    def parameter_gradients(
        self, gradient: Gradient, saved: Saved, needed: list[bool], source: Any, da_all: Any = None
    ) -> list:
        """Gradients in the order of `parameters`, member by member; those of A and B may still be float32 sums. needed:
        four of autograd's flags a member; source: the input as a Source, None where no member has an adapter; da_all:
        dA of all members where it is known. Dropout makes each member see its own input."""
        seeds, sums = saved.seeds, saved.sums
        wanted = da_all is None and seeds is None
        if wanted and any(n and m.a is not None for n, m in zip(needed[::4], self.members, strict=True)):
            da_all = self.a_gradients(gradient.ds[:, : self.rank], source, sums)
        out: list[torch.Tensor | None] = []
        for i, (m, rows, cols) in enumerate(zip(self.members, self.rows, self.columns, strict=True)):
            need_a, need_b, need_lora_bias, need_bias = needed[4 * i : 4 * i + 4]
            da, db = None, None
            if need_a and m.a is not None:
                if da_all is not None:
                    da = da_all[cols]
                else:
                    seed = None if seeds is None else seeds[i : i + 1]
                    da = self.a_gradients(gradient.ds[:, cols], source, sums, seed, m.dropout)
            if need_b and m.b is not None:
                if gradient.db is not None:
                    db = gradient.db[rows]
                else:
                    db = mm_in(gradient.dy[:, rows].t(), saved.scaled_s[:, cols], m.b.dtype)
            total: Any = None
            if need_lora_bias or need_bias:
                dy = gradient.dy[:, rows]
                total = dy.sum(0, dtype=torch.promote_types(torch.float32, dy.dtype))
            dlb = (total * m.scale).to(m.lora_bias.dtype) if need_lora_bias and m.lora_bias is not None else None
            out += [da, db, dlb, total.to(m.bias.dtype) if need_bias and m.bias is not None else None]
        return out


def adapters_of(projections: list[Projection]) -> list[tuple[Member, tuple[Any, ...]]]:
    """Every member with the adapter that it has now, for `as_then`."""
    return [(m, m.adapter) for p in projections for m in p.members]


@contextmanager
def as_then(adapters: list[tuple[Member, tuple[Any, ...]]]) -> Iterator[None]:
    """Inside, the members have the adapters of an earlier moment: between a forward and its backward another forward
    may have read another adapter, another scale or, in evaluation, no dropout."""
    now = [(m, m.adapter) for m, _ in adapters]
    try:
        for m, adapter in adapters:
            m.adapter = adapter
        yield
    finally:
        for m, adapter in now:
            m.adapter = adapter


def sums_of(projections: list[Projection], m: int, device: torch.device) -> Sums:
    """Room for dS of m rows, dB and dA of all members of these projections."""
    gradients = sum(g.rank * g.k + g.n * max(x.rank for x in g.members) for g in projections)
    return Sums(device, gradients, sum(m * g.p for g in projections))


def _by_tile(name: str, rank: int, x, a, run: Callable[[str | None], None]) -> None:
    """run(tile) of a product x · aᵀ, with the tile that is measured to be fastest; None stands for library calls."""
    tiles: dict[str, Any] = {**({t: t for t in TILES} if tensor_cores(x, a) else {}), "plain": None}
    forms = {form: partial(run, tile) for form, tile in tiles.items()}
    key = (tune.bucket(x.shape[0]), x.shape[1], rank, x.dtype)
    run(tiles[tune.pick(name, key, forms, x.device)])


def _slices(sizes: list[int]) -> list[slice]:
    """Slices of these sizes, each behind the one before."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _product(x, wt, bias, out, residual):
    if residual is not None:
        y = torch.addmm(residual, x, wt, out=out) if out is not None else torch.addmm(residual, x, wt)
        return y if bias is None else y.add_(bias)
    if bias is not None:
        return torch.addmm(bias, x, wt, out=out) if out is not None else torch.addmm(bias, x, wt)
    return torch.mm(x, wt, out=out) if out is not None else torch.mm(x, wt)


__all__ = ["Gradient", "Member", "Operand", "Projection", "Saved", "sums_of"]
