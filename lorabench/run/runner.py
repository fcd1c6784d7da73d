"""The runner: one cell to its record, whatever happens to it.

Both arms share one worker, trial by trial. They get processes of their own, in A B B A order, where a toggle's patch
reaches beyond its model or where both arms do not fit the device together, and for the noise floor of such cells.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lorabench.contract.cell import PROCESSES, Cell
from lorabench.contract.hooks import described, printable
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.measure import fairness
from lorabench.measure.cell import ArmResult, Failure, Result, Task, agree
from lorabench.measure.kind import EVIDENCE, JobCounts
from lorabench.measure.numerics import share_of_allowance
from lorabench.plan.design import refusal
from lorabench.record.contrast import speedup
from lorabench.record.schema import ARMS, LONGEST_MS, TOTAL, Cost, JobRecord, Numerics, Phase, Record, Tokens
from lorabench.run.process import LOG_TAIL, Workers, log_of, tail
from lorabench.run.session import scratch_prefix

# As they are before any toggle is asked anything in this process, which turns the workers' answers into records.
OWN_FUNCTIONS = fairness.functions(fairness.OURS)
DIGITS = 4  # of a millisecond that a record keeps: tenths of a microsecond are below what any clock here resolves


@dataclass
class Pair:
    """Both arms' results, however many workers they came from."""

    pairing: Literal["paired", "abba"]
    result: Result
    seconds: dict[str, float] = field(default_factory=dict)
    processes: dict[Any, list[int]] = field(default_factory=dict)  # of separate ones: how many trials each made

    @property
    def arms(self) -> dict[str, ArmResult]:
        return self.result.arms


