"""The products of a projection's forward, each in the form that is measured to be fastest (`tune`):

    S = dropout(X) · Aᵀ            `lora_input`
    Y = [X | S] · [W | sB]ᵀ        `concat_product`, one GEMM, or the frozen one and an in-place addmm
    Y = X · Wᵀ + S · (sB)ᵀ         `separate_product`, of an X and an S that lie wherever they lie

and of rows of many adapters Y in the form of tail.py.

X: (M, K), S: (M, p), Y: (M, N); W, sB and A as in `operand.py`.
Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ops.concat_operand import LoraColumns, ScaledS, s_into
from ..ops.dropout import product_into
from ..ops.multi_lora import down
from ..ops.quantize_rows import Quantized, quantize_rows
from ..runtime import tensor_cores
from ..tuning import tune
from ..tuning.worth_trying import dropped_s_tiles, s_tiles
from .operand import Operand
from .own_rows import s_forms
from .projection import Projection
from .tail import tail_forms


class Fp8Operand(NamedTuple):
    """The operand of a product in FP8 whose X (M, K) was quantized by who made it: S (M, p), of which LoRA's part is,
    stays in the compute dtype."""

    x: Quantized
    s: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of the product's output."""
        return self.s.dtype


def lora_input(
    projection: Projection, x: torch.Tensor, op: Operand, seeds: torch.Tensor | None, out: torch.Tensor,
    scaled_s: ScaledS,
) -> None:  # fmt: skip
    """out (M, p) = S = dropout(x) · Aᵀ of x (M, K), member by member where their masks differ; sS to scaled_s. Each row
    has zeros in the columns of other jobs' slots.

    seeds: the projection's, or None without dropout.
    """
    if not projection.p:
        return
    if seeds is None:
        forms = s_forms(projection, x, op, out, scaled_s)
        if not forms:
            return _of_all_columns(projection, x, op, out, scaled_s)
        forms = {"all": partial(_of_all_columns, projection, x, op, out, scaled_s)} | forms
        key = (tune.bucket(x.shape[0]), projection.k, *projection.ranks, x.dtype)
        forms[tune.pick("S of several adapters", key, forms, x.device)]()
        return
    _dropped_input(projection, x, op, seeds, out)
    scaled_s.write(out)


def _of_all_columns(projection: Projection, x: torch.Tensor, op: Operand, out: torch.Tensor, scaled_s: ScaledS) -> None:
    # Of several adapters' S what a row keeps is known later, and sS is made of that.
    columns = LoraColumns(op.a, projection.rank, scaled_s if projection.slot is None else None)
    tiles = s_tiles(copied=False)
    _by_tile("S", tiles, projection.rank, x, op.a, lambda tile: s_into(x, columns, out, tile))
    projection.keep_own_columns(out, scaled_s.out, scaled_s.scales)


def _dropped_input(
    projection: Projection, x: torch.Tensor, op: Operand, seeds: torch.Tensor, out: torch.Tensor
) -> None:
    out.zero_()
    if projection.slot is not None:
        for slots in projection.slots(x, op, seeds):
            down(x, slots.table, slots.jobs, seeds=slots.seeds, out=out)
        return
    for i, (m, cols) in enumerate(zip(projection.members, projection.columns, strict=True)):
        if m.rank:
            arguments = x, op.a[cols], seeds[i : i + 1], m.dropout, out[:, cols]
            _by_tile("dropped product", dropped_s_tiles(), m.rank, x, op.a, partial(product_into, *arguments))


def _by_tile(
    name: str, tried: list[str], rank: int, x: torch.Tensor, a: torch.Tensor, run: Callable[[str | None], None]
) -> None:
    """run(tile) of a product x · aᵀ, with the one of the tried tiles that is measured to be fastest; None stands for
    library calls."""
    tiles: dict[str, Any] = {**{t: t for t in tried if tensor_cores(x, a)}, "plain": None}
    forms = {form: partial(run, tile) for form, tile in tiles.items()}
    key = (tune.bucket(x.shape[0]), x.shape[1], rank, x.dtype)
    run(tiles[tune.pick(name, key, forms, x.device)])


