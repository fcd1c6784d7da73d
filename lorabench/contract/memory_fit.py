"""The memory of a step as a function of its micro-batch, fitted to a few steps. docs/batch-size.md has the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorabench.contract.batch import Batch

GIB = 1 << 30
TOKENS, JOBS = "tokens", "jobs"  # what an edge may be of
MISSED = 0.01  # relative error of a straight line at one of its own points, above which it is none


@dataclass(frozen=True)
class Load:
    """What of a micro-batch its memory depends on: positions, padding included, and the squares of its rows' lengths,
    which a mask or an attention that keeps its scores takes. Every position has logits in transformers' loss."""

    positions: int
    squares: int

    @classmethod
    def of(cls, batch: Batch) -> Load:
        rows, width = batch.inputs["input_ids"].shape
        return cls(rows * width, rows * width * width)


Measured = tuple[Load, int]  # what was tried, and its peak bytes


@dataclass(frozen=True)
class Fit:
    """Peak bytes = static + per_position x positions + per_square x squares. None of the three is negative, so a larger
    load is never predicted to take less."""

    static: float
    per_position: float
    per_square: float = 0.0

    def __call__(self, load: Load) -> float:
        return self.static + self.per_position * load.positions + self.per_square * load.squares


def fit(measured: Sequence[Measured]) -> Fit:
    """The least squares of the relative errors over the last three of two steps or more, from the smallest to the
    largest: a small step may have its peak in another place. The squares come in only where the steps are not on a
    line: over rows of one width both say the same."""
    latest = measured[-3:]
    return _least_squares(latest, squares=len(latest) > 2 and not on_a_line(latest))


def on_a_line(measured: Sequence[Measured]) -> bool:
    """Whether a straight line over the positions meets each of the steps."""
    line = _least_squares(measured, squares=False)
    return all(abs(line(load) / peak - 1) <= MISSED for load, peak in measured)


def _least_squares(measured: Sequence[Measured], squares: bool) -> Fit:
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([[1, load.positions, load.squares] for load, _ in measured], dtype=float)
    rows = rows if squares else rows[:, :2]
    scale = rows.max(axis=0)  # of one order of magnitude, so that none is lost in rounding
    peaks = np.array([peak for _, peak in measured], dtype=float)
    weights, _ = nnls(rows / scale / peaks[:, None], np.ones(len(peaks)))
    return Fit(*(float(w) for w in weights / scale))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1 … `most` that fits, by bisection; 1 where none does. What fits a larger memory too never makes
    the answer smaller: where two searches part, the one with more memory goes on above the other."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Edge:
    """`of`: what was made fewer until a step ran, the tokens of a sample or the jobs. Of `asked` there were too many;
    `fits`, the most with which it ran, 0 where not even the fewest did; `too_many`, the fewest with which it did not.
    GiB: what the device had for the whole arm; what the step took, and what the model had said of it. `processes`: how
    many would have room that train one job each on a base of its own, by what one job takes."""

    of: str
    asked: int
    fits: int
    too_many: int
    room_gib: float
    measured_gib: float | None = None
    predicted_gib: float | None = None
    processes: int | None = None

    def __str__(self) -> str:
        if self.of == JOBS:
            return f"{self.fits} jobs fit, {self.too_many} do not" if self.fits else "not even one of its jobs fits"
        if not self.fits:
            return f"not even samples of {self.too_many:,} tokens fit"
        return f"samples of {self.fits:,} tokens fit, of {self.too_many:,} they do not"
