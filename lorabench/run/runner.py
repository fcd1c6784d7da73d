"""The runner: a family to its records, whatever happens to it."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lorabench.contract.cell import Cell
from lorabench.contract.family import Family, Stack
from lorabench.contract.hooks import described, printable
from lorabench.contract.machine import Machine
from lorabench.measure import fairness
from lorabench.measure.judging.numerics import share_of_allowance
from lorabench.plan.design import refusal
from lorabench.record.pairs import pairs
from lorabench.record.schema import (
    ArmJob,
    ArmRecord,
    ArmTokens,
    Cost,
    Energy,
    Numerics,
    RankSpread,
    Record,
    Shown,
)
from lorabench.run.entries import NO_TIME, UNLIMITED, Entry, Limits, Replan, Staying, Suspicion, as_planned
from lorabench.run.journal import INTERRUPTED, Journal
from lorabench.run.process import LOG_TAIL, Workers, log_of
from lorabench.run.rounds import Rounds
from lorabench.run.session import scratch_prefix

# As they are before any toggle is asked anything in this process, which judges what the seats say.
OWN_FUNCTIONS = fairness.functions(fairness.OURS)
Tell = Callable[[str], None]


def quiet(text: str) -> None:
    """Nobody is told."""


class Runner:
    """Measures families one after the other with one set of workers. A context manager: it keeps a temporary folder."""

    def __init__(
        self, workers: Workers, machine: Machine, ceilings: dict[str, Any] | None, session: str, timeout_s: float,
        folder: Path, limits: Limits = UNLIMITED, journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self.workers, self.machine, self.session, self.timeout_s = workers, machine, session, timeout_s
        self.ceilings, self.limits, self.journal = ceilings or {}, limits, journal
        self.log = folder / ".worker.log"
        self.number = 0  # of the family's run in this session
        self.staying: Staying | None = None  # of the last family, for the next one
        self.noise: dict[str, Any] = {}  # by the name of its file, which the families share: as it was told first
        self._scratch = tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid()))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._empty()
        self._scratch.cleanup()

    def _empty(self) -> None:
        """End what stays of the last family."""
        stayed, self.staying = self.staying, None
        if stayed:
            stayed.seat.desk.close()
            self._forget_logs(stayed.family)

    def measure(self, cell: Cell, tell: Tell = quiet) -> Record:
        """One cell alone, as a family of its two arms."""
        made = pairs(self.family(Family((cell,)), tell))
        return next(record for record in made if record.key == cell.key)

    def family(self, family: Family, tell: Tell = quiet, replan: Replan = as_planned) -> list[ArmRecord]:
        """A family to the records of its arms. Never raises for what an arm does."""
        began = time.perf_counter()
        self.number += 1
        refused = {cell.key: found for cell in family.cells if (found := refusal(cell, self.machine))}
        records = [self._refused(cell, *refused[cell.key]) for cell in family.cells if cell.key in refused]
        left = replace(family, cells=tuple(cell for cell in family.cells if cell.key not in refused))
        if not left.cells:
            return records
        try:
            made = self._measured(left, tell, replan)
            charge(made[0], time.perf_counter() - began - wall_of(made))
            return [*records, *made]
        except Exception as error:  # a harness that fails on one family still has the others to measure
            cost = Cost(wall=round(time.perf_counter() - began, 3))
            log, reason = printable(traceback.format_exc())[-LOG_TAIL:], f"in the harness: {described(error)}"
            made = [self._record(left, s, status="crash", reason=reason, log=log) for s in left.stacks]
            made[0].cost = cost
            return [*records, *made]

    def _measured(self, family: Family, tell: Tell, replan: Replan = as_planned, again: bool = True) -> list[ArmRecord]:
        ceiling = self.ceilings.get("gemm_tflops", {}).get(self.machine.dtype(family.reference.model.dtype))
        if self.staying and not self.staying.suits(family):
            self._empty()
        self._forget_logs(family)
        before, self.staying = self.staying, None
        rounds = Rounds(
            family, self.machine, self.workers, ceiling, Path(self._scratch.name), self.log, self.timeout_s, tell,
            self.journal, self.limits, self.noise, lambda: self.drafts(rounds), replan, before,
        )  # fmt: skip
        try:
            rounds.run()
            self.staying = rounds.staying
            suspicion = fairness.difference(OWN_FUNCTIONS, fairness.functions(fairness.OURS))
            if suspicion:
                raise Suspicion(f"a toggle replaced {suspicion} in the sweep's own process")
        except Suspicion as found:
            self._empty()
            return self._apart(tell, found, rounds)
        finally:
            self._forget_logs(family)
        made, family = self.drafts(rounds), rounds.family
        disturbed = {e.name for e in rounds.entries.values() if e.disturbed and not e.ok and not e.stack.is_reference}
        if disturbed and again and time.monotonic() <= self.limits.stop_at:
            tell(f"once more: {', '.join(sorted(disturbed))}")
            self.number += 1
            cells = tuple(c for c in family.cells if family.names(c) & disturbed)
            keys = {c.key for c in cells}
            made = [r for r in made if r.arm not in disturbed]
            for record in made:
                record.shown = [one for one in record.shown if one.key not in keys]
            if all(r.role == "reference" for r in made):  # with nothing beside it that was measured: it comes again
                made = []
            made += self._measured(replace(family, cells=cells), tell, again=False)
        return made

    def _apart(self, tell: Tell, found: Suspicion, rounds: Rounds) -> list[ArmRecord]:
        """Without who may have done it, and those in halves, and those in halves, until it is known who did: the others
        keep their rounds together. Not after the time is up."""
        family, reason = rounds.family, str(found)
        if len(family.cells) == 1:
            for entry in rounds.entries.values():
                if entry.stack.role == "candidate" or len(rounds.entries) <= 2:
                    entry.leave("untrusted", reason)
            return self.drafts(rounds)
        if time.monotonic() > self.limits.stop_at:
            for entry in rounds.entries.values():
                entry.leave("timeout", NO_TIME)
            return self.drafts(rounds)
        among = tuple(cell for cell in family.cells if family.names(cell) & found.among)
        parts = tuple(cell for cell in family.cells if cell not in among), among
        if not all(parts):  # it can have been anybody
            middle = (len(family.cells) + 1) // 2
            parts = family.cells[:middle], family.cells[middle:]
        tell(f"again in parts: {reason}")
        return [record for cells in parts for record in self.family(replace(family, cells=cells), tell)]

    def _forget_logs(self, family: Family) -> None:
        for log in (log_of(self.log, rank) for rank in range(family.ranks)):
            if not self.staying:
                log.unlink(missing_ok=True)
            elif log.exists():  # who stays goes on writing into it
                os.truncate(log, 0)

    # ---- records

    def drafts(self, rounds: Rounds) -> list[ArmRecord]:
        """What is known of the family's arms now."""
        family = rounds.family
        made = [self._of(family, entry, rounds) for entry in rounds.entries.values()]
        cost = made[0].cost
        assert cost is not None
        parts = {part: round(getattr(cost, part) + value, 3) for part, value in rounds.overhead.items()}
        wall = sum({**cost.model_dump(exclude={"wall"}), **parts}.values())
        made[0].cost = cost.model_copy(update={**parts, "wall": round(wall, 3)})
        return made

    def _of(self, family: Family, entry: Entry, rounds: Rounds) -> ArmRecord:
        parts = {part: round(seconds, 3) for part, seconds in entry.seconds.items()}
        fields: dict[str, Any] = {
            "status": entry.status, "reason": entry.reason, "rank": entry.rank, "log": entry.log,
            "cost": Cost(wall=round(sum(parts.values()), 3), **parts),
            "numerics": _nearest_to_its_limit(entry.numerics),
            "said": {} if entry.edge is None else {"edge": asdict(entry.edge)},
        }  # fmt: skip
        ready, ended = entry.ready, entry.ended
        if ready is not None and entry.status in ("ok", "oom"):
            fields |= {"memory": ready.memory, "tokens": _tokens(ready), "energy": _energy(entry)}
        if ready is not None and entry.ok:
            turns = entry.turns
            names = list(turns[0].phases) if turns else []
            fields |= {
                "rounds": [t.round for t in turns], "seats": [t.seat for t in turns],
                "phases": {name: [t.phases[name] for t in turns] for name in names},
                "trials": rounds.trials_a_turn, "applied": ready.applied, "notes": _notes(entry),
                "jobs": _jobs(entry), "telemetry": entry.telemetry, "ranks": _spread(entry),
                "said": ended.said if ended else {}, "roofline": ended.roofline if ended else None,
            }  # fmt: skip
        return self._record(family, entry.stack, draft=entry.ok and not entry.turns, **fields)

    def _refused(self, cell: Cell, status: str, reason: str) -> ArmRecord:
        own = Family((cell,))
        stack = next((s for s in own.stacks if cell in s.cells), own.stacks[-1])
        return self._record(own, replace(stack, cells=(cell,)), status=status, reason=reason)

    def _record(self, family: Family, stack: Stack, **fields: Any) -> ArmRecord:
        return record_of(family, stack, self.session, name=f"{family.key}-{self.number}", **fields)


