"""Seats whose arms only say how long they take, for tests of what the sweep's own process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import MACHINE, cells

from lorabench.contract.family import Family, Stack, families
from lorabench.contract.machine import Machine
from lorabench.measure.judging.witness import Observed
from lorabench.measure.kind import ROUNDS, TURN
from lorabench.measure.seat import Ended, Failed, Made, Ready
from lorabench.measure.trial import Trial
from lorabench.record.schema import ArmMemory, ArmRecord
from lorabench.record.store import read_sessions
from lorabench.run.entries import UNLIMITED, Limits
from lorabench.run.journal import Journal
from lorabench.run.local_queue import LocalQueue
from lorabench.run.rounds import Rounds
from lorabench.run.runner import Runner

PHASES = ("forward", "backward", "step")


class Script:
    """Workers in whose seats it happens as it is written here: milliseconds of each arm's trials (10 where it is not
    named), what fails and when, bytes. `heard` is every call, in order."""

    method = "spawn"

    def __init__(
        self, ms: dict[str, float] | None = None, room: float = 1e9, fails: dict[Any, Any] | None = None,
        refuses: Callable[[Stack], Failed | None] = lambda stack: None, ready: Callable[[str], Ready] | None = None,
        answers: dict[Any, list[Any]] | None = None,
    ) -> None:  # fmt: skip
        """`refuses`: with what an arm does not come to sit. `ready`: how it does. `answers`: in place of the right
        ones, by call."""
        self.ms, self.room, self.fails, self.refuses = ms or {}, room, fails or {}, refuses
        self.ready, self.answers = ready or (lambda name: Ready()), answers or {}
        self.observed: dict[str, Any] = {}
        self.phases: tuple[str, ...] = PHASES
        self.phase_ms: dict[tuple[str, str], float] = {}
        self.unseen_s: dict[str, Callable[[], float]] = {}
        self.bytes: dict[str, float] = {}
        self.grows: set[str] = set()  # arms whose first trial of a turn takes memory of the device
        self.heard: list[tuple[Any, ...]] = []
        self.opened = 0
        self.seats: list[Seat] = []
        self.now = 0.0
        self.given: dict[str, float | None] = {}  # seconds that an arm's preparation might take

    def open(self, seating: Any, timeout_s: float, tell: Any, log: Path) -> Seat:
        self.opened += 1
        self.seats.append(Seat(self, self.opened))
        return self.seats[-1]


class Seat:
    """A seat as the runner asks it."""

    ranks: tuple[Any, ...] = ()
    unseen_s = -0.05

    def __init__(self, script: Script, number: int) -> None:
        self.script, self.number, self.held = script, number, dict[str, float]()
        self.closed = False

    def ask(self, what: str, *arguments: Any, ranks: int = 1) -> list[Any]:
        assert not self.closed
        script = self.script
        script.heard.append((self.number, what, *arguments[:1]))
        script.fails.get((what, *arguments[:1]), lambda: None)()
        if found := script.answers.get((what, *arguments[:1])):
            return found
        if what == "prepare":
            return [script.refuses(arguments[1]) or self.prepare(arguments[0])]
        if what == "end":
            return [Ended()]
        return [{"closing": {}, "open": {}, "offer": b"", "look": {}}.get(what)]

    def send(self, what: str, *arguments: Any, ranks: int = 1) -> None:
        self.answer = self.ask(what, *arguments)

    def answers(self, ranks: int = 1) -> list[Any]:
        return self.answer

    def prepare(self, name: str) -> Ready | Failed:
        self.script.given[name] = getattr(self, "timeout_s", None)
        need = self.script.bytes.get(name, 1.0)
        if sum(self.held.values()) + need > self.script.room:
            return Failed("oom", "it ran out of memory")
        self.held[name] = need
        ms = self.script.ms.get(name, 10.0)
        own = self.script.ready(name)
        self.jobs = list(own.evidence)
        return replace(own, phases=PHASES, warm_ms=[ms] * 3, memory=own.memory or ArmMemory(), applied={"eager": 1})

    def turn(self, name: str, numbers: list[int], on: bool, each: bool, ranks: int) -> list[Any]:
        script = self.script
        script.heard.append((self.number, "turn", name, tuple(numbers)))
        self.unseen_s = script.unseen_s.get(name, lambda: Seat.unseen_s)()
        if found := script.fails.get(("turn", name), lambda: None)():
            return [found]
        made = []
        for _ in numbers:
            began = script.now
            script.now += script.ms.get(name, 10.0) / 1000
            device = {p: script.phase_ms.get((name, p), script.ms.get(name, 10.0) / 3) for p in script.phases}
            observed = script.observed.get(name, {job: Observed(1.0, None) for job in self.jobs})
            grew = name in script.grows and not on
            made.append(Made(Trial(device, device, {"": 1.0}, began, script.now), observed, grew))
        return [made]

    def close(self) -> None:
        self.closed = True


class ScriptedQueue(LocalQueue):
    """A sweep's queue over such seats. `asked`: of each run of it the families that it was given."""

    def __init__(self, folder: Path, script: Script, machine: Machine = MACHINE) -> None:
        super().__init__("auto", 9.0, folder)
        self.workers = script  # type: ignore[assignment]
        self.machine, self.where = machine, "here"
        self.looks, self.before = 0, len(read_sessions(folder))
        self.asked: list[list[Any]] = []

    def look(self, command: list[str]) -> Machine:
        name = f"session {self.before + self.looks}"
        self.looks += 1
        self.session = {"id": name, "machine": self.machine.model_dump(mode="json"), "ceilings": {}}
        self.sessions = self.sessions | {name: self.session}
        return self.machine

    def run(self, families: Any, watch: Any, *more: Any) -> Any:
        self.asked.append(list(families))
        yield from super().run(self.asked[-1], watch, *more)


