"""The seat: a process, or one rank of several, in which arms of a family are resident and wait for their turns.

The sweep's own process drives it, a call at a time: `open`, `prepare` of each arm, `turn` after turn, `end` of each.
What an arm is its kind says. A seat only measures: its answers are evidence, and the sweep's process judges it, out of
any toggle's reach.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.arm import Arm
from lorabench.contract.family import Family, Stack
from lorabench.contract.hooks import asked, first_cause, first_line, message_of, noted, printable
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.memory_fit import Edge
from lorabench.contract.ranks import ONE, Ranks
from lorabench.contract.work import Work
from lorabench.measure import energy, fairness, memory, profile, roofline, trial
from lorabench.measure.base import Base
from lorabench.measure.kind import GateRequest, JobCounts, Kind, Request, request_of
from lorabench.record.schema import ArmMemory, Energy, Numerics, PhaseRoofline

CANDIDATE = "candidate"  # every stack is the candidate of its own cell, the reference included


@dataclass(frozen=True)
class Seating:
    """What a process is started for: arms of a family, on a machine. `alone`: it holds arms of one stack, whose patches
    may reach the whole process. `scratch` is the sweep's folder for what its seats share."""

    family: Family
    machine: Machine
    alone: bool
    ceiling_tflops: float | None
    scratch: str

    @property
    def ranks(self) -> int:
        return self.family.ranks

    @property
    def joins(self) -> bool:
        """Whether its processes are connected, be it only with themselves."""
        return self.ranks > 1 or any(a.parallel for stack in self.family.stacks for a in stack.ablations)

    @property
    def one_gpu(self) -> bool:
        """Whether its ranks, if there are several, are all on the machine's first GPU."""
        return self.family.gpus < self.ranks


@dataclass
class Ready:
    """An arm is resident and warm. `evidence` by job, of its first full trial; `noise` by job: the name of its file,
    and how far two right runs are apart. Milliseconds of the warm-up's trials; bytes; seconds by part."""

    numerics: dict[str, Numerics] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, tuple[str, Any]] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    memory: ArmMemory | None = None
    own_bytes: int = 0  # that stay allocated beside the base
    base_bytes: int = 0  # of the base that the arms of its process share, whatever it uses of that
    jobs: dict[str, JobCounts] = field(default_factory=dict)
    phases: tuple[str, ...] = ()  # of the first trial
    warm_ms: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Made:
    """One timed trial, and what was observed of it. `grew`: it had to ask the device for memory."""

    trial: trial.Trial
    observed: Any = None
    grew: bool = False


@dataclass
class Ended:
    """What is known of an arm after its last turn."""

    last: dict[str, Any] = field(default_factory=dict)  # by job
    said: dict[str, Any] = field(default_factory=dict)
    roofline: dict[str, PhaseRoofline] | None = None
    energy: Energy | None = None
    tflop: dict[str, dict[str, float]] = field(default_factory=dict)  # useful work by job and phase
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Failed:
    """An arm cannot go on, for a reason that a user understands. `disturbed`: not trusted for what the clocks say, of
    which a busy machine can be the cause. `spoilt`: what else sits in this process may have changed with it;
    `everywhere`: what sits in other processes, too."""

    status: str
    reason: str
    disturbed: bool = False
    spoilt: bool = False
    everywhere: bool = False
    numerics: dict[str, Numerics] = field(default_factory=dict)


Answer = Any  # what the called method returns, or Failed
CALLS = ("open", "prepare", "turn", "look", "end", "cross", "drop", "give_back", "closing", "offer", "edge")
OnTrial = Callable[[str, float | None], None]  # before each timed trial (name, None), and after it (name, milliseconds)


