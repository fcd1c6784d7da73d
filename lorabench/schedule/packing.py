"""Samples into as few micro-batches as possible: first fit, and a mixed-integer programme."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lorabench.schedule.batches import Budget, MicroBatch, Sample, real

if TYPE_CHECKING:
    import numpy as np

TIME_LIMIT_S = 3.0  # of one packing; LoRAFusion's driver has the same


def first_fit(samples: Sequence[Sample], budget: Budget) -> list[MicroBatch]:
    """Each sample into the first micro-batch that takes it, in the order given."""
    made: list[list[Sample]] = []
    for sample in samples:
        place = next((held for held in made if budget.takes(held, [sample])), None)
        if place is None:
            made.append(place := [])
        place.append(sample)
    return [tuple(held) for held in made]


def first_fit_decreasing(samples: Sequence[Sample], budget: Budget) -> list[MicroBatch]:
    """The same, the longest sample first; the micro-batches come fullest first."""
    return _fullest_first(first_fit(sorted(samples, key=lambda s: -s.tokens), budget))


def fewest(samples: Sequence[Sample], budget: Budget, time_limit_s: float = TIME_LIMIT_S) -> list[MicroBatch]:
    """As few micro-batches as possible, and of these the last as empty as possible, so that what comes next may fill
    it; fullest first. What HiGHS has not solved within the time limit is first-fit-decreasing's.

    LoRAFusion solves two programmes (the fewest; then the smallest bin over every choice of bin). One does for both:
    the bins are alike, so the smallest may as well be the first, and a number of bins that cannot hold the samples is
    infeasible. The time limit makes the answer depend on the machine where it is reached.

    samples: of one global batch of each job. Raises ValueError for a budget that is padded."""
    if budget.padded:
        raise ValueError("fewest: expected a budget that packs samples end to end, not one that pads them")
    greedy, until = first_fit_decreasing(samples, budget), time.monotonic() + time_limit_s
    total = real(samples)
    for bins in range(max(1, -(-total // budget.tokens)), len(greedy) + 1):
        spare = total - (bins - 1) * budget.tokens  # what the smallest holds at least
        if bins == len(greedy) and (bins < 2 or real(greedy[-1]) <= max(spare, 0)):
            break
        found = _solved(samples, bins, budget, until - time.monotonic())
        if found and (bins < len(greedy) or real(found[-1]) < real(greedy[-1])):
            return found
    return greedy


def _fullest_first(made: Sequence[MicroBatch]) -> list[MicroBatch]:
    return sorted(made, key=lambda held: -real(held))


def _solved(samples: Sequence[Sample], bins: int, budget: Budget, time_s: float) -> list[MicroBatch] | None:
    """The packing into so many bins whose first holds least; None where there is none, or none was found in time."""
    if time_s <= 0:
        return None
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    tokens, jobs = np.array([s.tokens for s in samples]), sorted({s.job for s in samples})
    n, own = len(samples), np.array([[s.job == job for s in samples] for job in jobs], dtype=float)
    chosen, each = n * bins, np.eye(bins)  # sample s in bin b at s·bins + b, then the blocks of job j in bin b
    once = np.hstack([np.kron(np.eye(n), np.ones(bins)), np.zeros((n, len(jobs) * bins))])
    blocks = np.hstack([np.kron(own * tokens, each), -budget.multiple * np.eye(len(jobs) * bins)])
    full = np.hstack([np.zeros((bins, chosen)), budget.multiple * np.kron(np.ones(len(jobs)), each)])
    first = np.concatenate([np.kron(tokens, each[0]), np.zeros(len(jobs) * bins)])
    most: Any = np.concatenate([np.ones(chosen), np.full(len(jobs) * bins, budget.tokens // budget.multiple)])
    with _quiet():
        answer = milp(
            first,
            integrality=np.concatenate([np.ones(chosen), np.full(len(jobs) * bins, int(budget.multiple > 1))]),
            bounds=Bounds(0, most),
            constraints=[
                LinearConstraint(once, 1, 1), LinearConstraint(blocks, -np.inf, 0),
                LinearConstraint(full, -np.inf, budget.tokens),
            ],
            options={"time_limit": time_s, "mip_rel_gap": 0.15},
        )  # fmt: skip
    return None if answer.x is None else _read(samples, answer.x[:chosen].reshape(n, bins), budget)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a line that HiGHS (scipy 1.17) prints past Python and past its own options, once in some solutions."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _read(samples: Sequence[Sample], chosen: np.ndarray, budget: Budget) -> list[MicroBatch] | None:
    """What the solver chose; None where its tolerance let something through that the budget does not."""
    made = [
        tuple(s for s, at in zip(samples, chosen.argmax(1), strict=True) if at == b) for b in range(chosen.shape[1])
    ]
    kept = _fullest_first([held for held in made if held])
    return kept if all(budget.takes(held, ()) for held in kept) else None
