"""What packing, grouping or any other way to batch buys, predicted from the samples' lengths.

    time(batches) = step + micro_batch·M + token·P + pair·A        gain = time(padded) / time(other)

M: micro-batches. P: positions computed, padding included. A: pairs of positions that attention computes: the whole
square of each row where it is given a mask, half of it where it is causal without one; where it knows the samples'
borders, half of each sample's own square. With the cost of a token alone the gain is P(padded) / P(other), which no
step reaches whose other costs stay: it is what a table of padding promises. `fitted` finds the other
costs by the gains of steps that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, PositiveInt

LEAST_SEEN = 4  # pairs of different shape, for three costs beside a token's


class MicroBatch(NamedTuple):
    """One forward and backward: so many rows of one width, and the lengths of the samples in them, in tokens."""

    rows: PositiveInt
    width: PositiveInt
    lengths: tuple[PositiveInt, ...]

    @property
    def positions(self) -> int:
        return self.rows * self.width

    @property
    def real(self) -> int:
        return sum(self.lengths)

    @property
    def masked(self) -> bool:
        """Whether attention needs a mask beside causality: for padding, or for several samples in a row."""
        return self.real < self.positions or len(self.lengths) > self.rows

    def pairs(self, knows_borders: bool) -> float:
        """Pairs of positions for which attention computes a score."""
        if knows_borders:
            return sum(n * n for n in self.lengths) / 2
        return self.rows * self.width**2 * (1.0 if self.masked else 0.5)


class Costs(NamedTuple):
    """In any one unit: FLOPs, or the cost of a token as 1."""

    step: float = 0.0
    micro_batch: float = 0.0
    token: float = 1.0
    pair: float = 0.0


BY_TOKENS = Costs()


class Batching(NamedTuple):
    """The micro-batches of one step. knows_borders: whether attention skips what lies across two samples, and padding,
    as kernels for samples of varying lengths do; else it computes all of it and masks it."""

    batches: tuple[MicroBatch, ...]
    knows_borders: bool = False

    @property
    def efficiency(self) -> float:
        """Real tokens / positions computed."""
        return sum(b.real for b in self.batches) / sum(b.positions for b in self.batches)

    @property
    def amounts(self) -> tuple[float, float, float, float]:
        """What each of the four costs is multiplied with."""
        pairs = sum(b.pairs(self.knows_borders) for b in self.batches)
        return 1.0, float(len(self.batches)), float(sum(b.positions for b in self.batches)), pairs

    def time(self, costs: Costs) -> float:
        return sum(cost * amount for cost, amount in zip(costs, self.amounts, strict=True))


class Layout(BaseModel):
    """What a record notes for a prediction: the step's own micro-batches, and those that padding would have made of the
    same samples; whether attention knows the samples' borders; the FLOPs of a token and of a pair of positions, forward
    and backward; and of what sort the workload's lengths are (None: those of real text)."""

    padded: list[MicroBatch] = Field(min_length=1)
    own: list[MicroBatch] = Field(min_length=1)
    knows_borders: bool
    token_flop: float
    pair_flop: float
    lengths: str | None  # "measured" or "approximate"

    @property
    def both(self) -> tuple[Batching, Batching]:
        """(padded, own)."""
        reference, other = (Batching(tuple(batches), self.knows_borders) for batches in (self.padded, self.own))
        return reference, other

    @property
    def flops(self) -> Costs:
        return Costs(token=self.token_flop, pair=self.pair_flop)


def padded(lengths: Sequence[int], batch_size: int, knows_borders: bool = False) -> Batching:
    """Plain batches: so many samples side by side, in order, each batch as wide as its longest sample."""
    parts = [tuple(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size)]
    return Batching(tuple(MicroBatch(len(own), max(own), own) for own in parts), knows_borders)


def gain(reference: Batching, other: Batching, costs: Costs = BY_TOKENS) -> float:
    """How many times as fast the other is, by these costs."""
    return reference.time(costs) / other.time(costs)


def fitted(seen: Sequence[tuple[Batching, Batching, float]]) -> Costs | None:
    """The costs, none below zero, by which these pairs (reference, other) have the gains that were measured, in units
    of a token's cost; None where there are too few different pairs to tell three costs from a token's.

    Fitted to ratios and not to times: the arms of a pair were measured together, and a machine that is slower in one
    cell than in another is so for both. One outlier does not decide (a soft loss on the logarithms).
    """
    import numpy as np
    from scipy.optimize import least_squares

    if len({(reference.amounts, other.amounts) for reference, other, _ in seen}) < LEAST_SEEN:
        return None
    both = np.array([[reference.amounts, other.amounts] for reference, other, _ in seen])
    logs = np.log([ratio for *_, ratio in seen])
    size = both.mean(axis=(0, 1))
    unit = size[2] / size  # the cost at which each takes as long as the tokens of a step do

    def off(free: Any) -> Any:
        times = both @ (unit * np.insert(free, 2, 1.0))
        return np.log(times[:, 0] / times[:, 1]) - logs

    found = least_squares(off, np.full(3, 0.1), bounds=(0, np.inf), loss="soft_l1", f_scale=0.1)
    return Costs(*(float(cost) for cost in unit * np.insert(found.x, 2, 1.0)))
