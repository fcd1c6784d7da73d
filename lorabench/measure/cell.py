"""One cell, or one arm of it, in this process: gate, build and warm up each arm, agreement, trials, profile.

What an arm is and what is compared its kind says; here is the order, and what is common. An expected failure (out of
memory, a toggle's own refusal, …) is a Result too; anything else is an exception, which the runner sees as a crash.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.arm import Arm
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked, first_line, noted, printable
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.ranks import ONE, Ranks
from lorabench.contract.work import Work
from lorabench.measure import energy, fairness, memory, profile, roofline, telemetry, trial
from lorabench.measure.kind import TURN, GateRequest, JobCounts, Kind, Request, request_of
from lorabench.record.schema import ARMS, TOTAL, ArmMemory, Energy, Numerics, PhaseRoofline, RankSpread, Telemetry


@dataclass(frozen=True)
class Task:
    """What a process is to do: measure `arms` of the cell, `rounds` rounds of them."""

    cell: Cell
    machine: Machine
    arms: tuple[str, ...]
    rounds: int
    gate: bool  # whether this process runs the numerics gate of its arms
    ceiling_tflops: float | None
    scratch: str  # the sweep's folder for what its cells share: the gate's gold outcomes, checkpoints


@dataclass
class ArmResult:
    """What one arm came to in one process: times in milliseconds per phase, in the order of the rounds. `numerics` by
    job: the gate's verdict. `evidence`: of each process and rank, by job, what is held against the other arm's."""

    times: dict[str, list[float]] = field(default_factory=dict)
    memory: ArmMemory | None = None
    roofline: dict[str, PhaseRoofline] | None = None
    energy: Energy | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list)
    numerics: dict[str, Numerics] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # by toggle
    said: dict[str, Any] = field(default_factory=dict)  # by the kind, of the arm
    jobs: dict[str, JobCounts] = field(default_factory=dict)


@dataclass
class Result:
    """A process's answer. `status` "ok" means that every arm asked for was measured; it is not yet the verdict."""

    status: str = "ok"
    reason: str | None = None
    arm: str | None = None
    rank: int | None = None  # which of several ranks failed
    disturbed: bool = False  # not trusted for what the clocks say, of which a busy machine can be the cause
    resident: bool = False  # out of memory while the other arm held its own: alone it might fit
    arms: dict[str, ArmResult] = field(default_factory=dict)
    ranks: dict[str, RankSpread] = field(default_factory=dict)  # of the arms that stepped on several
    telemetry: Telemetry | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    # Of each job what two right runs differ by, and the name of its file: as it was before any toggle was asked.
    noise: dict[str, tuple[str, Any]] = field(default_factory=dict)


# Called with an arm's name before each of its timed trials, and after it with the name and its milliseconds.
Timed = Callable[[str, float | None], None]
# Called with what is known now and must not be other in the answer: ("noise", (job, file, noise)) before any toggle is
# asked, and after each timed trial ("seen", (arm's name, digest of its evidence)).
Told = Callable[[str, Any], None]