class Seat:
    """Of several ranks each does the same, and is called for the arms that it belongs to."""

    def __init__(
        self, seating: Seating, tell: Callable[[str], None], ranks: Ranks = ONE, device: torch.device | None = None,
        on_trial: OnTrial = lambda name, ms: None,
    ) -> None:  # fmt: skip
        """`tell` is called with what is being done, in words. `device`: this rank's; None: the machine's first."""
        self.seating, self.family, self.tell, self.ranks, self.on_trial = seating, seating.family, tell, ranks, on_trial
        self.stacks: dict[str, Stack] = {}
        self.device = device or torch.device(seating.machine.device)
        self.dtype = getattr(torch, seating.machine.dtype(self.family.reference.model.dtype))
        self.arms: dict[str, Arm] = {}
        self.before: dict[str, Any] = {}  # how each arm was when it was ready
        self.host: dict[str, list[trial.Trial]] = {}  # timed trials of each arm
        self.base = Base(Path(seating.scratch))
        self.turned = ""  # whose turn was the last
        self.idle: dict[str, float] | None = None  # what computed beside the arms before the first turn, in seconds
        self.inside: dict[str, Counter[str]] = {}  # of each arm: what threads computed within its trials, in seconds
        self.now = "starting"

    def call(self, what: str, *arguments: Any) -> Answer:
        """The answer of one of CALLS. An expected failure is an answer, too; anything else is an exception."""
        assert what in CALLS
        self.now = str(arguments[0]) if arguments else what
        try:
            return getattr(self, what)(*arguments)
        except fairness.Untrusted as error:
            disturbed = isinstance(error, fairness.Disturbed)
            everywhere = isinstance(error, fairness.Overwritten) and self.base.elsewhere
            failed = Failed("untrusted", str(error), disturbed, spoilt=not disturbed, everywhere=everywhere)
        except Unsupported as error:
            failed = Failed("unsupported", message_of(error))
        except NotApplied as error:
            failed = Failed("not_applied", message_of(error))
        except WrongNumerics as error:
            failed = Failed("wrong_numerics", str(error), numerics=error.numerics)
        except Exception as error:
            if not memory.out_of_memory(error):
                raise
            failed = Failed("oom", f"it ran out of memory: {_shortage(error)}")
        # Only now: while the exception is handled, its traceback holds the arm that is to be given back.
        self.drop(self.now)
        words = printable(failed.reason) if failed.reason.strip() else f"{failed.status}, and nobody says why"
        return replace(failed, reason=words)

    def open(self) -> None:
        """Before any toggle is asked. Nothing of it needs the GPU, so seats open side by side."""
        stacks = {stack.kind: stack for stack in self.family.stacks}
        for name, stack in stacks.items():
            kind(name).imports(self._request(stack, stack.ablations))
        self.guard = fairness.Guard(alone=self.seating.alone)

    def offer(self) -> bytes:
        """The base for other seats."""
        return self.base.offered()

    def _request(self, stack: Stack, ablations: Sequence[Ablation]) -> Request:
        made = request_of(stack.cell, CANDIDATE, self.dtype, self.device, Path(self.seating.scratch))
        ranks = self.ranks if any(a.parallel for a in ablations) else ONE  # plain PEFT has one process in any gate
        mine = None
        if any(a.process_a_job for a in ablations):
            ranks, mine = self.ranks.alone(), self.ranks.rank
        return replace(made, name=stack.name, ablations=tuple(ablations), ranks=ranks, base=self.base, mine=mine)

    def prepare(self, name: str, stack: Stack, gate: bool = True, offered: bytes | None = None) -> Ready:
        """Judge the arm on a shallow model, build it, take its first trial under the audit, warm it up, measure its
        memory. `gate`: whether this process judges it at all; `offered`: another seat's base, for the first arm."""
        self.stacks[name], into, self.idle = stack, Ready(), None
        self.guard.declare(stack.ablations)
        if offered is not None:
            self.base = Base.opened(offered)
        of_kind: Kind = kind(stack.kind)
        if gate:
            with _seconds(into, "gate"):
                self._gate(stack, into)
        request = self._request(stack, stack.ablations)
        with _seconds(into, "build"):
            self.give_back()  # else this arm would take what the others left cached, and seem to reserve nothing
            held, cached = memory.allocated(self.device), memory.reserved(self.device)
            kept = self.base.nbytes
            self.tell(f"building {name}")
            arm = of_kind.build(request.own())
            if self._let_go(arm):
                request = replace(request, base=self.base)  # else it would hold the one that went
                self.give_back()
        with _seconds(into, "warmup"):
            self.tell(f"warming up {name}")
            ops, handed = Counter[str](), {}

            def traced() -> trial.Trial:
                run = partial(trial.run_trial, arm)
                # A pipeline's stages count what they send, and shapes take three times as long to record.
                shapes = arm.ranks.size > 1 and not any(a.leaves_out for a in arm.ablations)
                done, ran, sent = profile.collectives(run) if shapes else (*profile.traced(run), {})
                ops.update(ran)
                handed.update(sent)
                into.phases = tuple(done.device_ms)
                return done

            into.evidence = of_kind.first_trial(arm, traced, request)
            self._audit(stack, arm, ops, handed, into)
            of_kind.settle(arm, lambda: trial.run_trial(arm))
            peaks = memory.Peaks(arm)
            # One trial less than is asked for: each arm has a turn that does not count before the first round.
            warm = trial.warm_up(arm, max(1, stack.cell.warmup - 1), peaks.trial)
            into.warm_ms = [done.total_ms for done in warm]
            of_kind.clear(arm)
        with _seconds(into, "profile"):
            # As if it were alone: without what the base kept meanwhile, with all of the base that it uses.
            lent, into.base_bytes = self.base.bytes_of(arm.model), self.base.nbytes
            kept = into.base_bytes - kept
            into.own_bytes = memory.allocated(self.device) - held - kept
            reserved = memory.reserved(self.device) - cached - kept
            into.memory = peaks.memory(into.own_bytes + lent, reserved + lent)
            into.jobs = of_kind.counts(arm)
            of_kind.clear(arm)
        self.guard.check_all()
        self._check_base()
        self.guard.watch(name, arm)
        self.arms[name], self.before[name], self.host[name] = arm, fairness.of_arm(arm), []
        self.give_back(self.seating.alone)  # what is left of this is in the way of other processes
        return into

    def _let_go(self, arm: Arm) -> bool:
        """A part of a model of which no arm here uses the half, each having made weights of its own of it, goes: of the
        70B it is as large as what an arm needs. What is still used is the arm's own from here on. Whether it went."""
        divided = any(ablation.leaves_out for ablation in arm.ablations)
        used = max(self.base.bytes_of(one.model) for one in (arm, *self.arms.values()))
        goes = divided and 2 * used < self.base.nbytes
        if goes:
            self.base = Base(self.base.folder)
        return goes

    def _gate(self, stack: Stack, into: Ready) -> None:
        """Before the arm is built and timed. Raises WrongNumerics."""
        self.tell("numerics gate")
        asking = GateRequest(
            stack.cell, lambda name, ablations: replace(self._request(stack, ablations), name=name),
            # Where each process trains a job of its own, it judges that one itself.
            self.ranks if stack.ranks > 1 and not stack.process_a_job else ONE,
            lambda job, file, noise: into.noise.update({job: (file, noise)}),
        )  # fmt: skip
        of_kind = kind(stack.kind)
        for job, verdict in of_kind.gate(asking):
            into.numerics[job] = verdict
            if not verdict.passed:
                reason = of_kind.explain(verdict)
                raise WrongNumerics(f"job {job}: {reason}" if job else reason, into.numerics)

    def _audit(self, stack: Stack, arm: Arm, ops: Counter[str], handed: dict[str, int], into: Ready) -> None:
        for ablation in kind(stack.kind).audited(arm):
            evidence = Evidence(arm, arm.patched[ablation.name], ops, handed)
            before = _inside(arm)
            sites = int(asked(ablation, Ablation.audit, evidence))
            if sites == 0:
                raise NotApplied(f"{ablation.name} changed nothing in {stack.cell.model.name}")
            _check_sites(ablation, sites, evidence)
            into.applied[ablation.name] = sites
            into.notes.update(noted(ablation, evidence))
            if before != _inside(arm):
                raise fairness.Untrusted(f"the audit of {ablation.name} changed the arm that it was to look at")
            if ablation.own_dropout_masks and any(job.lora.lora_dropout for job in stack.cell.jobs):
                into.notes["gate"] = f"at dropout 0: {ablation.name} draws masks that plain PEFT cannot share"

    def edge(self, name: str, stack: Stack, seconds: float) -> Edge | None:
        """Of an arm that ran out of memory here, beside nobody: how large a trial would have fitted. Nothing of the arm
        is left. `seconds`: after which nothing more is tried."""
        self.give_back()
        self.tell(f"how much of {name} fits")
        until = time.perf_counter() + seconds
        found = kind(stack.kind).edge(self._request(stack, stack.ablations), until)
        self.drop(name)
        return found

    def turn(self, name: str, numbers: Sequence[int], on: bool = False, each: bool = True) -> list[Made]:
        """Timed trials on the data of these numbers, from where the first full trial began; `on`: from where the arm
        is. Not `each`: the turn has one trial, whose update is looked at where it is picked. The last one's results
        stay until they were looked at. The garbage collector runs between turns."""
        arm, of_kind = self.arms[name], self._kind(name)
        if self.idle is None:  # what an arm's compiler computed while arms were prepared is no work beside the trials
            self.idle = dict(self.guard.busy())
        made = []
        gc.disable()
        try:
            if not on:
                self._forget_turn()
                self.turned = name
                of_kind.begin_turn(arm, numbers[0], each)
            for number in numbers:
                self.on_trial(name, None)
                helped, taken = self.guard.helpers(), memory.times_taken(self.device)
                done = trial.run_trial(arm, number=number)
                grew = memory.times_taken(self.device) > taken
                self.inside.setdefault(name, Counter()).update(
                    {thread: spent - helped.get(thread, 0.0) for thread, spent in self.guard.helpers().items()}
                )
                self.on_trial(name, done.total_ms)
                self.host[name].append(done)
                made.append(Made(done, of_kind.observe(arm, number, done.losses), grew))
                self.guard.check()
        finally:
            gc.enable()
        gc.collect(0)
        return made

    def _forget_turn(self) -> None:
        """What the last arm has made of this round's tokens, which another one could take for its own."""
        if before := self.arms.get(self.turned):
            before.kind.clear(before)
            self._kind(self.turned).begin_turn(before, each=False)

    def look(self, name: str, number: int) -> Any:
        """What the last trial left, which had this number."""
        return self._kind(name).look(self.arms[name], number)

    def _kind(self, name: str) -> Kind:
        """What of an arm is recorded and held against another: of a limit less than the arm's own kind would."""
        return kind(self.stacks[name].kind)

    def end(self, name: str, number: int, usual_ms: float, measure_energy: bool) -> Ended:
        """Energy; then one more trial from the start, whole, in which it is seen where the time goes."""
        arm, of_kind, into, stack = self.arms[name], self._kind(name), Ended(), self.stacks[name]
        busy: dict[str, profile.Busy] | None = None

        def last() -> trial.Trial:
            nonlocal busy
            done, busy = profile.watched_trial(arm, number)
            return done

        with _seconds(into, "evidence"):
            if changed := fairness.difference(self.before[name], fairness.of_arm(arm)):
                # Another arm can have done it: it is said when it is so without the others, too.
                raise fairness.Disturbed(f"the {name} was changed while it was timed: {changed}")
        with _seconds(into, "energy"):
            arm.kind.clear(arm)
            if measure_energy and arm.kind.counts(arm) and stack.ranks == 1:
                self.tell(f"measuring the energy of {name}")
                into.energy = energy.measure(arm, usual_ms)
        with _seconds(into, "evidence"):
            self.tell(f"certifying {name}")
            masked = any(job.lora.lora_dropout for job in stack.cell.jobs)
            into.last = of_kind.last_trial(arm, partial(trial.run_trial, arm, number=number) if masked else last)
            if masked:  # that one ran without its masks
                last()
            if timed := self.host[name]:  # none, where the process was started again after the last round
                into.said = of_kind.said(arm, {p: [t.device_ms[p] for t in timed] for p in timed[0].device_ms})
            arm.kind.clear(arm)
        with _seconds(into, "profile"):
            self._profile(stack, arm, into, busy)
            arm.kind.clear(arm)
        return into

    def _profile(self, stack: Stack, arm: Arm, into: Ended, busy: dict[str, profile.Busy] | None) -> None:
        """From the busy time of the device by phase, where that is known, the label and the distance to the ceiling."""
        dtype = str(self.dtype).removeprefix("torch.")  # which the model may leave to the machine
        cell = replace(stack.cell, model=stack.cell.model.model_copy(update={"dtype": dtype}))
        works = arm.kind.work(cell, kind(stack.kind).samples(cell), arm.ablations)
        into.tflop = {job.name: work.tflop for job, work in zip(cell.jobs, works, strict=False)}
        ceiling = self.seating.ceiling_tflops  # of one device; the work is that of all ranks together
        of_all = ceiling and ceiling * arm.ranks.size
        if stack.process_a_job:  # one process sees neither the others' kernels nor the time of the slowest
            of_all = busy = None
        if done := self.host[stack.name]:
            into.roofline = roofline.phase_rooflines(done, busy, sum(works, Work()), of_all, arm.kind.rates(arm))

    def cross(self, name: str, reference: str) -> Any:
        """What the reference's model says of this arm's evidence."""
        arm, other = self.arms[name], self.arms.get(reference)
        return self._kind(name).cross(other, arm) if other else None

    def closing(self) -> dict[str, float]:
        """After the last turn: seconds computed beside the arms since the first one, by whom; and that nothing else was
        changed. A thread that writes an arm's tensors to the disk works within that arm's trials, and is no one's help
        beside them: what it computed in those of one arm does not count."""
        self.guard.check_all()
        self._check_base()
        own = {name: max(one[name] for one in self.inside.values()) for name in set().union(*self.inside.values())}
        before = self.idle or {}
        found = {name: spent - before.get(name, 0.0) - own.get(name, 0.0) for name, spent in self.guard.busy()}
        # Who stays for another family is looked at anew.
        self.idle, self.inside, self.host = None, {}, {name: [] for name in self.arms}
        return found

    def _check_base(self) -> None:
        """Raises Overwritten where the weights that all arms share are not what they were."""
        if self.base.changed():
            raise fairness.Overwritten("the frozen weights that all arms share were written to")

    def drop(self, name: str) -> None:
        """An arm leaves, and gives back what it held."""
        for held in (self.arms, self.before, self.host):
            held.pop(name, None)
        if hasattr(self, "guard"):
            self.guard.forget(name)
        if self.ranks.rank and not self.arms:  # nobody else uses this one; that of rank 0 may be lent to other seats
            self.base = Base(self.base.folder)
        self.give_back()

    def give_back(self, collect: bool = True) -> None:
        """Cached memory to the device, for another seat: see `memory.give_back`. The last turn's results go too: a
        library's nodes may hold activations for as long as the loss that they made is there."""
        self._forget_turn()
        memory.give_back(self.device, collect)


