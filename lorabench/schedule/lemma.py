"""What a pipeline without a flush asks of a schedule, and the check of a whole schedule.

Under 1F1B with S stages the first stage has begun the forward of micro-batch i + S − 1 before the backward of
micro-batch i reaches it. So between the last micro-batch of a job's global batch and the first of its next one there
must be S − 1 others: else the forward would use weights of before the update. LoRAFusion calls this the bubble lemma.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lorabench.schedule.batches import Budget, Jobs, MicroBatch, Sample


class ScheduleError(ValueError):
    """A schedule that trains something else than its jobs; the message says where."""


def fill(schedule: Sequence[MicroBatch], stages: int) -> list[MicroBatch]:
    """The schedule with as many empty micro-batches as the lemma needs, each before the one that would come too
    early."""
    made: list[MicroBatch] = []
    track = _Track()
    for held in schedule:
        made += [()] * max(0, track.earliest(held, stages) - len(made))
        track.add(held, len(made))
        made.append(held)
    return made


def missing(schedule: Sequence[MicroBatch], stages: int) -> int:
    """How many empty micro-batches `fill` would put in."""
    return len(fill(schedule, stages)) - len(schedule)


def verify(schedule: Sequence[MicroBatch], jobs: Jobs, budget: Budget | None = None, stages: int = 1) -> None:
    """Whether every sample is there exactly once, no micro-batch holds more than its budget or two global batches of a
    job, each job's global batches come in order, and the lemma holds. budget None: micro-batches of any size.

    Raises ScheduleError."""
    for complaint in _complaints(schedule, jobs, budget, stages):
        raise ScheduleError(complaint)


def _complaints(schedule: Sequence[MicroBatch], jobs: Jobs, budget: Budget | None, stages: int) -> Iterator[str]:
    wanted = Counter(
        Sample(job, n, place, tokens)
        for job, batches in enumerate(jobs) for n, batch in enumerate(batches) for place, tokens in enumerate(batch)
    )  # fmt: skip
    held = Counter(sample for batch in schedule for sample in batch)
    yield from (
        f"{sample} is there {held[sample]} times, expected {n}" for sample, n in wanted.items() if held[sample] != n
    )
    yield from (f"{sample} is of none of the jobs" for sample in held if sample not in wanted)
    track = _Track()
    for at, batch in enumerate(schedule):
        if budget and (used := budget.used(batch)) > budget.tokens:
            yield f"micro-batch {at} holds {used} tokens, expected at most {budget.tokens}"
        if len({(s.job, s.batch) for s in batch}) > len({s.job for s in batch}):
            yield f"micro-batch {at} holds two global batches of one job"
        late = [s for s in batch if s.batch < track.batch.get(s.job, 0)]
        yield from (f"micro-batch {at} holds {s}, after a later global batch of its job" for s in late)
        if (earliest := track.earliest(batch, stages)) > at:
            yield f"micro-batch {at} begins a global batch; with {stages} stages expected it at {earliest} or later"
        track.add(batch, at)


class _Track:
    """Of each job the global batch that it is in, where its last micro-batch stands, and where the last of the one
    before stands."""

    def __init__(self) -> None:
        self.batch: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def earliest(self, held: MicroBatch, stages: int) -> int:
        """The first place at which this micro-batch may stand."""
        ends = [
            self._before.get(s.job) if self.batch.get(s.job) == s.batch else self._last.get(s.job) for s in held
        ]  # fmt: skip
        return max((end + stages for end in ends if end is not None), default=0)

    def add(self, held: MicroBatch, at: int) -> None:
        for s in held:
            if self.batch.get(s.job, s.batch) != s.batch:
                self._before[s.job] = self._last[s.job]
            self.batch[s.job], self._last[s.job] = s.batch, at
