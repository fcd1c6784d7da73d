"""A pipeline, event by event: how long each stage or rank waits. Numbers in, numbers out.

Under 1F1B each stage does its warm-up forwards, as many as there are stages behind it, and then one forward and one
backward in turn; under GPipe all forwards, then all backwards; interleaved (Megatron-LM), each rank has every p-th
stage of v · p and goes through its stages p micro-batches at a time. A forward waits for the stage before, a backward
for the stage behind. With a flush, every stage ends all that it has before the next part begins, as Megatron-LM does at
each optimizer step; without one, the micro-batches of all jobs follow each other, as mLoRA and LoRAFusion train, and
only the bubble lemma keeps them apart (schedule/lemma.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lorabench.contract.names import nearest
from lorabench.schedule.batches import MicroBatch

Milliseconds = Sequence[Sequence[float]]  # of each micro-batch, of each stage


ORDERS = ("1f1b", "gpipe", "interleaved")


class Bubbles(NamedTuple):
    """What a pipeline did: its milliseconds, and of each stage (of each rank, where ranks have several) those in which
    it computed and those between the beginning of its first and the end of its last piece of work."""

    total_ms: float
    busy_ms: tuple[float, ...]
    span_ms: tuple[float, ...]

    @property
    def by_stage(self) -> tuple[float, ...]:
        """Idle over total, of each stage; 0 where nothing was done."""
        return tuple(1 - busy / self.total_ms if self.total_ms else 0.0 for busy in self.busy_ms)

    @property
    def ratio(self) -> float:
        """Idle over total, all stages together."""
        return sum(self.by_stage) / len(self.by_stage)

    @property
    def without_ramp(self) -> float:
        """The same between each stage's first and last work: what a run without end has."""
        return 1 - sum(self.busy_ms) / sum(self.span_ms) if sum(self.span_ms) else 0.0


class _Work(NamedTuple):
    """One piece of work: a micro-batch's forward in a stage, or its backward with the updates that follow it."""

    batch: int
    backward: bool
    stage: int


def pipeline(
    forward_ms: Milliseconds,
    backward_ms: Milliseconds,
    update_ms: Milliseconds | None = None,
    transfer_ms: float = 0.0,
    flush_after: Sequence[int] = (),
    order: str = "1f1b",
    ranks: int | None = None,
) -> Bubbles:
    """Every micro-batch through every stage. update_ms: what each stage spends on optimizer steps behind a
    micro-batch's backward. transfer_ms: from one stage to the next. flush_after: numbers of the micro-batches behind
    which the pipeline is emptied. order: one of ORDERS. ranks: stage s is on rank s % ranks; None: a stage a rank.

    Raises ValueError for tables of different shapes, no stage, a time below zero, or an order that cannot be."""
    count, stages = _shape(forward_ms, backward_ms, update_ms)
    if transfer_ms < 0:
        raise ValueError(f"transfer_ms={transfer_ms}: expected no time below zero")
    ranks = ranks or stages
    if order not in ORDERS:
        raise nearest("order", order, ORDERS)
    if stages % ranks or (stages > ranks and order != "interleaved"):
        raise ValueError(f"order={order}, {stages} stages on {ranks} ranks: expected a stage a rank, or interleaved")
    ends = sorted({n + 1 for n in flush_after if n + 1 < count} | {count})
    state = _State(ranks, stages, order)
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        state.run(range(begin, end), forward_ms, backward_ms, update_ms, transfer_ms)
    total = max(state.free, default=0.0)
    spans = (free - (start or 0.0) for free, start in zip(state.free, state.begun, strict=True))
    return Bubbles(total, tuple(state.busy), tuple(spans))


