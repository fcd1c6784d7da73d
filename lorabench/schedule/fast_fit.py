"""`fast_fit`: greedy into a token budget, as m-LoRA names its third strategy; its code was never published."""

from __future__ import annotations

import itertools

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, rounds
from lorabench.schedule.packing import first_fit


def fast_fit(jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]:
    """Of all jobs' global batches of one round each sample, in order of arrival, into the first micro-batch that takes
    it. Raises ValueError as every scheduler does."""
    return [
        held
        for batches in rounds(jobs, budget)
        for held in first_fit(list(itertools.chain.from_iterable(batches)), budget)
    ]
