"""The gradients of a projection's own parameters: dA = dSᵀ · dropout(X), dB = dYᵀ · sS, and the biases' sums of dY.

X: (M, K), dS: (M, p), dY: (M, N), dA: (r, K), dB: (N, r). A norm's output is not even made again for dA: as X = rstd ·
h · w, dA = w · ((rstd · dS)ᵀ · h). (In float16 rstd · dS could overflow, so there it is made.)
Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..ops.dropout import dropped
from ..ops.grad_accumulator import GradAccumulator
from ..ops.linear_cross_entropy import mm_in
from ..ops.lora_grad import SavedInput, a_gradient
from ..ops.multi_lora import gradients
from ..runtime import MAX_FUSED_RANK, multiprocessors, tensor_cores, use_triton
from ..tuning import tune
from ..tuning.worth_trying import a_gradient_tiles
from .member import Member
from .operand import Operand
from .output_grad import OutputGradient, SavedForward
from .own_rows import da_forms
from .projection import Projection

BiasGradients = tuple[torch.Tensor | None, torch.Tensor | None]
NO_BIASES: BiasGradients = None, None


def accumulator_for(projections: Sequence[Projection], m: int, device: torch.device) -> GradAccumulator:
    """Room for dS of m rows, dB and dA of all members of these projections."""
    gradients = sum(g.rank * g.k + g.n * max(g.ranks) for g in projections)
    return GradAccumulator(device, gradients, sum(m * g.p for g in projections))


def parameter_gradients(
    projection: Projection, gradient: OutputGradient, saved: SavedForward, needed: list[bool],
    source: SavedInput | None, da_all: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients in the order of `Member.parameters`, member by member; those of A (r, K) and B (N, r) may still be
    float32 accumulators. What dS was raised by (`SavedForward.raised`) is taken back from dA here.

    needed: four of autograd's flags a member; source: the input, None where no member has an adapter; da_all: dA (p, K)
    of all members where it is known. Dropout makes each member see its own input.
    """
    members, seeds = projection.members, saved.seeds
    wanted = da_all is None and seeds is None
    if wanted and any(n and m.a is not None for n, m in zip(needed[::4], members, strict=True)):
        da_all = _all_a_gradients(projection, gradient.ds_of_a, source, saved)
    back = None if saved.raised is None else saved.raised.back[:, None]
    if da_all is not None and back is not None:
        da_all.mul_(back[: projection.rank])
    das = {}
    if projection.slot is not None and seeds is not None and any(needed[::4]):
        das = _dropped_a_gradients(projection, gradient.ds_of_a, source, saved.op, seeds)
    out: list[torch.Tensor | None] = []
    dbs: dict[int, list[torch.Tensor]] = {}  # of each linear, by slot: one product is for all of them
    for i, (m, cols) in enumerate(zip(members, projection.columns, strict=True)):
        need_a, need_b, need_lora_bias, need_bias = needed[4 * i : 4 * i + 4]
        da, db = None, None
        if need_a and m.a is not None:
            if da_all is not None:
                da = da_all[cols]
            elif i in das:
                da = das[i] if back is None else das[i].mul_(back[cols])
            else:
                seed = None if seeds is None else seeds[i : i + 1]
                da = _a_gradients(projection, gradient.ds_of_a[:, cols], source, saved.accumulator, seed, m.dropout)
                da = da if back is None else da.mul_(back[cols])
        rows, d_biases = projection.rows[i], NO_BIASES
        if need_b and m.b is not None:
            linear = projection.linear_of[i]
            if linear not in dbs:
                if gradient.db is not None:
                    of_slots = gradient.db[rows]
                else:
                    scaled_s = saved.scaled_s[:, projection.linear_columns[linear]]
                    of_slots = mm_in(gradient.dy[:, rows].t(), scaled_s, m.b.dtype)
                dbs[linear] = _by_slot(of_slots, projection.slot_ranks[linear], m.b.dtype)
            db = dbs[linear][projection.slot_of[i]]
        if need_lora_bias or need_bias:
            d_biases = _bias_gradients(m, gradient.dy[:, rows], need_lora_bias, need_bias)
        out += [da, db, *d_biases]
    return out


