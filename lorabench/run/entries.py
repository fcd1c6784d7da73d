"""What the runner knows of a family's arms and seats while it is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorabench.contract.family import REFERENCE, TWIN, Family, Stack
from lorabench.contract.memory_fit import Edge
from lorabench.measure.seat import Ended, Ready
from lorabench.measure.trial import Trial
from lorabench.record.schema import Numerics, Telemetry
from lorabench.run.journal import Turn
from lorabench.run.process import Desk

# Called with the family and what became of the cells whose arm did not come to sit: the family as it then is.
Replan = Callable[[Family, Mapping[str, str]], Family]


def as_planned(family: Family, outcomes: Mapping[str, str]) -> Family:
    """Whatever becomes of an arm, the others stay as they are."""
    return family


LEAST_ROUNDS = 6  # fewer support no verdict
NO_TIME = "the time was up before its first round"


class Limits(NamedTuple):
    """What a family may take. By time.monotonic(): `stop_at`, after which no round begins, and `seat_by`, after which
    no candidate is seated for the first time. `seat_s`: seconds in which each has to be seated. `rounds`: how many, in
    place of the trials that its cells ask for; asked when all are seated, with the seconds that a round will take.
    `stays`: whether who shared a seat stays there, for another family of the same question."""

    stop_at: float = math.inf
    seat_by: float = math.inf
    seat_s: float = math.inf
    rounds: Callable[[float], int] | None = None
    stays: bool = False


UNLIMITED = Limits()


class Suspicion(Exception):
    """Something is wrong that several arms can have done; the text says what. `among`: who, where not everybody."""

    def __init__(self, reason: str, among: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.among = set(among)


@dataclass
class Entry:
    """An arm as the runner sees it."""

    stack: Stack
    status: str = "ok"
    reason: str | None = None
    rank: int | None = None
    log: str | None = None
    disturbed: bool = False
    ready: Ready | None = None
    numerics: dict[str, Numerics] = field(default_factory=dict)
    # Of each process and rank, by job; of processes that train a job each, all jobs together.
    evidence: list[dict[str, Any]] = field(default_factory=list)
    beside: tuple[str, ...] = (REFERENCE, TWIN)  # what may sit with it in a later block, as far as it is known to fit
    turns: list[Turn] = field(default_factory=list)
    stopped_after: int | None = None  # rounds, where the time was up before the last one
    trials: list[Trial] = field(default_factory=list)  # those that count
    unseen_s: float = 0.0  # that all its turns took longer than its answers can explain: below zero of an honest arm
    slowest_rank: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    ended: Ended | None = None
    edge: Edge | None = None  # of one that ran out of memory: how large a trial would have fitted
    telemetry: Telemetry | None = None
    millijoules: list[tuple[float, float, int]] = field(default_factory=list)  # of each turn: mJ, seconds, steps
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.stack.name

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def warm_ms(self) -> float:
        """What a trial takes: the shortest of the last, because others may have been prepared beside it."""
        assert self.ready is not None
        return min(self.ready.warm_ms[-3:])

    @property
    def prepared_s(self) -> float:
        """Seconds until its first round, but for the gate, of all its processes."""
        return sum(self.seconds.get(part, 0.0) for part in ("build", "warmup", "profile"))

    @property
    def step_bytes(self) -> int:
        """Of the device, that its step takes above what it holds between two, unusable pieces included."""
        memory = self.ready.memory if self.ready else None
        return max(0, max(memory.peak or 0, memory.reserved or 0) - (memory.static or 0)) if memory else 0

    def warmed(self, ms: float) -> None:
        """One more trial that does not count."""
        assert self.ready is not None
        self.ready.warm_ms.append(ms)

    def spent(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def leave(self, status: str, reason: str, rank: int | None = None, log: str | None = None) -> None:
        """Without times: what it took is of no use."""
        self.status, self.reason, self.rank, self.log = status, reason, rank, log
        self.turns.clear()


@dataclass
class Seated:
    """A seat: its number in the records, its process, who sits there, and each one's evidence of this process (a list:
    one a rank)."""

    number: int
    desk: Desk
    alone: bool
    opened: bool = False  # it has imported what it needs
    active: bool = True  # it takes part in the rounds now
    warm: bool = False  # its arms had a turn that does not count
    cached: int = 0  # bytes of the device that its turns have left with it, beside what it keeps
    names: list[str] = field(default_factory=list)
    evidence: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    again: Seated | None = None  # what was started in its place

    @property
    def now(self) -> Seated:
        return self.again.now if self.again else self


@dataclass
class Staying:
    """The seat that most arms of a family shared, after that family's end, and who sits there: the next family of the
    same question does not prepare them again."""

    family: Family
    seat: Seated
    entries: list[Entry]

    def suits(self, family: Family) -> bool:
        """Whether a family's arms of the same names are these, and as many processes make a seat of it."""
        own = self.family
        return (own.question, own.ranks, own.gpus) == (family.question, family.ranks, family.gpus)


class Left(Exception):
    """The arm whose turn it was is gone."""


@dataclass(frozen=True)
class Taking:
    """Which rounds an arm takes: the first `counts` of `order`."""

    order: Sequence[int]
    counts: dict[str, int]

    @property
    def common(self) -> list[int]:
        """Those that all take."""
        return sorted(self.order[: min(self.counts.values(), default=len(self.order))])

    def takes(self, entry: Entry, number: int) -> bool:
        return number in self.order[: self.counts.get(entry.name, len(self.order))]


def verdict_s(like: Entry, processes: int, trials: int, beside: Sequence[Entry] = ()) -> float:
    """Seconds until an arm comes to a verdict beside these, which is taken to be prepared as fast as this one was in
    each of so many processes, and to step as fast, trials times a turn: of its rounds the first does not count, and the
    last begins."""
    a_round = trials * (like.warm_ms + sum(e.warm_ms for e in beside)) / 1000
    return like.prepared_s / processes + LEAST_ROUNDS * a_round
