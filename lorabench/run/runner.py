"""The runner: the queue of cells, each to its record. Whatever happens to a cell, the sweep goes on.

Both arms share one worker, trial by trial. They get processes of their own, in A B B A order, where a toggle's patch
reaches beyond its model or where both arms do not fit the device together.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lorabench.measure.machine import Machine
from lorabench.plan.design import Cell, refusal
from lorabench.report.stats import speedup
from lorabench.run import worker
from lorabench.run.process import Workers, tail
from lorabench.run.record import ARMS, PHASES, ArmMemory, Cost, Numerics, Phase, PhaseBound, Record
from lorabench.run.worker import ArmResult, Result


@dataclass
class Pair:
    """Both arms' results, however many workers they came from."""

    pairing: Literal["paired", "abba"]
    result: Result
    seconds: dict[str, float] = field(default_factory=dict)

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
        self._twins = tempfile.TemporaryDirectory(prefix="lorabench-twins-")

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._twins.cleanup()

    def measure(self, cell: Cell, tell: Callable[[str], None] = lambda text: None) -> Record:
        """One cell to its record. Never raises for what a cell does."""
        began = time.perf_counter()
        refused = refusal(cell, self.machine)
        if refused:
            return self._record(cell, status=refused[0], reason=refused[1])
        self.log.unlink(missing_ok=True)
        pair = self._separately(cell, tell) if cell.separate else self._together(cell, tell)
        record = self._assemble(cell, pair)
        record.cost = _cost(pair.seconds, time.perf_counter() - began)
        if record.status in ("crash", "timeout", "oom"):
            record.log = tail(self.log)
        self.log.unlink(missing_ok=True)
        return record

    def _job(self, cell: Cell, arms: Sequence[str], rounds: int, gate: bool) -> worker.Job:
        dtype = self.machine.dtype(cell.model.dtype)
        ceiling = self.ceilings.get("gemm_tflops", {}).get(dtype)
        return worker.Job(
            cell,
            self.machine,
            tuple(arms),
            rounds,
            gate,
            ceiling,
            str(self.log),
            self._twins.name,
            spawned=time.time(),
            sweep=os.getpid(),
        )

    def _together(self, cell: Cell, tell: Callable[[str], None]) -> Pair:
        result = self.workers.run(self._job(cell, ARMS, cell.trials, gate=True), self.timeout_s, tell)
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
        alone = self.workers.run(self._job(cell, (other,), cell.trials, gate=True), self.timeout_s, tell)
        _add(pair.seconds, alone.seconds)
        if alone.status == "ok":
            pair.arms[other] = alone.arms[other]
        else:
            pair.result.reason = f"{pair.result.reason}; alone, the {other}: {alone.reason}"
        pair.arms.pop(str(pair.result.arm), None)

    def _separately(self, cell: Cell, tell: Callable[[str], None]) -> Pair:
        """Blocks in processes of their own, A B B A or B A A B. An arm that failed is not tried again."""
        first, second = random.Random(cell.seed).sample(ARMS, 2)
        pair = Pair("abba", Result())
        failed: dict[str, Result] = {}
        for arm in (first, second, second, first):
            if arm in failed:
                continue
            again = arm in pair.arms
            job = self._job(cell, (arm,), math.ceil(cell.trials / 2), gate=not again)
            result = self.workers.run(job, self.timeout_s, lambda text, a=arm: tell(f"{a}: {text}"))
            _add(pair.seconds, result.seconds)
            if result.status != "ok":
                failed[arm] = result
                pair.arms.pop(arm, None)
                if result.status != "oom":
                    break
            elif again:
                for phase, times in result.arms[arm].times.items():
                    pair.arms[arm].times[phase] += times
            else:
                pair.arms[arm] = result.arms[arm]
                pair.result.telemetry = pair.result.telemetry or result.telemetry
        if failed:
            worst = next((r for r in failed.values() if r.status != "oom"), next(iter(failed.values())))
            arm = next(name for name, r in failed.items() if r is worst)
            pair.result.status, pair.result.arm = worst.status, arm
            pair.result.reason = "; ".join(str(r.reason) for r in failed.values())
        return pair

    def _assemble(self, cell: Cell, pair: Pair) -> Record:
        result = pair.result
        reference, candidate = (pair.arms.get(name) for name in ARMS)
        verdict = _numerics(cell, pair, self.machine)
        if result.status == "ok" and verdict is not None and not verdict.passed:
            from lorabench.measure.numerics import explain

            result.status, result.reason, result.arm = "wrong_numerics", explain(verdict), "candidate"
        if result.status == "ok":
            assert reference and candidate
            return self._record(
                cell, status="ok", pairing=pair.pairing, phases=_phases(reference, candidate, pair.pairing),
                tokens=worker.tokens(reference, candidate), memory=_present(pair, "memory"), numerics=verdict,
                applied=candidate.applied, notes=candidate.notes, bound=_present(pair, "bound"),
                telemetry=result.telemetry,
            )  # fmt: skip
        survivors = {n: a for n, a in pair.arms.items() if a.times} if result.status == "oom" else {}
        return self._record(
            cell, status=result.status, reason=result.reason, arm=result.arm,
            pairing=pair.pairing if survivors else None,
            phases=_phases(survivors.get("reference"), survivors.get("candidate"), pair.pairing) if survivors else None,
            memory=_present(pair, "memory") or None, bound=_present(pair, "bound") if survivors else None,
            numerics=verdict, telemetry=result.telemetry,
        )  # fmt: skip

    def _record(self, cell: Cell, **fields: Any) -> Record:
        return Record(
            key=cell.key, session=self.session, model=cell.model.name, workload=cell.workload.name, design=cell.design,
            reference=[a.label for a in cell.reference], candidate=[a.label for a in cell.candidate],
            ablations=[a.label for a in cell.toggles], limit=any(a.bound for a in cell.candidate) or None, **fields,
        )  # fmt: skip