def concat_product(
    projection: Projection, xs: torch.Tensor | Fp8Operand, op: Operand, out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Y (M, N) of xs = [X | S] (M, K + p); written to out, added to residual, (M, N) each, where given. residual may be
    out itself."""
    if isinstance(xs, Fp8Operand):
        return separate_product(projection, xs.x, xs.s, op, out, residual)
    m, k, full = xs.shape[0], projection.k, op.full
    in_place = residual is not None and residual is out

    def one(full: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        bias = projection.total_bias(xs.dtype)
        return _product(xs, full[: projection.n].t(), bias, into, into if in_place else residual)

    def addmm(into: torch.Tensor | None) -> torch.Tensor:
        added = into if in_place else residual
        return separate_product(projection, xs[:, :k], xs[:, k:], op, into, added)

    if full is None or not projection.p:
        return addmm(out)
    tails = tail_forms(projection, op, xs[:, :k], xs[:, k:], out=out, residual=residual)
    forms = ({"one": partial(one, full)} if projection.one_gemm else {}) | {"addmm": addmm} | tails
    key = (tune.bucket(m), k, projection.n, projection.p, xs.dtype, residual is not None)
    key += ("tail", projection.one_gemm) if tails else ()  # a choice is among these forms
    spare = lambda: (torch.clone(out) if in_place and out is not None else out,)  # noqa: E731
    return forms[tune.pick("forward", key, forms, xs.device, spare)](out)


def product_of_apart(projection: Projection, x: torch.Tensor, s: torch.Tensor, op: Operand) -> torch.Tensor:
    """Y (M, N) of x (M, K) and S (M, p) wherever they lie: `separate_product`, or the form of tail.py."""
    forms = {"addmm": partial(separate_product, projection, x, s, op)} | tail_forms(projection, op, x, s)
    key = (tune.bucket(len(s)), projection.k, projection.n, projection.p, s.dtype)
    return forms[tune.pick("forward of apart", key, forms, s.device)]()


def separate_product(
    projection: Projection, x: torch.Tensor | Quantized, s: torch.Tensor, op: Operand, out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Y (M, N) of x (M, K) and S (M, p) wherever they lie: the frozen GEMM, and S · (sB)ᵀ added in place. out and
    residual as in `concat_product`. x may be in e4m3 already where the projection's product is in FP8."""
    bias = projection.total_bias(s.dtype)
    if projection.fp8 is None:
        assert isinstance(x, torch.Tensor), "a product in the compute dtype has its input in it"
        y = _product(x, op.w.t(), bias, out, residual)
        return y.addmm_(s, op.sb.t()) if projection.p else y
    x = quantize_rows(x) if isinstance(x, torch.Tensor) else x
    y = projection.fp8.product(x, op.w, s.dtype, bias, None if residual is out else out)
    y = y.addmm_(s, op.sb.t()) if projection.p else y
    return y if residual is None else torch.add(y, residual, out=y if out is None else out)


def frozen_product(projection: Projection, x: Quantized, op: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Y (M, N) in dtype of x (M, K) in e4m3, without LoRA's part, of a projection whose product is in FP8."""
    assert projection.fp8 is not None
    return projection.fp8.product(x, op.w, dtype, projection.total_bias(dtype))


def _product(
    x: torch.Tensor, wt: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if residual is not None:
        y = torch.addmm(residual, x, wt, out=out) if out is not None else torch.addmm(residual, x, wt)
        return y if bias is None else y.add_(bias)
    if bias is not None:
        return torch.addmm(bias, x, wt, out=out) if out is not None else torch.addmm(bias, x, wt)
    return torch.mm(x, wt, out=out) if out is not None else torch.mm(x, wt)
