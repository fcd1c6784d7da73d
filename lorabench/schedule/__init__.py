"""Which samples of which job go into which micro-batch, and what a pipeline makes of that. Numbers in, numbers out.

    from lorabench.schedule import SCHEDULERS, Budget, fill

    jobs = [[[300, 700, 512], [64, 900, 128]], [[1200, 80], [640, 640]]]      # tokens by job, global batch, sample
    schedule = fill(SCHEDULERS["lorafusion"](jobs, Budget(2048), stages=4), stages=4)

A scheduler is a function (jobs, budget, stages) -> micro-batches in their order; none needs torch or a GPU.

Belongs here: one file a scheduler, the packing they share, the order that a pipeline asks of them, the pipeline itself.
May import: nothing of lorabench outside this folder and contract.
"""

from __future__ import annotations

from typing import Protocol

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample
from lorabench.schedule.fast_fit import fast_fit
from lorabench.schedule.fifo import fifo
from lorabench.schedule.lemma import ScheduleError, fill, verify
from lorabench.schedule.lorafusion import lorafusion
from lorabench.schedule.optimal_fit import optimal_fit
from lorabench.schedule.residual_capacity import residual_capacity
from lorabench.schedule.staggered import staggered


class Scheduler(Protocol):
    """jobs: tokens by job, global batch and sample. budget: what a micro-batch may hold. stages: of the pipeline, 1
    without one. Returns every sample once, each job's global batches in order, no micro-batch above the budget; without
    the empty micro-batches that `fill` puts in. Raises ValueError, in one line, for a sample that fits in none."""

    def __call__(self, jobs: Jobs, budget: Budget, stages: int = 1) -> list[MicroBatch]: ...


SCHEDULERS: dict[str, Scheduler] = {
    "fifo": fifo,
    "fast_fit": fast_fit,
    "optimal_fit": optimal_fit,
    "residual_capacity": residual_capacity,
    "lorafusion": lorafusion,
    "staggered": staggered,
}

__all__ = [
    "SCHEDULERS", "Budget", "Jobs", "MicroBatch", "Sample", "ScheduleError", "Scheduler", "fast_fit", "fifo", "fill",
    "lorafusion", "optimal_fit", "residual_capacity", "staggered",
    "verify",
]  # fmt: skip
