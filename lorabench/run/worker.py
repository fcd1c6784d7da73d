"""The worker: one cell, or one arm of it, in a process of its own.

It sends its phase through the pipe as it goes, so that a hang can be named, and a `Result` at the end. An expected
failure (out of memory, a toggle's own refusal, …) is a Result too; anything else is an exception that the runner sees
as a crash.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lorabench.measure.machine import Machine
from lorabench.plan.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.plan.design import Cell
from lorabench.run.record import ARMS, ArmMemory, Numerics, PhaseBound, Telemetry, Tokens


@dataclass(frozen=True)
class Job:
    """What a worker is to do: measure `arms` of the cell, `rounds` rounds of them."""

    cell: Cell
    machine: Machine
    arms: tuple[str, ...]
    rounds: int
    gate: bool  # whether this worker runs the numerics gate of its arms
    ceiling_tflops: float | None
    log: str  # file that takes the worker's stdout and stderr
    twins: str  # the sweep's folder of the gate's gold and plain twins
    spawned: float  # time.time() when the runner started it
    sweep: int  # process id of the sweep


@dataclass
class ArmResult:
    """What one arm came to in one worker: times in milliseconds per phase, in the order of the rounds."""

    times: dict[str, list[float]] = field(default_factory=dict)
    memory: ArmMemory | None = None
    bound: dict[Any, PhaseBound] | None = None
    first_loss: float = 0.0
    first_grad_norm: float = 0.0
    numerics: Numerics | None = None
    applied: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    real: int = 0
    padded: int = 0
    trained: int = 0


@dataclass
class Result:
    """A worker's answer. `status` "ok" means that every arm asked for was measured; it is not yet the verdict."""

    status: str = "ok"
    reason: str | None = None
    arm: str | None = None
    resident: bool = False  # out of memory while the other arm held its own: alone it might fit
    arms: dict[str, ArmResult] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Failure(Exception):
    """Carries a Result out of the middle of a measurement."""

    def __init__(self, status: str, reason: str, arm: str | None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.arm = status, reason, arm


def main(job: Job, connection: Connection) -> None:
    """Entry of the process: own session (so that it can be killed with its children), own log, then the measurement."""
    os.setsid()
    _die_with(job.sweep, job.twins)
    _redirect(job.log)
    try:
        measurement = Measurement(job, tell=lambda text: connection.send(("phase", text)))
        connection.send(("result", measurement.run()))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        connection.send(("failed", f"{type(error).__name__}: {_first_line(error)}"))
        raise SystemExit(1) from None
    finally:
        connection.close()


def _die_with(sweep: int, twins: str) -> None:
    """A sweep that is killed must not leave a worker that disturbs the next one: wait, asleep, for its process to end.
    Nor its temporary folder, which it could not delete itself.

    (Not by PR_SET_PDEATHSIG: a worker's parent is the fork server, which lives as long as its workers do.)
    """

    def watch() -> None:
        with contextlib.suppress(OSError, AttributeError):  # pidfd: Linux only
            select.select([os.pidfd_open(sweep)], [], [])
            shutil.rmtree(twins, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _redirect(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:500]


def _shortage(error: BaseException) -> str:
    """What was asked for and what was free; torch's advice on its allocator is left out."""
    return _first_line(error).partition(" Including non-PyTorch")[0].removeprefix("CUDA out of memory. ")


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own exception on a GPU; on a CPU its allocator raises a RuntimeError that only its text tells apart."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("DefaultCPUAllocator", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


class Measurement:
    """One job, step by step: gate, build and warm up each arm, agreement, memory, trials, profile."""

    def __init__(self, job: Job, tell: Callable[[str], None]) -> None:
        import torch

        self.job, self.cell, self.tell = job, job.cell, tell
        self.device = torch.device(job.machine.device)
        self.dtype = getattr(torch, job.machine.dtype(self.cell.model.dtype))
        self.result = Result(seconds={"spawn": time.time() - job.spawned})
        self.now = "starting"  # which arm is being worked on, for the reason of a failure
        self.arms: dict[str, Any] = {}
        vocabulary = self.cell.model.hf_config().vocab_size
        self.samples = self.cell.workload.draw(vocabulary, self.cell.seed)

    def run(self) -> Result:
        self.result.arms = {name: ArmResult() for name in self.job.arms}
        try:
            if self.job.gate:
                self.gate()
            for name in self.job.arms:
                self.prepare(name)
            self.agreement()
            self.time()
            self.profile()
        except Failure as failure:
            self._fail(failure.status, failure.reason, failure.arm)
        except Unsupported as error:
            self._fail("unsupported", str(error), self.now)
        except NotApplied as error:
            self._fail("not_applied", str(error), self.now)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._fail("oom", f"the {self.now} ran out of memory: {_shortage(error)}", self.now)
            self.result.resident = len(self.arms) + (self.now not in self.arms) > 1
        return self.result

    def _fail(self, status: str, reason: str, arm: str | None) -> None:
        known = arm if arm in ARMS else None
        self.result.status, self.result.reason, self.result.arm = status, reason, known

    @contextlib.contextmanager
    def _seconds(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.result.seconds[part] = self.result.seconds.get(part, 0.0) + took

    def _build(self, name: str, ablations: Sequence[Ablation], **kwargs: Any) -> Any:
        from lorabench.measure.arm import build

        cell = self.cell
        return build(
            name, kwargs.pop("spec", cell.model), cell.workload, kwargs.pop("samples", self.samples), ablations,
            dtype=self.dtype, device=self.device, seed=cell.seed, **kwargs,
        )  # fmt: skip

    def gate(self) -> None:
        """Every arm against float32 PEFT, before anything is timed. The gold is made before any patch."""
        from lorabench.measure import numerics, twins

        both = (*self.cell.reference, *self.cell.candidate)
        spec = self.cell.model.without_dropout() if any(a.own_masks for a in both) else self.cell.model
        make = partial(self._build, spec=spec, layers=numerics.TWIN_LAYERS, samples=numerics.shorten(self.samples))
        with self._seconds("gate"):
            self.tell("numerics gate")
            self.now = "gold"
            loading = self.cell.loading
            file = twins.path(self.job.twins, spec, self.cell.workload, self.cell.seed, self.dtype, loading)
            gold, low = twins.kept(file, self.device, partial(self._gold_and_low, make, loading))
            for name in self.job.arms:
                self.now = name
                ablations = self.cell.arm(name)
                if any(a.bound for a in ablations):
                    continue  # computes no adapter's gradients: there is nothing to judge
                if name == "candidate" and not self.cell.toggles and "reference" in self.job.arms:
                    self.result.arms[name].numerics = self.result.arms["reference"].numerics
                    continue  # the reference against itself: one verdict serves both
                got = numerics.twin(make, name, ablations, upcast=False)
                judged = [a for a in ablations if a not in loading]
                self.result.arms[name].numerics = verdict = numerics.judge(gold, low, got, self.dtype, judged)
                if not verdict.passed:
                    raise Failure("wrong_numerics", f"{name}: {numerics.explain(verdict)}", name)
            del gold, low, got
            self._free()

    def _gold_and_low(self, make: Callable[..., Any], loading: Sequence[Ablation]) -> tuple[Any, Any]:
        import torch

        from lorabench.measure.numerics import twin

        gold = twin(make, "gold", loading, upcast=True)
        return gold, gold if self.dtype == torch.float32 else twin(make, "plain", loading, upcast=False)

    def _free(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, name: str) -> None:
        """Build one arm, take its first step under the audit, warm it up, measure its memory."""
        from lorabench.measure import memory, numerics, profile, trial

        self.now = name
        into = self.result.arms[name]
        with self._seconds("build"):
            self._free()  # else this arm would take what the other's trials left cached, and seem to reserve nothing
        held, cached = memory.allocated(self.device), memory.reserved(self.device)
        with self._seconds("build"):
            self.tell(f"building the {name}")
            arm = self._build(name, self.cell.arm(name))
        with self._seconds("warmup"):
            self.tell(f"warming up the {name}")
            first, ops = profile.traced(lambda: numerics.first_step(arm, trial.run_trial))
            into.first_loss, into.first_grad_norm = first.loss, first.grad_norm
            self._audit(arm, ops, into)
            trial.warm_up(arm, self.cell.warmup)
            arm.step.clear()
        self.arms[name] = arm
        with self._seconds("profile"):
            self.tell(f"memory of the {name}")
            static = memory.allocated(self.device) - held
            into.memory = memory.measure(arm, static, memory.reserved(self.device) - cached)
        into.real, into.padded = arm.real, arm.padded
        into.trained = arm.step.items

    def _audit(self, arm: Any, ops: Any, into: ArmResult) -> None:
        # A bound runs no part of the model, so the reference's toggles cannot be at work in it.
        for ablation in [a for a in arm.ablations if a.bound] or arm.ablations:
            evidence = Evidence(arm, arm.patched[ablation.name], ops)
            sites = ablation.audit(evidence)
            if sites == 0:
                raise NotApplied(f"{ablation.name} changed nothing in {self.cell.model.name}")
            into.applied[ablation.name] = sites
            into.notes.update(ablation.notes(evidence))
            if ablation.own_masks and self.cell.model.lora.lora_dropout:
                into.notes["gate"] = f"at dropout 0: {ablation.name} draws masks that plain PEFT cannot share"

    def agreement(self) -> None:
        """The full arms' first steps against each other, where both are here."""
        reference, candidate = (self.result.arms.get(n) for n in ARMS)
        if reference and candidate and candidate.numerics:
            candidate.numerics = agreed(self.cell, candidate.numerics, reference, candidate, self.dtype)
            if not candidate.numerics.passed:
                from lorabench.measure.numerics import explain

                raise Failure("wrong_numerics", explain(candidate.numerics), "candidate")

    def time(self) -> None:
        from lorabench.measure import telemetry, trial

        arms = list(self.arms.values())
        self.now = " and ".join(self.job.arms)
        with self._seconds("warmup"):
            trial.run_rounds(arms, 1, self.cell.seed)  # both once more, now that both are there
        with self._seconds("trials"), telemetry.Sampler() as sampler:
            tell = lambda n: self.tell(f"trial {n + 1} of {self.job.rounds}")  # noqa: E731
            try:
                trials = trial.run_rounds(arms, self.job.rounds, self.cell.seed + 1, tell)
            except trial.Diverged as error:
                raise Failure("wrong_numerics", str(error), None) from None
        self.result.telemetry = sampler.summary(list(zip(*trials.values(), strict=True)))
        for name, done in trials.items():
            times = {phase: [t.device_ms[phase] for t in done] for phase in done[0].device_ms}
            self.result.arms[name].times = {**times, "total": [t.total_ms for t in done]}
        self.trials = trials

    def profile(self) -> None:
        """Busy time of the device, after the trials, and with it the label and the distance to the ceiling."""
        from lorabench.measure import profile, roofline

        with self._seconds("profile"):
            for name, arm in self.arms.items():
                self.tell(f"profiling the {name}")
                self.result.arms[name].bound = roofline.bounds(
                    self.trials[name],
                    profile.device_busy(arm),
                    roofline.flops(self.cell.model.shape(), self.samples),
                    self.job.ceiling_tflops,
                    recomputes=any(a.recomputes for a in arm.ablations),
                )


def agreed(cell: Cell, numerics: Numerics, reference: ArmResult, candidate: ArmResult, dtype: Any) -> Numerics:
    """The gate's verdict with the full arms' agreement added; also used by the runner for arms of two processes."""
    from lorabench.measure.numerics import First, agree

    first, second = (First(a.first_loss, a.first_grad_norm) for a in (reference, candidate))
    return agree(numerics, first, second, dtype, cell.model.lora.lora_dropout)


def tokens(reference: ArmResult, candidate: ArmResult) -> Tokens:
    return Tokens(
        real=candidate.real or reference.real,
        trained=candidate.trained or reference.trained,
        reference_padded=reference.padded,
        candidate_padded=candidate.padded,
    )


def probe(dtype: str, connection: Connection) -> None:
    """Entry of the process that looks at the machine and measures its ceilings, once a sweep."""
    try:
        import torch

        from lorabench.measure.machine import describe
        from lorabench.measure.roofline import ceilings

        machine = describe()
        found = ceilings(torch.device(machine.device), getattr(torch, machine.dtype(dtype)))
        connection.send((machine, found))
    except BaseException as error:
        connection.send((None, f"{type(error).__name__}: {_first_line(error)}"))
    finally:
        connection.close()
