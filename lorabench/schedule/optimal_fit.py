"""`optimal_fit`: the window of least padding, after m-LoRA's strategy of that name.

m-LoRA slides a window of a fixed number of jobs over the jobs' next micro-batches in order of their longest sample, and
takes the window that pads least. Here the window is one of samples and as long as the budget holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample, real, rounds


def optimal_fit(jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]:
    """Of all jobs' samples of one round, in order of length, again and again the window with the smallest share of
    padding, of several the fullest. Raises ValueError as every scheduler does."""
    made = []
    for batches in rounds(jobs, budget):
        left = sorted(itertools.chain.from_iterable(batches), key=lambda s: -s.tokens)
        while left:
            start, window = min(_windows(left, budget), key=lambda found: _badness(found[1], budget))
            made.append(window)
            del left[start : start + len(window)]
    return made


def _badness(window: MicroBatch, budget: Budget) -> tuple[float, int]:
    used = budget.used(window)
    return (used - real(window)) / used, -used


def _windows(left: Sequence[Sample], budget: Budget) -> Iterator[tuple[int, MicroBatch]]:
    """(start, samples) of every window that takes no further sample, and of the longest that reaches the end."""
    for start in range(len(left)):
        end = start + 1
        while end < len(left) and budget.takes(left[start:end], [left[end]]):
            end += 1
        yield start, tuple(left[start:end])
        if end == len(left):
            return