def record_of(
    family: Family, stack: Stack, session: str, *, name: str = "", draft: bool = False, **fields: Any
) -> ArmRecord:
    """A record of this arm: what every record says of its arm, and these fields. `name`: of the run; records of
    one name share rounds. `draft`: it has no times yet."""
    name = name or family.key
    reference = family.reference
    make: Any = ArmRecord.model_construct if draft else ArmRecord
    return make(
        family=name, session=session, kind=stack.kind, model=reference.model.name,
        workload=reference.workload.name, arm=stack.name, role=stack.role, toggles=stack.labels,
        shown=[shown(cell) for cell in stack.cells], **fields,
    )  # fmt: skip


def wall_of(records: Iterable[ArmRecord]) -> float:
    return sum(record.cost.wall for record in records if record.cost)


def charge(record: ArmRecord, seconds: float) -> None:
    """What was measured for nothing took time, too, and so did the judging."""
    cost = record.cost or Cost(wall=0.0)
    more = {"other": round(cost.other + seconds, 3), "wall": round(cost.wall + seconds, 3)}
    record.cost = cost.model_copy(update=more)


def shown(cell: Cell) -> Shown:
    return Shown(
        key=cell.key, design=cell.design, rung=cell.rung, ablations=[a.label for a in cell.toggles],
        against=[a.label for a in cell.reference],
    )  # fmt: skip