class Runner:
    """Measures cells one after the other with one set of workers. A context manager: it keeps a temporary folder."""

    def __init__(
        self,
        workers: Workers,
        machine: Machine,
        ceilings: dict[str, Any] | None,
        session: str,
        timeout_s: float,
        folder: Path,
    ) -> None:
        self.workers, self.machine, self.session, self.timeout_s = workers, machine, session, timeout_s
        self.ceilings = ceilings or {}
        self.log = folder / ".worker.log"
        self._scratch = tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid()))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def measure(self, cell: Cell, tell: Callable[[str], None] = lambda text: None) -> Record:
        """One cell to its record. Never raises for what a cell does."""
        began = time.perf_counter()
        try:
            refused = refusal(cell, self.machine)
            if refused:
                return self._record(cell, status=refused[0], reason=refused[1])
            record = self._measured(cell, tell, began)
            if replaced := fairness.difference(OWN_FUNCTIONS, fairness.functions(fairness.OURS)):
                reason = f"a toggle replaced {replaced} in the sweep's own process"
                return self._record(cell, status="untrusted", reason=reason, cost=record.cost)
            return record
        except Exception as error:  # a harness that fails on one cell still has the others to measure
            cost = _cost({}, time.perf_counter() - began)
            log = printable(traceback.format_exc())[-LOG_TAIL:]
            return self._record(cell, status="crash", reason=f"in the harness: {described(error)}", cost=cost, log=log)

    def _measured(self, cell: Cell, tell: Callable[[str], None], began: float) -> Record:
        self._forget_logs(cell)
        pair = self._separately(cell, tell) if cell.separate else self._together(cell, tell)
        record = self._assemble(cell, pair)
        record.cost = _cost(pair.seconds, time.perf_counter() - began)
        if record.status in ("crash", "timeout", "oom"):
            record.log = tail(log_of(self.log, record.rank or 0))
        self._forget_logs(cell)
        shutil.rmtree(Path(self._scratch.name) / EVIDENCE, ignore_errors=True)
        return record

    def _forget_logs(self, cell: Cell) -> None:
        for rank in range(cell.ranks):
            log_of(self.log, rank).unlink(missing_ok=True)

    def _run(self, cell: Cell, arms: Sequence[str], rounds: int, gate: bool, tell: Callable[[str], None]) -> Result:
        ceiling = self.ceilings.get("gemm_tflops", {}).get(self.machine.dtype(cell.model.dtype))
        task = Task(cell, self.machine, tuple(arms), rounds, gate, ceiling, self._scratch.name)
        result = self.workers.run(task, self.timeout_s, tell, self.log)
        if result.disturbed:
            tell(f"once more: {result.reason}")
            first, result = result, self.workers.run(task, self.timeout_s, tell, self.log)
            _add(result.seconds, first.seconds)
        arm, wrong = next(_wrong_times(result), (None, None))
        return replace(result, status="crash", reason=wrong, arm=arm) if wrong else result

    def _together(self, cell: Cell, tell: Callable[[str], None]) -> Pair:
        result = self._run(cell, ARMS, cell.trials, True, tell)
        if result.status == "oom" and result.resident:
            tell("both arms do not fit together: separate processes")
            pair = self._separately(cell, tell)
            _add(pair.seconds, result.seconds)  # the attempt together is part of what the cell cost
            return pair
        pair = Pair("paired", result, dict(result.seconds))
        if result.status == "oom" and result.arm:
            self._survivor(cell, pair, tell)
        return pair

    def _survivor(self, cell: Cell, pair: Pair, tell: Callable[[str], None]) -> None:
        """The other arm alone: "the reference does not fit, the candidate does" is a result."""
        other = ARMS[pair.result.arm == "reference"]
        tell(f"the {other} alone")
        survivor = self._run(cell, (other,), cell.trials, True, tell)
        _add(pair.seconds, survivor.seconds)
        if survivor.status == "ok":
            pair.arms[other] = survivor.arms[other]
        else:
            pair.result.reason = f"{pair.result.reason}; alone, the {other}: {survivor.reason}"
        pair.arms.pop(str(pair.result.arm), None)

    def _separately(self, cell: Cell, tell: Callable[[str], None]) -> Pair:
        """Processes of their own, A B B A A B B A or the other way round. An arm that failed is not tried again."""
        first, second = random.Random(cell.seed).sample(ARMS, 2)
        pair = Pair("abba", Result())
        failed: dict[str, Result] = {}
        for arm in (first, second, second, first) * (PROCESSES // 2):
            if arm in failed:
                continue
            again = arm in pair.arms
            rounds = math.ceil(cell.trials / PROCESSES)
            result = self._run(cell, (arm,), rounds, not again, lambda text, a=arm: tell(f"{a}: {text}"))
            _add(pair.seconds, result.seconds)
            if result.status != "ok":
                failed[arm] = result
                pair.arms.pop(arm, None)
                pair.processes.pop(arm, None)
                if result.status != "oom":
                    break
                continue
            pair.processes.setdefault(arm, []).append(len(result.arms[arm].times[TOTAL]))
            if again:
                for phase, times in result.arms[arm].times.items():
                    pair.arms[arm].times[phase] += times
                pair.arms[arm].evidence += result.arms[arm].evidence
            else:
                pair.arms[arm] = result.arms[arm]
                pair.result.telemetry = pair.result.telemetry or result.telemetry
                pair.result.ranks |= result.ranks
        if failed:
            worst = next((r for r in failed.values() if r.status != "oom"), next(iter(failed.values())))
            arm = next(name for name, r in failed.items() if r is worst)
            pair.result.status, pair.result.arm, pair.result.rank = worst.status, arm, worst.rank
            pair.result.reason = "; ".join(str(r.reason) for r in failed.values())
        return pair

    def _assemble(self, cell: Cell, pair: Pair) -> Record:
        result = pair.result
        if result.status == "ok" and pair.pairing == "abba":
            self._agreement(cell, pair)
        verdicts = _verdicts(pair)
        common: dict[str, Any] = {"numerics": _nearest_to_its_limit(verdicts), "telemetry": result.telemetry}
        common["energy"] = _present(pair, "energy") or None
        reference, candidate = (pair.arms.get(name) for name in ARMS)
        if result.status == "ok":
            assert reference and candidate
            return self._record(
                cell, status="ok", pairing=pair.pairing, phases=_phases(cell, reference, candidate, pair),
                processes=pair.processes or None, tokens=_tokens(reference.jobs, candidate.jobs),
                memory=_present(pair, "memory"), jobs=_jobs(cell, pair, verdicts), ranks=result.ranks or None,
                applied=_of_sides(cell, pair, "applied"), notes=_of_sides(cell, pair, "notes") | _said(pair),
                roofline=_present(pair, "roofline"), **common,
            )  # fmt: skip
        survivors = {n: a for n, a in pair.arms.items() if a.times} if result.status == "oom" else {}
        own: dict[str, Any] = {}
        if survivors:
            phases = _phases(cell, survivors.get("reference"), survivors.get("candidate"), pair)
            own = {"pairing": pair.pairing, "phases": phases, "processes": pair.processes or None}
            own["roofline"] = _present(pair, "roofline")
        return self._record(
            cell, status=result.status, reason=result.reason, arm=result.arm, rank=result.rank,
            memory=_present(pair, "memory") or None, **own, **common,
        )  # fmt: skip

    def _agreement(self, cell: Cell, pair: Pair) -> None:
        """The full arms of two processes against each other; the result says so where they do not agree."""
        dtype = getattr(torch, self.machine.dtype(cell.model.dtype))
        try:
            agree(cell, kind(cell.kind), pair.arms, dtype)
        except Failure as failure:
            pair.result.status, pair.result.reason, pair.result.arm = failure.status, failure.reason, failure.arm

    def _record(self, cell: Cell, **fields: Any) -> Record:
        return record_of(cell, self.session, **fields)


def _wrong_times(result: Result) -> Iterator[tuple[str, str]]:
    """(arm, what) of each phase with a time that no clock can give: then none of the arm's times is of any use."""
    for name, arm in result.arms.items():
        for phase, times in arm.times.items():
            if odd := [t for t in times if not (isinstance(t, float) and round(t, DIGITS) > 0 and t <= LONGEST_MS)]:
                yield name, f"the {name}'s {phase} took {odd[0]!r} ms; expected a time between zero and some months"


def record_of(cell: Cell, session: str, **fields: Any) -> Record:
    """A record of this cell: what every record says of its cell, and these fields."""
    return Record(
        kind=cell.kind, key=cell.key, session=session, model=cell.model.name, workload=cell.workload.name,
        design=cell.design, rung=cell.rung, reference=[a.label for a in cell.reference],
        candidate=[a.label for a in cell.candidate], ablations=[a.label for a in cell.toggles],
        versus=[a.label for a in cell.versus] or None, **fields,
    )  # fmt: skip


def _verdicts(pair: Pair) -> dict[str, Numerics]:
    """The candidate's verdicts by job; the reference's, where only that one failed."""
    reference, candidate = (pair.arms.get(name) for name in ARMS)
    if pair.result.arm == "reference" and reference and any(not v.passed for v in reference.numerics.values()):
        return reference.numerics
    return candidate.numerics if candidate else {}


def _nearest_to_its_limit(verdicts: dict[str, Numerics]) -> Numerics | None:
    """Of several jobs the verdict that decides: one that failed, else the one nearest to failing."""
    return max(verdicts.values(), key=lambda v: (not v.passed, share_of_allowance(v)), default=None)


def _tokens(reference: dict[str, JobCounts], candidate: dict[str, JobCounts]) -> Tokens | None:
    """Of all jobs together; None where a trial has no tokens."""
    if not reference and not candidate:
        return None
    known = (candidate or reference).values()
    return Tokens(
        real=sum(c.real for c in known),
        trained=sum(c.trained for c in known),
        reference_padded=sum(c.padded for c in reference.values()),
        candidate_padded=sum(c.padded for c in candidate.values()),
    )


def _jobs(cell: Cell, pair: Pair, verdicts: dict[str, Numerics]) -> dict[str, JobRecord] | None:
    """Each of several jobs; None where there is but one, whose fields are the record's own."""
    if len(cell.jobs) == 1:
        return None
    made = {}
    for job in cell.jobs:
        counts: dict[Any, JobCounts] = {n: arm.jobs[job.name] for n, arm in pair.arms.items() if job.name in arm.jobs}
        reference, candidate = ({job.name: counts[name]} if name in counts else {} for name in ARMS)
        tokens = _tokens(reference, candidate)
        assert tokens is not None  # an arm that was measured has counted its jobs
        made[job.name] = JobRecord(
            r=job.lora.r, tokens=tokens, numerics=verdicts.get(job.name),
            adapter_bytes={name: c.adapter_bytes for name, c in counts.items()},
            optimizer_bytes={name: c.optimizer_bytes for name, c in counts.items()},
            tflop=next((c.tflop for c in counts.values()), {}),
        )  # fmt: skip
    return made


def _phases(cell: Cell, reference: ArmResult | None, candidate: ArmResult | None, pair: Pair) -> dict[str, Phase]:
    """The phases that every arm has which was measured, in the kind's order, and their sum; of those that an arm may do
    without also what one arm has."""
    phases: dict[str, Phase] = {}
    own = kind(cell.kind)
    of_reference, of_candidate = (pair.processes.get(name, []) for name in ARMS)
    for name in (*own.phases, TOTAL):
        times = [arm.times.get(name) if arm else None for arm in (reference, candidate)]
        missing = reference and candidate and not all(times) and name not in own.optional
        if missing or not any(times):
            continue
        phase = Phase(reference_ms=_short(times[0]), candidate_ms=_short(times[1]))
        if (
            times[0]
            and times[1]
            and (ratio := speedup(times[0], times[1], pair.pairing == "paired", (of_reference, of_candidate)))
        ):
            phase.speedup, phase.low, phase.high = ratio.centre, ratio.low, ratio.high
        phases[name] = phase
    return phases


def _short(times: list[float] | None) -> list[float] | None:
    return None if times is None else [round(t, DIGITS) for t in times]


def _present(pair: Pair, attribute: Literal["memory", "roofline", "energy"]) -> dict[Any, Any]:
    return {name: value for name, arm in pair.arms.items() if (value := getattr(arm, attribute)) is not None}


def _of_sides(cell: Cell, pair: Pair, attribute: Literal["applied", "notes"]) -> dict[str, Any]:
    """What the candidate's toggles say of themselves; of a head to head also what the other side's do."""
    names = ARMS if cell.versus else ARMS[1:]
    return {key: value for name in names for key, value in getattr(pair.arms[name], attribute).items()}


def _said(pair: Pair) -> dict[str, Any]:
    """What the kind says of each arm, under the arm's name."""
    return {name: arm.said for name, arm in pair.arms.items() if arm.said}


def _add(total: dict[str, float], more: dict[str, float]) -> None:
    for part, seconds in more.items():
        total[part] = total.get(part, 0.0) + seconds


def _cost(seconds: dict[str, float], wall: float) -> Cost:
    return Cost(wall=round(wall, 3), **{part: round(value, 3) for part, value in seconds.items()})
