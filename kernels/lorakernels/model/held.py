"""Operands that are parameters of the model: the form for FSDP2, which shards parameters and would read a view's
neighbours. The buffer [W | sB ; A] of linears that share an input is one frozen parameter, their weights are views of
it, and what is sharded and gathered is the buffer: no product needs a copy, and merged linears stay merged.

The buffer has to be there before `fully_shard` (`patching.before_fully_shard`); `apply` comes after it. The spare
columns travel with the weights: 2.1 % of Llama-3.1-8B. Run: python -m pytest tests/lorakernels/test_held.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..nodes.projection import Projection


class HeldLinear(nn.Linear):
    """A frozen linear whose weight lies in an operand: what was an nn.Linear before `hold`. Whoever else calls it, PEFT
    say, finds its weight while its layer is gathered."""

    operand: nn.Parameter  # the same one in every linear of the operand
    rows: slice
    held: HeldOperand

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N, K), a view. Raises RuntimeError where FSDP2 has only a part of it here."""
        if hasattr(self.operand, "device_mesh"):
            raise RuntimeError(
                "this weight lies in an operand that FSDP2 shards: it is whole while its layer computes, or between "
                "unshard() and reshard()"
            )
        # `data`: a counter of versions of its own, because adapters are written beside what autograd has saved.
        return self.operand.data[self.rows, : self.in_features]


class HeldOperand:
    """The operand of these linears, in the order of their rows; what a projection takes as the holder of its buffer."""

    def __init__(self, linears: list[HeldLinear]):
        self.linears = linears
        self._known: tuple[Any, Any] = (None, None)  # the parameter, and its data

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.linears[0].operand.shape)

    def buffer(self) -> torch.Tensor:
        """The buffer, which has to be gathered. FSDP2 gathers into one parameter again and again."""
        operand = self.linears[0]._parameters["operand"]
        if self._known[0] is not operand:
            assert operand is not None
            self._known = operand, operand.data
        return self._known[1]


def hold(linears: list[Any], projection: Projection) -> None:
    """Makes the buffer that a projection of these linears has adopted their parameter, and leaves it to them alone: a
    plan may live for as long as the traceback of an exception, and would keep every layer whole."""
    operand, held = nn.Parameter(projection.hand_over(), requires_grad=False), HeldOperand(linears)
    for linear, rows in zip(linears, projection.linear_rows, strict=True):
        weight = linear._parameters.pop("weight")
        weight.data = weight.data.new_empty(0)
        linear.__class__ = HeldLinear
        linear.operand, linear.rows, linear.held = operand, rows, held


def held_operand(linears: list[Any]) -> HeldOperand | None:
    """The operand of just these linears, in this order; None where there is none."""
    held = getattr(linears[0], "held", None)
    if not isinstance(held, HeldOperand) or len(held.linears) != len(linears):
        return None
    return held if all(a is b for a, b in zip(held.linears, linears, strict=True)) else None


def stored_weight(module: Any) -> Any:
    """The parameter that a module's weight is, or lies in."""
    return module.operand if isinstance(module, HeldLinear) else module.weight