FOUR = "ablations=[eager,adamw,adamw_fused]"


def runner(script: Script, folder: Path, journal: Journal | None = None, machine: Machine = MACHINE) -> Runner:
    return Runner(script, machine, None, "session", 9.0, folder, journal=journal)  # type: ignore[arg-type]


def family(*overrides: str) -> Family:
    (found,) = families(cells("trials=12", *(overrides or (FOUR,))))
    return found


def measured(script: Script, folder: Path, *overrides: str) -> dict[str, ArmRecord]:
    with runner(script, folder) as running:
        return {record.arm: record for record in running.family(family(*overrides))}


def alone_in_rounds(
    script: Script, folder: Path, *candidates: str, machine: Machine = MACHINE, limits: Limits = UNLIMITED
) -> dict[str, ArmRecord]:
    """A family of these and of one arm that sits alone, in rounds."""
    with runner(script, folder) as running:
        rounds = Rounds(
            family(f"ablations=[{','.join([*candidates, 'flex_attention'])}]"), machine, script, None, folder,  # type: ignore[arg-type]
            folder / "log", 9.0, print, limits=limits,
        )  # fmt: skip
        rounds.run()
        return {record.arm: record for record in running.drafts(rounds)}


def clocked(
    monkeypatch: pytest.MonkeyPatch, now: Callable[[], float], perf_counter: Callable[[], float] = time.perf_counter
) -> None:
    """The budget's clock shows this; perf_counter: what seconds are counted by."""
    clock = SimpleNamespace(monotonic=now, perf_counter=perf_counter)
    for file in ("rounds", "seats"):
        monkeypatch.setattr(f"lorabench.run.{file}.time", clock)


def turns(script: Script) -> list[tuple[int, str, tuple[int, ...]]]:
    """Those that count."""
    found = [(seat, rest[0], rest[1]) for seat, what, *rest in script.heard if what == "turn"]
    return [turn for turn in found if rounds_of(turn[2]) >= 0]


def rounds_of(numbers: tuple[int, ...]) -> int:
    return numbers[0] // TURN % ROUNDS - 1


def raising(error: BaseException, after: int = 0) -> Any:
    """Raises at the call after so many, once."""
    calls = iter(range(1000))

    def call() -> None:
        if next(calls) == after:
            raise error

    return call
