"""From dY to dX: the gradient of a projection's output, with LoRA's columns dS behind it, and what the input gets.

    dS = dY · sB                    `output_gradient`, with dB = dYᵀ · sS where one read of dY for both is faster
    dX = [dY | dS] · [W ; A]        `input_gradient`, one GEMM, or the frozen one and an in-place addmm, or of rows of
                                    many adapters in the form of tail.py

dY: (M, N), dS: (M, p), dX: (M, K); W, sB and A as in `operand.py`. Which form is taken is measured (`tune`).
Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ops.adapter import RaisedB
from ..ops.concat_operand import spare_columns
from ..ops.dropout import add_product_into
from ..ops.grad_accumulator import GradAccumulator
from ..ops.linear_cross_entropy import mm_in
from ..ops.lora_grad import B_TILES, AdapterColumns, b_gradient, ds_and_db, fitting_tiles
from ..ops.multi_lora import up
from ..ops.quantize_rows import Quantized
from ..runtime import contiguous_on_cpu, deterministic, multiprocessors, rows, tensor_cores
from ..side_stream import SideStream
from ..tuning import tune
from ..tuning.worth_trying import ds_and_db_tiles
from .fp8 import TransposedWeight
from .operand import Operand
from .own_rows import ds_forms
from .projection import Projection
from .tail import tail_forms


@dataclass(slots=True)
class SavedForward:
    """What one projection's backward starts from: the operand that forward used, its sS (M, p), the seeds (members,) of
    its dropout or None.

    raised: s·B as dS is to be made of it, in float16 (`adapter.py`); None where the operand's own is as good.
    accumulator: where the float32 gradients grow (None: in tensors of their own). side_stream: where the adapters'
    gradients are made beside the main stream, in a captured graph; then the accumulator is that stream's alone.
    """

    op: Operand
    scaled_s: torch.Tensor
    seeds: torch.Tensor | None = None
    accumulator: GradAccumulator | None = None
    side_stream: SideStream | None = None
    raised: RaisedB | None = None

    @property
    def sb(self) -> torch.Tensor:
        """s·B (N, p) as dS is made of it."""
        return self.op.sb if self.raised is None else self.raised.sb

    @property
    def main_stream_accumulator(self) -> GradAccumulator | None:
        """Where kernels of the main stream let theirs grow."""
        return self.accumulator if self.side_stream is None else None


@dataclass(slots=True)
class OutputGradient:
    """dY (M, N) and dS (M, p) of one projection. both: [dY | dS] (M, N + p) where they lie side by side, else None; db:
    dB of all members (N, r) in float32 where the read that made dS gave it, else None; raised: dS (M, p) as `raised_b`
    makes it, of which dA is made in float16; in_fp8: dY in e4m3 and the weight that it belongs to, where dY was written
    in nothing else: dy has no columns then."""

    dy: torch.Tensor
    ds: torch.Tensor
    both: torch.Tensor | None = None
    db: torch.Tensor | None = None
    raised: torch.Tensor | None = None
    in_fp8: tuple[Quantized, TransposedWeight] | None = None

    @property
    def ds_of_a(self) -> torch.Tensor:
        """The dS (M, p) that dA is made of; `SavedForward.raised` says what has to be taken back then."""
        return self.ds if self.raised is None else self.raised


# ---- dS, behind dY or apart ------------------------------------------------------------------------------------------
def output_gradient(
    projection: Projection, dy: torch.Tensor, saved: SavedForward, with_dx: bool = True
) -> OutputGradient:
    """Of a dY (…, N) that lies anywhere. Unless it came with spare columns it is copied in front of dS only where the
    one GEMM that this allows is measured to be worth it; with_dx: whether dX is wanted."""
    op, n, p = saved.op, projection.n, projection.p
    wide = spare_columns(dy, n + p, op.sb.dtype)
    if wide is not None:
        return wide_output_gradient(projection, wide, saved)
    flat = rows(dy).to(op.sb.dtype)
    if not p:
        return OutputGradient(flat, flat[:, n:])

    def empty(columns: int) -> torch.Tensor:
        return torch.empty(flat.shape[0], columns, dtype=flat.dtype, device=flat.device)

    def packed() -> OutputGradient:
        wide = empty(n + p)
        wide[:, :n].copy_(flat)
        return wide_output_gradient(projection, wide, saved)

    def apart() -> OutputGradient:
        ds = empty(p)
        return OutputGradient(flat, ds, None, *_write_ds(projection, flat, ds, saved))

    if op.full is None or saved.seeds is not None or not with_dx or not projection.one_gemm:
        return apart()  # nothing would read the two as one
    forms = {"packed": packed, "apart": apart}
    trials = {
        name: partial(lambda form: input_gradient(projection, form(), saved), form) for name, form in forms.items()
    }
    key = (tune.bucket(flat.shape[0]), projection.k, n, p, flat.dtype)
    return forms[tune.pick("gradient", key, trials, flat.device)]()


def wide_output_gradient(projection: Projection, wide: torch.Tensor, saved: SavedForward) -> OutputGradient:
    """Of a dY that lies in the first columns of wide (M, N + p); dS is written behind it."""
    dy, ds = wide[:, : projection.n], wide[:, projection.n :]
    return OutputGradient(dy, ds, wide, *_write_ds(projection, dy, ds, saved))


def _write_ds(
    projection: Projection, dy: torch.Tensor, ds: torch.Tensor, saved: SavedForward
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """ds (M, p) = dY · sB; returns (dB of all members, (N, r) in float32, where one read of dY for both is faster, else
    None; the raised dS (M, p) or None)."""
    if not projection.p:
        return None, None
    if saved.raised is None:
        return _make_own_ds(projection, dy, ds, saved), None
    raised = torch.empty(ds.shape, dtype=ds.dtype, device=ds.device)
    db = _make_ds(projection, dy, raised, saved)
    projection.keep_own_columns(raised)
    torch.mul(raised, saved.raised.back, out=ds)
    return db, raised


def _make_own_ds(
    projection: Projection, dy: torch.Tensor, ds: torch.Tensor, saved: SavedForward
) -> torch.Tensor | None:
    """`_make_ds`, with zeros in the columns that are not a row's own."""

    def of_all() -> torch.Tensor | None:
        db = _make_ds(projection, dy, ds, saved)
        projection.keep_own_columns(ds)
        return db

    def of_all_with_b() -> None:  # what the form costs when dB's own products come later
        if of_all() is None:
            _b_by_library(projection, dy, saved)

    own = {}
    if saved.side_stream is None:
        own = ds_forms(projection, dy, saved.op, ds, saved.scaled_s, saved.accumulator)
    if not own:
        return of_all()
    key = (tune.bucket(dy.shape[0]), projection.n, *projection.ranks, dy.dtype)
    form = tune.pick("dS of several adapters", key, {"all": of_all_with_b, **own}, dy.device)
    return own[form]() if form in own else of_all()


