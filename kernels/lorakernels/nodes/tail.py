"""The form of a projection's products whose tail looks each row's adapter up (ops/multi_product.py), beside the one
GEMM whose columns grow with the slots. It takes the same S and dS, so that each product chooses for itself.

Run: python -m pytest tests/lorakernels/test_multi.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..ops.multi_product import multi_product
from ..tuning.worth_trying import tails
from .operand import Operand
from .projection import Projection


def tail_forms(
    projection: Projection, op: Operand, x: torch.Tensor, s: torch.Tensor, seeds: torch.Tensor | None = None, *,
    of_b: bool = True, out: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> dict[str, Callable[..., torch.Tensor]]:  # fmt: skip
    """By tile, Y (M, N) of x (M, K), S (M, p) and a residual (M, N), called with out (M, N), which may be the residual;
    not of_b: dX (M, K) of dY and dS, with the seeds of X's dropout. None where the kernel does not take the projection,
    or is not worth a trial."""
    if projection.slot is None or projection.fp8 is not None or projection.quantized:
        return {}
    served = {j for m, j in zip(projection.members, projection.linear_of, strict=True) if m.a is not None}
    if len(served) < len(projection.linears):
        return {}
    ranks = projection.slot_ranks
    adapters, rank = max(map(len, ranks)), max(map(max, ranks))
    tried = tails(adapters, x, op.w, rank, projection.widths, out, residual, dropped=seeds is not None)
    in_place = residual is not None and residual is out

    def run(tile: str, into: torch.Tensor | None = None) -> torch.Tensor:
        slots = list(projection.slots(x, op, seeds))
        bias = projection.total_bias(s.dtype) if of_b else None
        return multi_product(
            x, op.w, s, [own.table for own in slots], slots[0].jobs, tile, of_b=of_b, seeds=seeds, bias=bias,
            residual=into if in_place else residual, out=into,
        )  # fmt: skip

    return {tile: partial(run, tile) for tile in tried}
