"""Samples, micro-batches, and what a micro-batch may hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Jobs = Sequence[Sequence[Sequence[int]]]  # tokens of every sample, by job, global batch and place in it


class Sample(NamedTuple):
    """One sample by its place: the job's number, the number of its global batch, its place in that, its tokens."""

    job: int
    batch: int
    place: int
    tokens: int


MicroBatch = tuple[Sample, ...]  # () is an empty one: a slot of the pipeline in which nothing is computed


@dataclass(frozen=True)
class Budget:
    """What a micro-batch may hold: `tokens`, padding included. Samples lie end to end, and the rows of each job are
    filled up to a `multiple` (LoRAFusion's kernels ask for 128, ours for none). padded: the samples lie side by side
    and all are as wide as the longest, filled up to a multiple, as without packing.

    Raises ValueError for what is no budget."""

    tokens: int
    multiple: int = 1
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "multiple"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number above 0")

    def used(self, samples: Iterable[Sample]) -> int:
        """Positions that these samples take in one micro-batch, padding included."""
        if self.padded:
            widths = [self._up(sample.tokens) for sample in samples]
            return len(widths) * max(widths, default=0)
        rows: dict[int, int] = {}
        for sample in samples:
            rows[sample.job] = rows.get(sample.job, 0) + sample.tokens
        return sum(map(self._up, rows.values()))

    def _up(self, tokens: int) -> int:
        return -(-tokens // self.multiple) * self.multiple

    def takes(self, held: Sequence[Sample], more: Sequence[Sample]) -> bool:
        """Whether a micro-batch that holds some samples can take more: within the tokens, and of each job only one
        global batch, whose update comes when the micro-batch that ends it is done."""
        batches: dict[int, int] = {}
        one_batch = all(batches.setdefault(s.job, s.batch) == s.batch for s in (*held, *more))
        return one_batch and self.used((*held, *more)) <= self.tokens


def real(samples: Iterable[Sample]) -> int:
    """Tokens without padding."""
    return sum(sample.tokens for sample in samples)


def rounds(jobs: Jobs, budget: Budget) -> Iterator[list[list[Sample]]]:
    """The first global batch of every job that has one, then every second one, and so on; by job, in the jobs' order.

    Raises ValueError for a sample that the budget cannot hold or that has no tokens."""
    made = [
        [[Sample(job, n, place, tokens) for place, tokens in enumerate(batch)] for n, batch in enumerate(batches)]
        for job, batches in enumerate(jobs)
    ]
    for sample in (s for batches in made for batch in batches for s in batch):
        _check(sample, budget)
    for n in range(max(map(len, made), default=0)):
        yield [batches[n] for batches in made if n < len(batches)]


def _check(sample: Sample, budget: Budget) -> None:
    where = f"sample {sample.place} of job {sample.job}, global batch {sample.batch}"
    if sample.tokens < 1:
        raise ValueError(f"{where} has {sample.tokens} tokens; expected at least one")
    if (used := budget.used([sample])) > budget.tokens:
        padding = f" ({used} with padding)" if used > sample.tokens else ""
        raise ValueError(f"{where} has {sample.tokens} tokens{padding}; a micro-batch holds at most {budget.tokens}")