def _b_by_library(projection: Projection, dy: torch.Tensor, saved: SavedForward) -> list[torch.Tensor]:
    at = zip(projection.linear_rows, projection.linear_columns, strict=True)
    return [mm_in(dy[:, r].t(), saved.scaled_s[:, c], torch.float32) for r, c in at]


def _make_ds(projection: Projection, dy: torch.Tensor, ds: torch.Tensor, saved: SavedForward) -> torch.Tensor | None:
    """ds (M, p) = dY · `saved.sb`, and dB as `_write_ds` returns it."""
    sb, scaled_s = saved.sb, saved.scaled_s
    widths, ranks = projection.widths, projection.ranks

    def library() -> None:
        torch.mm(contiguous_on_cpu(dy), sb, out=ds)

    if saved.side_stream is not None:
        with saved.side_stream:  # nobody but the optimizer waits for dB
            db = _b_gradients(projection, dy, saved)
        library()
        return db
    one_read: dict[str, Any] = {}
    if fitting := fitting_tiles(dy, widths, ranks):
        adapters = AdapterColumns(sb, scaled_s, widths, ranks[0])
        m, n = tune.bucket(dy.shape[0]), projection.n
        tiles = ds_and_db_tiles(tuple(fitting), m, n, multiprocessors(dy))
        one_read = {tile: partial(ds_and_db, dy, ds, adapters, tile, saved.accumulator) for tile in tiles}

    def library_with_b() -> list[torch.Tensor]:  # what the library's dS costs when dB's own products come later
        library()
        return _b_by_library(projection, dy, saved)

    key = (tune.bucket(dy.shape[0]), projection.n, projection.p, len(widths), dy.dtype)
    form = tune.pick("dS and dB", key, one_read | {"plain": library_with_b}, dy.device)
    if form in one_read:
        return one_read[form]()
    library()
    return None


