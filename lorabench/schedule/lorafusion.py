"""`lorafusion`: the scheduler of LoRAFusion (arXiv 2510.00206), written from its description.

Jobs go together head and tail: the one with the longest samples and the one with the shortest. The samples of each
group's global batch are packed into the fewest micro-batches. Then the last, emptiest micro-batch of a group goes into
the last one of the group behind it, where both fit and the bubble lemma needs no more empty ones for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, rounds
from lorabench.schedule.lemma import missing
from lorabench.schedule.packing import TIME_LIMIT_S, fewest, first_fit_decreasing

SPREAD = 0.25  # of a standard deviation, by which a job's mean length may fall short when its company is counted
Block = list[MicroBatch]  # the micro-batches of one group's global batch


def lorafusion(
    jobs: Jobs, budget: Budget, stages: int = 1, time_limit_s: float | None = TIME_LIMIT_S, merging: bool = True
) -> list[MicroBatch]:
    """time_limit_s: of each packing's programme; None: first-fit-decreasing alone. merging: whether the last
    micro-batches of neighbours are merged. Raises ValueError as every scheduler does."""
    together, blocks = groups(jobs, budget, stages), list[Block]()
    for batches in rounds(jobs, budget):
        own = {batch[0].job: batch for batch in batches if batch}
        for group in together:
            samples = list(itertools.chain.from_iterable(own.get(job, ()) for job in group))
            packed = first_fit_decreasing(samples, budget) if time_limit_s is None or budget.padded else fewest(
                samples, budget, time_limit_s)  # fmt: skip
            blocks += [packed] if packed else []
    if merging:
        merge(blocks, budget, stages, len(together))
    return list(itertools.chain.from_iterable(blocks))


def groups(jobs: Jobs, budget: Budget, stages: int) -> list[list[int]]:
    """One or two jobs a group, by mean length. Two go together only if the others still fill the pipeline between two
    of the group's turns; where all but the largest job cannot, every job is a group of its own."""
    lengths = {job: [n for batch in batches for n in batch] for job, batches in enumerate(jobs)}
    waiting = sorted((job for job, own in lengths.items() if own), key=lambda job: -fmean(lengths[job]))
    least = {job: _micro_batches(jobs[job], lengths[job], budget) for job in waiting}
    if sum(least.values()) - max(least.values(), default=0) < stages - 1:
        return [[job] for job in waiting]
    made = []
    while waiting:
        pair = list(dict.fromkeys((waiting[0], waiting[-1])))
        others = sum(n for job, n in least.items() if job not in pair)
        made.append(pair if others >= stages - 1 else waiting[:1])
        waiting = [job for job in waiting if job not in made[-1]]
    return made


def _micro_batches(batches: Sequence[Sequence[int]], lengths: Sequence[int], budget: Budget) -> int:
    """How many micro-batches a global batch makes at least, as a rule."""
    per_batch = len(lengths) / len(batches)
    return max(1, math.ceil(per_batch * (fmean(lengths) - SPREAD * pstdev(lengths)) / budget.tokens))


def merge(blocks: list[Block], budget: Budget, stages: int, turns: int) -> None:
    """Moves the last micro-batch of each block into the last of the next block, in place, where it fits as a whole and
    no more empty micro-batches are needed. turns: blocks after which a group comes again.

    Where the whole does not fit LoRAFusion moves single samples. That is left out: as many micro-batches remain."""
    for at in range(len(blocks) - 1):
        here, there = blocks[at], blocks[at + 1]
        if not here or not there or not budget.takes(there[-1], here[-1]) or _overtakes(here[-1], there):
            continue
        first, end = max(0, at - turns), at + turns + 2  # all that the move can bring too near to each other
        merged = [*blocks[first:at], here[:-1], [*there[:-1], there[-1] + here[-1]], *blocks[at + 2 : end]]
        if _length(merged, stages) < _length(blocks[first:end], stages):
            blocks[at], blocks[at + 1] = merged[at - first], merged[at - first + 1]


def _overtakes(moved: MicroBatch, there: Block) -> bool:
    """Whether a job that is moved is in the block with another global batch, which must not begin before this ends."""
    batches = {s.job: s.batch for s in moved}
    return any(batches.get(s.job, s.batch) != s.batch for held in there for s in held)


def _length(blocks: Sequence[Block], stages: int) -> int:
    """Micro-batches, with the empty ones."""
    stream = list(itertools.chain.from_iterable(blocks))
    return len(stream) + missing(stream, stages)
