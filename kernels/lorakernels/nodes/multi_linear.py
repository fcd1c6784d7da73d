"""One frozen linear under rows of several adapters, as one autograd node: the frozen weight's product for all rows at
once, then what each row's own adapter adds (ops/multi_lora.py), or from many adapters on both in one launch where that
is measured to be faster (ops/multi_product.py).

    y = x · Wᵀ + bias + scale · dropout(x) · Aᵀ · Bᵀ, with A, B, scale and dropout of the row's job

Run: python -m pytest tests/lorakernels/test_multi_linear.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ops.dropout import draw_seed
from ..ops.job_rows import JobRows
from ..ops.multi_lora import Adapters, AdapterTable, down, gradients, up
from ..ops.multi_product import multi_product
from ..runtime import check, compute_dtype, no_autocast, rows
from ..tuning import tune
from ..tuning.worth_trying import tails


@dataclass
class _Call:
    """What a node knows beside the tensors that autograd sees."""

    table: AdapterTable
    rows: JobRows
    seeds: torch.Tensor | None
    dtype: torch.dtype


class _MultiLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, base: torch.Tensor | None,
        call: _Call, *parameters: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        with no_autocast(x.device):
            flat = rows(x).to(call.dtype)
            s = down(flat, call.table, call.rows, seeds=call.seeds)
            if weight is None:  # somebody else's product, which others may hold: not written into
                assert base is not None
                y = rows(base).to(call.dtype).clone()
                up(s, call.table, call.rows, y)
            else:
                own_bias = None if bias is None else bias.to(call.dtype)
                y = _product(call, flat, weight.to(call.dtype), s, True, own_bias)
        ctx.call, ctx.shape, ctx.base_dtype = call, x.shape, None if base is None else base.dtype
        ctx.save_for_backward(flat, s, weight, *parameters)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        flat, s, weight, *parameters = ctx.saved_tensors
        with no_autocast(grad.device):
            dy = rows(grad).to(call.dtype)
            ds = down(dy, call.table, call.rows, of_b=True)
            dx = None
            if ctx.needs_input_grad[0]:
                if weight is None:
                    dx = torch.zeros_like(flat)
                    up(ds, call.table, call.rows, dx, of_b=False, seeds=call.seeds)
                else:
                    dx = _product(call, dy, weight.to(call.dtype), ds, False)
                dx = dx.view(ctx.shape)
            da = gradients(flat, ds, call.table, call.rows, seeds=call.seeds)
            db = gradients(dy, s, call.table, call.rows, of_b=True)
        found: list[torch.Tensor | None] = []
        for parameter, own in zip(parameters, (g for pair in zip(da, db, strict=True) for g in pair), strict=True):
            found.append(None if own is None else own.to(parameter.dtype))
        base = None if ctx.base_dtype is None else grad.to(ctx.base_dtype)
        return dx, None, None, base, None, *found


def _product(
    call: _Call, wide: torch.Tensor, weight: torch.Tensor, s: torch.Tensor, of_b: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Y (M, N) of X and S; not of_b: dX (M, K) of dY and dS."""
    table, seeds = call.table, None if of_b else call.seeds
    product = partial(multi_product, wide, weight, s, [table], call.rows, of_b=of_b, seeds=seeds, bias=bias)
    forms = {"plain": product}
    if table.alike:
        adapters = sum(adapter is not None for adapter in table.adapters)
        tried = tails(adapters, wide, weight, table.rank, [table.n], dropped=seeds is not None)
        forms |= {tile: partial(product, tile=tile) for tile in tried}
    key = (tune.bucket(len(wide)), table.k, table.n, table.rank, wide.dtype, of_b, seeds is not None)
    return forms[tune.pick("rows of several adapters", key, forms, wide.device)]()


def multi_linear(
    x: torch.Tensor, weight: torch.Tensor | None, adapters: Adapters | AdapterTable, jobs: JobRows,
    bias: torch.Tensor | None = None, *, base: torch.Tensor | None = None, seeds: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y (…, N) of x (…, K) and a frozen weight (N, K), with the adapter of each row's job: see above.

    adapters: by job, None of a job that has none here; who calls again and again keeps their table. jobs: of x's rows;
    bias: (N,). base: in place of weight the frozen product (…, N) itself, which then has its own gradient (of a
    quantized weight, say). seeds: (jobs,) int64, by default drawn where there is dropout. An adapter without rows gets
    no gradient. Raises ValueError where the shapes do not fit.
    """
    check((weight is None) != (base is None), "expected either weight or base", weight=weight, base=base)
    table = adapters if isinstance(adapters, AdapterTable) else AdapterTable(adapters)
    frozen = base if weight is None else weight
    assert frozen is not None
    if seeds is None and table.drops:
        seeds = draw_seed(x.device, len(table.adapters))
    call = _Call(table, jobs, seeds, compute_dtype(x, frozen.dtype))
    parameters = [t for adapter in table.adapters for t in ((None, None) if adapter is None else adapter[:2])]
    return _MultiLinear.apply(x, weight, bias, base, call, *parameters)
