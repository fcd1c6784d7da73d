"""`fifo`: samples as they come. m-LoRA calls it Trivial: every job that runs contributes, in the order of arrival."""

from __future__ import annotations

import itertools

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample, rounds


def fifo(jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]:
    """Every job's first global batch in the jobs' order, then every second one, …; a micro-batch ends where the next
    sample does not fit. Raises ValueError as every scheduler does."""
    made: list[list[Sample]] = []
    for sample in itertools.chain.from_iterable(itertools.chain.from_iterable(rounds(jobs, budget))):
        if not made or not budget.takes(made[-1], [sample]):
            made.append([])
        made[-1].append(sample)
    return [tuple(held) for held in made]


def one_job_each(jobs: Jobs, samples: int) -> list[MicroBatch]:
    """So many samples of one job a micro-batch, whatever their tokens; of each round the jobs' first micro-batches in
    turn, then their second ones. So train Megatron-LM (one job) and mLoRA's pipeline (several), as LoRAFusion runs
    them.

    Raises ValueError for a number of samples below 1."""
    if samples < 1:
        raise ValueError(f"samples={samples}: expected at least 1 in a micro-batch")
    whole = Budget(max((n for batches in jobs for batch in batches for n in batch), default=1))
    made = []
    for batches in rounds(jobs, whole):
        parts = [[tuple(own[at : at + samples]) for at in range(0, len(own), samples)] for own in batches]
        made += [part for turn in itertools.zip_longest(*parts) for part in turn if part]
    return made
