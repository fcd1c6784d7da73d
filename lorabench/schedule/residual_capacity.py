"""`residual_capacity`: jobs are put together by what capacity they leave. The idea is tLoRA's (arXiv 2602.07263), the
rule below is ours: a job that fills its micro-batches gains nothing from company and trains alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import fmean

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample, rounds
from lorabench.schedule.packing import first_fit_decreasing

FULL = 0.05  # of the capacity: a job that leaves less than this is full


def residual_capacity(jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]:
    """Jobs in groups, and round by round the micro-batches of each group, packed by first-fit-decreasing. Raises
    ValueError as every scheduler does."""
    every = list(rounds(jobs, budget))
    groups = _groups([[batch for batches in every for batch in batches if batch and batch[0].job == job]
                      for job in range(len(jobs))], budget)  # fmt: skip
    made = []
    for batches in every:
        own = {batch[0].job: batch for batch in batches if batch}
        for group in groups:
            made += first_fit_decreasing(list(itertools.chain.from_iterable(own.get(job, ()) for job in group)), budget)
    return made


def residual(batches: Iterable[Sequence[Sample]], budget: Budget) -> float:
    """The share of its micro-batches' capacity that a job, alone, leaves over in the mean; 0 for a job of nothing."""
    left = []
    for batch in batches:
        packed = first_fit_decreasing(batch, budget)
        left.append(1 - sum(map(budget.used, packed)) / (len(packed) * budget.tokens))
    return fmean(left) if left else 0.0


def _groups(jobs: Sequence[Sequence[Sequence[Sample]]], budget: Budget) -> list[list[int]]:
    """The job that leaves most takes, one after the other, those by which the group needs fewer micro-batches than
    apart; then the one that leaves most of the others; full ones stay alone."""
    leaves = {job: residual(batches, budget) for job, batches in enumerate(jobs)}
    waiting, groups = sorted(leaves, key=lambda job: -leaves[job]), []
    while waiting:
        group = [waiting.pop(0)]
        for job in list(waiting):
            if leaves[group[0]] > FULL and leaves[job] > FULL and _saves(jobs, group, job, budget):
                group.append(job)
                waiting.remove(job)
        groups.append(group)
    return groups


def _saves(jobs: Sequence[Sequence[Sequence[Sample]]], group: Sequence[int], job: int, budget: Budget) -> bool:
    apart = _needed(jobs, group, budget) + _needed(jobs, [job], budget)
    return _needed(jobs, [*group, job], budget) < apart


def _needed(jobs: Sequence[Sequence[Sequence[Sample]]], group: Sequence[int], budget: Budget) -> int:
    together = itertools.zip_longest(*(jobs[job] for job in group), fillvalue=())
    return sum(len(first_fit_decreasing([s for batch in batches for s in batch], budget)) for batches in together)