def _all_a_gradients(
    projection: Projection, ds: torch.Tensor, source: SavedInput | None, saved: SavedForward
) -> torch.Tensor:
    """dA (rank, K) of all members, of dS (M, p) and the input."""
    assert source is not None, "a projection with an adapter has saved its input"
    of_all = partial(_a_gradients, projection, ds[:, : projection.rank], source, saved.accumulator)
    own = da_forms(projection, ds, saved.op, source, saved.accumulator)
    if not own:
        return of_all()
    forms = {"all": of_all} | own
    key = (tune.bucket(ds.shape[0]), projection.k, *projection.ranks, ds.dtype, source.factors is not None)
    return forms[tune.pick("dA of several adapters", key, forms, ds.device)]()


def _dropped_a_gradients(
    projection: Projection, ds: torch.Tensor, source: SavedInput | None, op: Operand, seeds: torch.Tensor
) -> dict[int, torch.Tensor]:
    """dA (r, K) of each slot whose job has rows, by member, in one launch a linear, of dS (M, p)."""
    assert source is not None, "a projection with an adapter has saved its input"
    x, found = source.tensor(), {}
    for slots in projection.slots(x, op, seeds):
        das = gradients(x, ds, slots.table, slots.jobs, seeds=slots.seeds)
        found |= {i: da for job, i in slots.members.items() if (da := das[job]) is not None}
    return found


def _by_slot(db: torch.Tensor, ranks: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """dB (N, r) of each slot, of what a linear's slots have side by side, (N, Σr). Slots of one rank are taken apart
    and cast in one launch; others autograd copies one by one, because a gradient lies as its parameter does."""
    if len(ranks) == 1:
        return [db]
    if len(set(ranks)) > 1:
        return list(db.split(ranks, 1))
    each = db.unflatten(1, (len(ranks), -1)).transpose(0, 1)
    return list(each.to(dtype, memory_format=torch.contiguous_format).contiguous())


def _a_gradients(
    projection: Projection, ds: torch.Tensor, source: SavedInput | None, accumulator: GradAccumulator | None,
    seed: torch.Tensor | None = None, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """dA (r, K) of dS (M, r) and the input, with dropout where a seed is given, in A's dtype or in float32."""
    assert source is not None, "a projection with an adapter has saved its input"
    dtype = next(m.a.dtype for m in projection.members if m.a is not None)
    rank, factors = ds.shape[1], source.factors
    forms: dict[str, Any] = {"plain": partial(_a_gradients_by_library, ds, source, dtype, seed, dropout)}
    if rank <= MAX_FUSED_RANK and use_triton(source.h) and tensor_cores(ds):
        m, k = tune.bucket(ds.shape[0]), source.h.shape[1]
        tiles = a_gradient_tiles(m, k, seed is not None, multiprocessors(ds))
        one_read = {t: partial(a_gradient, ds, source.h, factors, t, seed, dropout, accumulator) for t in tiles}
        forms = one_read | forms
    key = (tune.bucket(ds.shape[0]), projection.k, rank, ds.dtype, factors is not None, seed is not None)
    return forms[tune.pick("a gradient", key, forms, ds.device)]()


def _a_gradients_by_library(
    ds: torch.Tensor, source: SavedInput, dtype: torch.dtype, seed: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    factors = source.factors
    if seed is not None:
        return mm_in(ds.t(), dropped(source.tensor(), seed, dropout), dtype)
    if factors is None or ds.dtype == torch.float16:
        return mm_in(ds.t(), source.tensor(), dtype)
    scaled = (ds * factors.rstd[:, None]).to(ds.dtype)
    return mm_in(scaled.t(), source.h.to(ds.dtype), dtype) * (factors.weight + factors.norm.offset)


def _bias_gradients(m: Member, dy: torch.Tensor, need_lora_bias: bool, need_bias: bool) -> BiasGradients:
    """Of lora_B's bias and of the bias, (N,) each, where they are there and wanted; dy: (M, N) of this member."""
    total = dy.sum(0, dtype=torch.promote_types(torch.float32, dy.dtype))
    d_lora_bias = (total * m.scale).to(m.lora_bias.dtype) if need_lora_bias and m.lora_bias is not None else None
    return d_lora_bias, total.to(m.bias.dtype) if need_bias and m.bias is not None else None