def _numerics(cell: Cell, pair: Pair, machine: Machine) -> Numerics | None:
    """The candidate's verdict (the reference's, where only that one failed); with the agreement of the full arms."""
    reference, candidate = (pair.arms.get(name) for name in ARMS)
    if pair.result.arm == "reference" and reference and reference.numerics and not reference.numerics.passed:
        return reference.numerics
    if candidate is None or candidate.numerics is None:
        return None
    if pair.pairing == "abba" and reference:
        dtype = getattr(torch, machine.dtype(cell.model.dtype))
        return worker.agreed(cell, candidate.numerics, reference, candidate, dtype)
    return candidate.numerics


def _phases(
    reference: ArmResult | None, candidate: ArmResult | None, pairing: str
) -> dict[Literal["forward", "backward", "step", "total"], Phase]:
    phases: dict[Any, Phase] = {}
    for name in PHASES:
        times = [arm.times.get(name) if arm else None for arm in (reference, candidate)]
        if not any(times) or (reference and candidate and not all(times)):
            continue  # neither an op nor a bound has an optimizer step
        phase = Phase(reference_ms=_short(times[0]), candidate_ms=_short(times[1]))
        if times[0] and times[1] and (ratio := speedup(times[0], times[1], paired=pairing == "paired")):
            phase.speedup, phase.low, phase.high = ratio.centre, ratio.low, ratio.high
        phases[name] = phase
    return phases


def _short(times: list[float] | None) -> list[float] | None:
    """Tenths of a microsecond are below what any clock here resolves."""
    return None if times is None else [round(t, 4) for t in times]


def _present(pair: Pair, attribute: Literal["memory", "bound"]) -> dict[Any, ArmMemory | PhaseBound | Any]:
    return {name: value for name, arm in pair.arms.items() if (value := getattr(arm, attribute)) is not None}


def _add(total: dict[str, float], more: dict[str, float]) -> None:
    for part, seconds in more.items():
        total[part] = total.get(part, 0.0) + seconds


def _cost(seconds: dict[str, float], wall: float) -> Cost:
    return Cost(wall=round(wall, 3), **{part: round(value, 3) for part, value in seconds.items()})
