"""One frozen linear under rows of several adapters, as one autograd node: the frozen weight's product for all rows at
once, then what each row's own adapter adds (ops/multi_lora.py).

    y = x · Wᵀ + bias + scale · dropout(x) · Aᵀ · Bᵀ, with A, B, scale and dropout of the row's job

Run: python -m pytest tests/lorakernels/test_multi_linear.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..ops.dropout import draw_seed
from ..ops.job_rows import JobRows
from ..ops.multi_lora import Adapters, AdapterTable, down, gradients, up
from ..runtime import check, compute_dtype, no_autocast, rows


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
            if weight is None:  # somebody else's product, which others may hold: not written into
                assert base is not None
                y = rows(base).to(call.dtype).clone()
            else:
                y = F.linear(flat, weight.to(call.dtype), None if bias is None else bias.to(call.dtype))
            s = down(flat, call.table, call.rows, seeds=call.seeds)
            up(s, call.table, call.rows, y)
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
                dx = torch.zeros_like(flat) if weight is None else dy @ weight.to(call.dtype)
                up(ds, call.table, call.rows, dx, of_b=False, seeds=call.seeds)
                dx = dx.view(ctx.shape)
            da = gradients(flat, ds, call.table, call.rows, seeds=call.seeds)
            db = gradients(dy, s, call.table, call.rows, of_b=True)
        found: list[torch.Tensor | None] = []
        for parameter, own in zip(parameters, (g for pair in zip(da, db, strict=True) for g in pair), strict=True):
            found.append(None if own is None else own.to(parameter.dtype))
        base = None if ctx.base_dtype is None else grad.to(ctx.base_dtype)
        return dx, None, None, base, None, *found


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