class _State:
    """Of each rank until when it computes, for how long it has computed, and since when."""

    def __init__(self, ranks: int, stages: int, order: str) -> None:
        self.stages, self.order = stages, order
        self.free, self.busy = [0.0] * ranks, [0.0] * ranks
        self.begun: list[float | None] = [None] * ranks

    def run(
        self,
        batches: range,
        forward: Milliseconds,
        backward: Milliseconds,
        update: Milliseconds | None,
        transfer: float,
    ) -> None:
        """One part of the schedule, which begins when every stage has ended the one before."""
        ranks, ends = len(self.free), dict[_Work, float]()
        self.free = [max(self.free)] * ranks
        waiting = [deque(_order(self.order, batches, rank, ranks, self.stages)) for rank in range(ranks)]
        while any(waiting):
            before = len(ends)
            for rank, work in enumerate(waiting):
                while work and (ready := self._ready(ends, work[0], transfer)) is not None:
                    now, at = work.popleft(), max(self.free[rank], ready)
                    took = (backward if now.backward else forward)[now.batch][now.stage]
                    took += update[now.batch][now.stage] if update and now.backward else 0.0
                    if took and self.begun[rank] is None:
                        self.begun[rank] = at
                    self.busy[rank] += took
                    self.free[rank] = ends[now] = at + took
            if len(ends) == before:
                raise ValueError(f"{len(batches)} micro-batches in the order {self.order} wait for each other for ever")

    def _ready(self, ends: dict[_Work, float], work: _Work, transfer: float) -> float | None:
        """When what this work waits for has arrived; None while that is not known."""
        source = work.stage + 1 if work.backward else work.stage - 1
        if 0 <= source < self.stages:
            end = ends.get(work._replace(stage=source))
            return None if end is None else end + transfer
        return ends.get(work._replace(backward=False)) if work.backward else 0.0


def _order(order: str, batches: range, rank: int, ranks: int, stages: int) -> list[_Work]:
    """A rank's work, in its order."""
    each = stages // ranks
    forward, backward = (_looped(batches, back, rank, ranks, each) for back in (False, True))
    if order == "gpipe":
        first = len(forward)
    elif order == "interleaved":
        first = (each - 1) * _a_round(batches, ranks) + 2 * (ranks - 1 - rank)
    else:
        first = ranks - 1 - rank
    first = min(first, len(forward))
    made = forward[:first]
    for one, other in zip(forward[first:], backward, strict=False):
        made += [one, other]
    return made + backward[len(forward) - first :]


def _looped(batches: range, back: bool, rank: int, ranks: int, each: int) -> list[_Work]:
    """All forwards (`back`: backwards) of a rank: a round of micro-batches through its first (last) stage, the same
    round through the next one, and so on."""
    a_round = _a_round(batches, ranks)
    stages = [rank + n * ranks for n in range(each)]
    return [
        _Work(n, back, stage)
        for start in range(batches.start, batches.stop, a_round)
        for stage in (reversed(stages) if back else stages)
        for n in batches[start - batches.start : start - batches.start + a_round]
    ]


def _a_round(batches: range, ranks: int) -> int:
    """How many micro-batches an interleaved rank takes through one of its stages before it turns to the next: as torch
    has it, of equal rounds as many as there are whole ones of `ranks`."""
    return max(1, -(-len(batches) // max(1, len(batches) // ranks)))


def _shape(forward: Milliseconds, backward: Milliseconds, update: Milliseconds | None) -> tuple[int, int]:
    tables = [table for table in (forward, backward, update) if table is not None]
    stages = {len(row) for table in tables for row in table}
    if len({len(table) for table in tables}) > 1 or len(stages) > 1 or 0 in stages or not forward:
        raise ValueError("expected the times of at least one micro-batch, each of the same stages, in every table")
    if any(ms < 0 for table in tables for row in table for ms in row):
        raise ValueError("expected no time below zero")
    return len(forward), stages.pop()


def ends_of_batches(schedule: Sequence[MicroBatch]) -> dict[int, list[int]]:
    """Which jobs' optimizer steps follow which micro-batch: the one in which a global batch of theirs ends."""
    last = {(s.job, s.batch): at for at, held in enumerate(schedule) for s in held}
    made: dict[int, list[int]] = {}
    for (job, _), at in last.items():
        made.setdefault(at, []).append(job)
    return made


def flushed_bubble(stages: int, micro_batches: int) -> float:
    """GPipe's and 1F1B's ratio with a flush behind each global batch, of equal micro-batches: (D - 1) / (N + D - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def shared_bubble(stages: int, micro_batches: int, adapters: int) -> float:
    """mLoRA's ratio where L adapters of N equal micro-batches each follow each other without a flush:
    max((D - 1 + N - L·N) / (D + N - 1), 0)."""
    return max((stages - 1 + micro_batches - adapters * micro_batches) / (stages + micro_batches - 1), 0.0)