class WrongNumerics(Exception):
    """The gate did not pass; the text says why, and the verdicts by job what was found."""

    def __init__(self, words: str, numerics: dict[str, Numerics]) -> None:
        super().__init__(words)
        self.numerics = numerics


@contextlib.contextmanager
def _seconds(into: Ready | Ended, part: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        into.seconds[part] = into.seconds.get(part, 0.0) + time.perf_counter() - began


def _check_sites(ablation: Ablation, sites: int, evidence: Evidence) -> None:
    """Raises NotApplied where an audit says more than there can be."""
    arm = evidence.arm
    excused = ablation.global_patch or ablation.clears  # what reaches further; what is there to change nothing
    if arm.touched is not None and ablation.name not in arm.touched and not excused:
        raise NotApplied(
            f"{ablation.name} says that it is at work in {sites} sites, but none of its hooks changed anything"
        )
    there = sum(1 for _ in arm.model.modules()) + sum(1 for _ in arm.model.parameters()) + sum(evidence.ops.values())
    most = there + len(arm.samples) + arm.real + arm.ranks.size
    if arm.steps and sites > most:
        raise NotApplied(f"{ablation.name} says that it is at work in {sites} sites; there are {most} at most")


def _inside(arm: Arm) -> Any:
    """What an audit has no business to change of an arm."""
    return fairness.attributes(arm), fairness.of_arm(arm)


def _shortage(error: BaseException) -> str:
    """What was asked for, what was free and who holds how much; torch's advice on its allocator is left out."""
    return first_line(first_cause(error)).partition(" Of the allocated memory")[0].removeprefix("CUDA out of memory. ")