def _b_gradients(projection: Projection, dy: torch.Tensor, saved: SavedForward) -> torch.Tensor | None:
    """dB of all members, (N, r) in float32, in one launch where a kernel fits them and may add atomically; else
    None."""
    widths, ranks = projection.widths, projection.ranks
    fitting = fitting_tiles(dy, widths, ranks, B_TILES)
    if not fitting or deterministic():
        return None
    return b_gradient(dy, saved.scaled_s, widths, ranks[0], fitting[0], saved.accumulator)


def with_raised(gradient: OutputGradient, saved: SavedForward) -> OutputGradient:
    """The same gradient, after a kernel has made its ds (M, p) of `saved.sb`: what was raised is kept for dA, and taken
    back in ds."""
    if saved.raised is not None:
        gradient.raised = gradient.ds.clone()
        gradient.ds.mul_(saved.raised.back)
    return gradient


# ---- dX --------------------------------------------------------------------------------------------------------------
def input_gradient(projection: Projection, gradient: OutputGradient, saved: SavedForward) -> torch.Tensor:
    """dX (M, K)."""
    dy, ds, both = gradient.dy, gradient.ds, gradient.both
    op, seeds, k, p = saved.op, saved.seeds, projection.k, projection.p

    def addmm() -> torch.Tensor:
        dx = frozen_input_gradient(projection, gradient, op)
        if seeds is not None:
            _add_dropped(projection, dx, ds, op, seeds)
            return dx
        return dx.addmm_(ds, op.a) if p else dx

    if op.full is None or not p:
        return addmm()
    tails = tail_forms(projection, op, dy, ds, seeds, of_b=False)
    forms: dict[str, Any] = {"addmm": addmm} | tails
    if projection.one_gemm and both is not None and seeds is None:
        forms = {"one": partial(_concat_input_gradient, both, op.full, k)} | forms
    key = (tune.bucket(dy.shape[0]), k, projection.n, p, dy.dtype)
    key += ("tail", seeds is not None, "one" in forms) if tails else ()  # a choice is among these forms
    return forms[tune.pick("backward", key, forms, dy.device)]()


def _concat_input_gradient(both: torch.Tensor, full: torch.Tensor, k: int) -> torch.Tensor:
    return both @ full[:, :k]


def frozen_input_gradient(projection: Projection, gradient: OutputGradient, op: Operand) -> torch.Tensor:
    """dX (M, K) without LoRA's part."""
    if gradient.in_fp8 is not None:
        dy, w = gradient.in_fp8
        return w.product(dy, gradient.ds.dtype)
    return gradient.dy @ op.w if projection.fp8 is None else projection.fp8.backward(gradient.dy, op.w)


def _add_dropped(projection: Projection, dx: torch.Tensor, ds: torch.Tensor, op: Operand, seeds: torch.Tensor) -> None:
    """dx (M, K) += dropout(dS · A), member by member."""
    if projection.slot is not None:
        for slots in projection.slots(dx, op, seeds):
            up(ds, slots.table, slots.jobs, dx, of_b=False, seeds=slots.seeds)
        return
    for i, (m, cols) in enumerate(zip(projection.members, projection.columns, strict=True)):
        if not m.rank:
            continue
        arguments = ds[:, cols], op.a[cols], seeds[i : i + 1], m.dropout
        forms = {"plain": partial(add_product_into, *arguments, fused=False)}
        if tensor_cores(ds, op.a):
            forms = {"fused": partial(add_product_into, *arguments)} | forms
        key = (tune.bucket(dx.shape[0]), projection.k, m.rank, dx.dtype)
        forms[tune.pick("dropped sum", key, forms, dx.device, lambda: (dx.clone(),))](dx)