class Failure(Exception):
    """Carries a Result out of the middle of a measurement."""

    def __init__(self, status: str, reason: str, arm: str | None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.arm = status, reason, arm


class Measurement:
    """One task, step by step. Of several ranks each does the same, and takes part in the arms that it belongs to."""

    def __init__(
        self, task: Task, tell: Callable[[str], None], ranks: Ranks = ONE, device: torch.device | None = None,
        timed: Timed = lambda name, ms: None, told: Told = lambda what, value: None,
    ) -> None:  # fmt: skip
        """`tell` is called with what is being done, in words. `device`: this rank's; None: the machine's first."""
        self.timed, self.told = timed, told
        self.task, self.cell, self.tell, self.ranks = task, task.cell, tell, ranks
        self.kind: Kind = kind(self.cell.kind)
        self.device = device or torch.device(task.machine.device)
        self.dtype = getattr(torch, task.machine.dtype(self.cell.model.dtype))
        self.result = Result()
        self.now = "starting"  # which arm is being worked on, for the reason of a failure
        self.arms: dict[str, Arm] = {}
        self.seen: Counter[str] = Counter()  # timed trials, by arm
        self.alone: list[trial.Trial] = []  # the first arm's trials while it was the only one
        self.plain = request_of(self.cell, ARMS[0], self.dtype, self.device, Path(task.scratch))

    def run(self) -> Result:
        self.result.arms = {name: ArmResult() for name in self.task.arms}
        self.kind.imports(self.plain)
        self.guard = fairness.Guard(alone=self.cell.separate or len(self.task.arms) == 1)
        try:
            if self.task.gate:
                self.gate()
            for name in self.task.arms:
                if self._is_here(name):
                    self.prepare(name)
            self.agreement()
            self.time()
            self.energy()
            self.profile()
        except Failure as failure:
            self._fail(failure.status, failure.reason, failure.arm)
        except fairness.Untrusted as error:
            self._fail("untrusted", str(error), "candidate")
            self.result.disturbed = isinstance(error, fairness.Disturbed)
        except Unsupported as error:
            self._fail("unsupported", str(error), self.now)
        except NotApplied as error:
            self._fail("not_applied", str(error), self.now)
        except Exception as error:
            if not memory.out_of_memory(error):
                raise
            self._fail("oom", f"the {self.now} ran out of memory: {_shortage(error)}", self.now)
            self.result.resident = len(self.arms) + (self.now not in self.arms) > 1
        return self.result

    def _fail(self, status: str, reason: str, arm: str | None) -> None:
        known = arm if arm in ARMS else None
        words = printable(reason) if reason.strip() else f"{status}, and nobody says why"
        self.result.status, self.result.reason, self.result.arm = status, words, known

    def _is_here(self, name: str) -> bool:
        """Whether an arm steps on this rank: an arm of one rank is rank 0's."""
        return self.ranks.rank < self.cell.ranks_of(name)

    @contextlib.contextmanager
    def _seconds(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.result.seconds[part] = self.result.seconds.get(part, 0.0) + took

    def _request(self, name: str, ablations: Sequence[Ablation]) -> Request:
        parallel = name in ARMS and self.cell.ranks_of(name) > 1
        ranks = self.ranks if parallel else ONE
        return replace(self.plain, name=name, ablations=tuple(ablations), ranks=ranks)

    def _working_on(self, name: str) -> None:
        self.now = name

    def gate(self) -> None:
        """Every arm is judged before anything is timed, and before any toggle has patched anything here."""
        with self._seconds("gate"):
            self.tell("numerics gate")
            asked = GateRequest(
                self.cell, self.task.arms, self._request, self.ranks, self._working_on, self._noise
            )  # fmt: skip
            for name, job, verdict in self.kind.gate(asked):
                self.result.arms[name].numerics[job] = verdict
                if not verdict.passed:
                    raise Failure("wrong_numerics", f"{_of(name, job)}: {self.kind.explain(verdict)}", name)
            self._free()

    def _noise(self, job: str, file: str, noise: Any) -> None:
        """To the runner at once, whose verdict is the last one: what lies in files and in here toggles can reach."""
        self.result.noise[job] = file, noise
        self.told("noise", (job, file, noise))

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, name: str) -> None:
        """Build one arm, take its first trial under the audit, warm it up, measure its memory."""
        self.now = name
        into = self.result.arms[name]
        with self._seconds("build"):
            self._free()  # else this arm would take what the other's trials left cached, and seem to reserve nothing
        held, cached = memory.allocated(self.device), memory.reserved(self.device)
        with self._seconds("build"):
            self.tell(f"building the {name}")
            request = self._request(name, self.cell.arm(name))
            arm = self.kind.build(request)
        with self._seconds("warmup"):
            self.tell(f"warming up the {name}")
            ops: Counter[str] = Counter()

            def traced() -> trial.Trial:
                done, ran = profile.traced(lambda: trial.run_trial(arm))
                ops.update(ran)
                return done

            into.evidence = [self.kind.first(arm, traced, request)]
            self._audit(arm, ops, into)
            self.kind.settle(arm, lambda: trial.run_trial(arm))
            warm = trial.warm_up(arm, self.cell.warmup)
            arm.kind.clear(arm)
        if not self.arms:
            self.alone = warm
            self.guard.watch(arm)
        self.arms[name] = arm
        with self._seconds("profile"):
            self.tell(f"memory of the {name}")
            static = memory.allocated(self.device) - held
            into.memory = memory.measure(arm, static, memory.reserved(self.device) - cached)
        into.jobs = arm.kind.counts(arm)

    def _audit(self, arm: Arm, ops: Any, into: ArmResult) -> None:
        for ablation in self.kind.audited(arm):
            evidence = Evidence(arm, arm.patched[ablation.name], ops)
            before = _inside(arm)
            sites = int(asked(ablation, Ablation.audit, evidence))
            if sites == 0:
                raise NotApplied(f"{ablation.name} changed nothing in {self.cell.model.name}")
            self._check_sites(ablation, sites, evidence)
            into.applied[ablation.name] = sites
            into.notes.update(noted(ablation, evidence))
            if before != _inside(arm):
                raise fairness.Untrusted(f"the audit of {ablation.name} changed the arm that it was to look at")
            if ablation.own_dropout_masks and any(job.lora.lora_dropout for job in self.plain.jobs):
                into.notes["gate"] = f"at dropout 0: {ablation.name} draws masks that plain PEFT cannot share"

    def _check_sites(self, ablation: Ablation, sites: int, evidence: Evidence) -> None:
        """Raises NotApplied where an audit says more than there can be."""
        arm = evidence.arm
        if arm.touched is not None and ablation.name not in arm.touched and not ablation.global_patch:
            raise NotApplied(
                f"{ablation.name} says that it is at work in {sites} sites, but none of its hooks changed anything"
            )
        there = (
            sum(1 for _ in arm.model.modules()) + sum(1 for _ in arm.model.parameters()) + sum(evidence.ops.values())
        )
        most = there + len(arm.samples) + arm.real + arm.ranks.size
        if arm.steps and sites > most:
            raise NotApplied(f"{ablation.name} says that it is at work in {sites} sites; there are {most} at most")

    def agreement(self) -> None:
        """Before the trials, what there is of evidence so far of one arm against the other's, where both are here: an
        arm that is wrong already need not be timed. All of it the runner holds together, out of any toggle's reach."""
        if all(name in self.arms for name in ARMS):
            agree(self.cell, self.kind, self.result.arms, self.dtype)

    def time(self) -> None:
        self.now = " and ".join(self.task.arms)
        self.guard.check_all()
        arms = {name: self.arms.get(name) for name in self.task.arms}
        here = {name: arm for name, arm in arms.items() if arm}
        with self._seconds("warmup"):
            trial.run_rounds(arms, 1, self.cell.seed)  # both once more, now that both are there
        before = {name: fairness.of_arm(arm) for name, arm in here.items()}
        busy = dict(self.guard.busy())
        with self._seconds("trials"), telemetry.Sampler() as sampler:
            tell = lambda n: self.tell(f"trial {n + 1} of {self.task.rounds}")  # noqa: E731
            try:
                self.trials = trial.run_rounds(
                    arms, self.task.rounds, self.cell.seed + 1, tell, self._seen, self._timed
                )
            except trial.Diverged as error:
                raise Failure("wrong_numerics", str(error), None) from None
        self._check_fairness(here, before, busy)
        with self._seconds("gate"):
            for name, arm in here.items():
                self.tell(f"certifying the {name}")
                arm.kind.feed(arm, self.task.rounds + 1)
                last = self.kind.last(arm, partial(trial.run_trial, arm))
                self.kind.finish(self.result.arms[name].evidence[0], last)
                arm.kind.clear(arm)
            if len(here) == len(ARMS):
                crossed = self.kind.cross(*(here[name] for name in ARMS))
                self.kind.finish(self.result.arms[ARMS[1]].evidence[0], crossed)
        if self.trials:
            self.result.telemetry = sampler.summary(list(zip(*self.trials.values(), strict=True)))
        for name, done in self.trials.items():
            into = self.result.arms[name]
            into.times = self._times(done)
            into.said = here[name].kind.said(here[name], into.times)

    def _timed(self, name: str, done: trial.Trial | None) -> None:
        """Tell the runner where a trial begins, and what of it the record will have where it ends."""
        if done is None:
            self.kind.begin(self.arms[name], (self.seen[name] + 1) * TURN)
        self.timed(name, None if done is None else self._times([done])[TOTAL][0])

    def _seen(self, name: str, done: trial.Trial) -> None:
        self.seen[name] += 1
        arm, number = self.arms[name], self.seen[name] * TURN
        seen, sketched = self.kind.seen(arm, number, done.losses), self.kind.sketched(arm, number)
        self.kind.take(self.result.arms[name].evidence[0], number, seen, sketched)
        self.guard.check()

    def _check_fairness(self, arms: dict[str, Arm], before: dict[str, Any], busy: dict[str, float]) -> None:
        """Raises Untrusted where the trials' times are not what they seem."""
        if replaced := [name for name in vars(self) if callable(getattr(type(self), name, None))]:
            raise fairness.Untrusted(f"a toggle replaced the measurement's own {replaced[0]}")
        for name, arm in arms.items():
            fairness.check_clock(name, self.trials[name])
            if changed := fairness.difference(before[name], fairness.of_arm(arm)):
                raise fairness.Untrusted(f"the {name} changed what it does while it was timed: {changed}")
        self.guard.check_all()
        if len(arms) > 1:
            spent = sum(done.ended - done.began for trials in self.trials.values() for done in trials)
            fairness.check_busy(busy, dict(self.guard.busy()), spent)
            reference, candidate = (self.trials[name] for name in ARMS)
            fairness.check_slowed(self.alone[1:], reference, self.device.type)
            for name, own, other in ((ARMS[0], reference, candidate), (ARMS[1], candidate, reference)):
                pairs = list(zip(own, other, strict=True))
                early = [mine for mine, theirs in pairs if mine.began < theirs.began]
                late = [mine for mine, theirs in pairs if mine.began > theirs.began]
                fairness.check_order(name, early, late)

    def _times(self, done: Sequence[trial.Trial]) -> dict[str, list[float]]:
        """Of each of the kind's phases, and their sum."""
        phases = [p for p in self.kind.phases if p in done[0].device_ms]
        times = {phase: [t.device_ms[phase] for t in done] for phase in phases}
        return {**times, TOTAL: [sum(parts) for parts in zip(*times.values(), strict=True)]}

    def energy(self) -> None:
        """Of each arm whose trials have tokens. Of an arm's several processes the first, as its memory is."""
        with self._seconds("energy"):
            for name, arm in self.arms.items() if self.task.gate else ():
                into = self.result.arms[name]
                if into.jobs:
                    self.tell(f"measuring the energy of the {name}")
                    into.energy = energy.measure(arm, statistics.median(into.times[TOTAL]))

    def profile(self) -> None:
        """Busy time of the device, after the trials, and with it the label and the distance to the ceiling."""
        dtype = str(self.dtype).removeprefix("torch.")  # which the model may leave to the machine
        cell = replace(self.cell, model=self.cell.model.model_copy(update={"dtype": dtype}))
        with self._seconds("profile"):
            for name, arm in self.arms.items():
                self.tell(f"profiling the {name}")
                into = self.result.arms[name]
                works = arm.kind.work(cell, self.plain.samples, arm.ablations)
                into.jobs = {j: replace(c, tflop=w.tflop) for (j, c), w in zip(into.jobs.items(), works, strict=False)}
                busy, done = profile.device_busy(arm), self.trials[name]
                ceiling = self.task.ceiling_tflops  # of one device; the work is that of all ranks together
                of_all = ceiling and ceiling * arm.ranks.size
                rates = arm.kind.rates(arm)
                into.roofline = roofline.phase_rooflines(done, busy, sum(works, Work()), of_all, rates)


def agree(
    cell: Cell, kind_: Kind, arms: dict[str, ArmResult], dtype: torch.dtype, noise: Mapping[str, Any] | None = None
) -> None:
    """Put the full arms' agreement into the candidate's verdicts, job by job. Raises Failure where one does not pass.

    `noise`: of the jobs of which it was told, in place of what their evidence says.
    """
    reference, candidate = (arms[name] for name in ARMS)
    measure, *others = reference.evidence
    measure = {job: replace(own, noise=noise[job]) if noise and job in noise else own for job, own in measure.items()}
    for evidence in (*others, *candidate.evidence):  # another process of the reference's has to agree with it, too
        for job, found in evidence.items():
            verdict = kind_.agree(cell, candidate.numerics.get(job), measure[job], found, dtype)
            if verdict is None:
                continue
            candidate.numerics[job] = verdict
            if not verdict.passed:
                reason = kind_.explain(verdict)
                raise Failure("wrong_numerics", f"job {job}: {reason}" if job else reason, "candidate")


def _inside(arm: Arm) -> Any:
    """What an audit has no business to change of an arm."""
    return fairness.attributes(arm), fairness.of_arm(arm)


def _of(name: str, job: str) -> str:
    return f"{name}, job {job}" if job else name


def _shortage(error: BaseException) -> str:
    """What was asked for and what was free; torch's advice on its allocator is left out."""
    return first_line(error).partition(" Including non-PyTorch")[0].removeprefix("CUDA out of memory. ")