def _nearest_to_its_limit(verdicts: dict[str, Numerics]) -> Numerics | None:
    """Of several jobs the verdict that decides: one that failed, else the one nearest to failing."""
    return max(verdicts.values(), key=lambda v: (not v.passed, share_of_allowance(v)), default=None)


def _notes(entry: Entry) -> dict[str, Any]:
    assert entry.ready is not None
    stopped = {} if entry.stopped_after is None else {INTERRUPTED: entry.stopped_after}
    drawn = {job.name or "rows": job.workload.drawn.words for job in entry.stack.cell.jobs if job.workload.drawn}
    return entry.ready.notes | stopped | drawn


def _tokens(ready: Any) -> ArmTokens | None:
    """Of all jobs together; None where a trial has no tokens."""
    counts = ready.jobs.values()
    if not counts:
        return None
    return ArmTokens(
        real=sum(c.real for c in counts), trained=sum(c.trained for c in counts), padded=sum(c.padded for c in counts)
    )


def _jobs(entry: Entry) -> dict[str, ArmJob] | None:
    """Each of several jobs; None where there is but one, whose fields are the record's own."""
    jobs = entry.stack.cell.jobs
    if len(jobs) == 1 or entry.ready is None:
        return None
    tflop = entry.ended.tflop if entry.ended else {}
    return {
        job.name: ArmJob(
            r=job.lora.r, tokens=ArmTokens(real=c.real, trained=c.trained, padded=c.padded),
            numerics=entry.numerics.get(job.name), adapter_bytes=c.adapter_bytes, optimizer_bytes=c.optimizer_bytes,
            tflop=tflop.get(job.name, {}),
        )
        for job in jobs if (c := entry.ready.jobs.get(job.name)) is not None
    }  # fmt: skip


def _energy(entry: Entry) -> Energy | None:
    """By the turns, where each moved the counter; else of a block of steps alone."""
    if entry.ended and entry.ended.energy:
        return entry.ended.energy
    joules = sum(mj for mj, _, _ in entry.millijoules) / 1000
    if not entry.ended or joules <= 0:
        return None
    steps, seconds = sum(n for *_, n in entry.millijoules), sum(s for _, s, _ in entry.millijoules)
    return Energy(joules=joules, steps=steps, seconds=seconds)


def _spread(entry: Entry) -> RankSpread | None:
    if entry.stack.ranks == 1 or not entry.spreads:
        return None
    return RankSpread(
        size=entry.stack.ranks, slowest=entry.slowest_rank, spread=sorted(entry.spreads)[len(entry.spreads) // 2]
    )
