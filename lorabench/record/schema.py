"""The record: what one cell came to, as it stands in one line of records.jsonl.

The status decides which fields a record may have: a row with `wrong_numerics` cannot carry a speed, by construction.
What a record with status `ok` must carry beside its times, its kind says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown

SCHEMA = 3  # of what is written: a line an arm and session
PAIRS = 2  # the last schema of which a line was two arms held together
REFERENCE = "reference"  # the arm's name
TOTAL = "total"  # the sum of a kind's phases, beside them in `phases`

Status = Literal[
    "ok", "oom", "timeout", "crash", "wrong_numerics", "untrusted", "not_applied", "unsupported", "conflict"
]
DID_NOT_APPLY: tuple[Status, ...] = ("unsupported", "not_applied", "conflict")
ArmName = Literal["reference", "candidate"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)


class Strict(BaseModel):
    """A part of a record: unknown fields are an error, so that a typo is never silently lost. A number that is not
    finite is written as a word ("NaN", "Infinity"), which JSON can hold and reading turns back into the number."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


LONGEST_MS = 1e10  # some months
INTERRUPTED = "rounds_until_the_sweep_was_ended"  # in the notes of a record: by its budget, or from outside
UNCHECKED = "ended_before_its_last_checks"  # in the notes of a record: it was from outside
# Of a trial: from a nanosecond on, below which no clock here tells anything.
Milliseconds = Annotated[float, Field(ge=1e-6, le=LONGEST_MS, allow_inf_nan=False)]


class ArmMemory(Strict):
    """Bytes of one arm, net of what the other arm holds. On a CPU only `process` (resident set size) has a meaning. Of
    an arm whose processes share one GPU: each process's own, added up."""

    weights: int | None = None
    adapters: int | None = None
    optimizer: int | None = None
    static: int | None = None  # all that stays allocated between two trials, captured graphs' pools included
    peaks: dict[str, int] | None = None  # the most allocated in each phase, static part included
    peak: int | None = None  # the largest of these
    reserved: int | None = None  # by the caching allocator while this arm warmed up, from an emptied cache
    retries: int | None = None  # cudaMalloc retries: the allocator had to give memory back and try again
    process: int | None = None  # peak resident set size of the worker, this arm's growth


class PhaseRoofline(Strict):
    """Where one phase's time goes. Unknown stays None: an unknown ceiling gives an empty cell, never a guess."""

    host_ms: float | None = None  # until the call returned, without waiting for the device
    device_busy_ms: float | None = None  # union of the device's kernel and copy intervals
    # Of several GPUs rank 0's: in which a collective's kernel ran, waiting for other ranks included, and nothing else.
    communication_ms: float | None = None
    exposed_ms: float | None = None
    tflop: float | None = None  # LoRA-aware, recompute excluded
    recompute_tflop: float | None = None
    gbytes: float | None = None  # 10⁹ bytes that have to be moved, where the kind counts them
    ceiling_gbs: float | None = None  # 10⁹ bytes a second at which they can be, where the kind measures that
    of_ceiling: float | None = None  # tflop / median time / measured GEMM ceiling
    label: Literal["host-bound", "memory-bound", "compute-bound"] | None = None


class Check(Strict):
    """One comparison of what was timed: what was found at its worst place, and what was allowed there."""

    name: str
    found: float
    allowed: float
    where: str = ""  # the tensor, the trial

    @property
    def passed(self) -> bool:
        return self.found <= self.allowed

    @property
    def share(self) -> float:
        return share(self.found, self.allowed)

    @property
    def words(self) -> str:
        where = f": {self.where}" if self.where else ""
        return f"{self.name} is off by {self.found:.2g} (allowed {self.allowed:.2g}){where}"


def share(found: float, allowed: float) -> float:
    """What was found, as a share of what is allowed: above 1 it is too much. Infinite where it is no number."""
    if found != found:
        return math.inf
    if allowed:
        return found / allowed
    return math.inf if found else 0.0


class Numerics(Strict):
    """What the gate found. Errors are relative: |loss - gold| / |gold| and ||g - gold|| / ||gold|| (Frobenius).

    A kind that compares bit for bit has `unequal` in place of the errors.
    """

    passed: bool
    loss_error: float | None = None
    loss_allowed: float | None = None
    grad_error: float | None = None  # of the worst adapter tensor
    grad_allowed: float | None = None  # what that tensor was allowed
    plain_grad_error: float | None = None  # plain PEFT in the same low precision, its worst tensor
    plain_worst: str | None = None  # name of that one; None where plain PEFT makes no error, and in older records
    worst: str  # name of the worst tensor; "" where none is off
    tensors: int  # tensors (or numbers) compared
    unequal: int | None = None  # how many of them differ, where they have to be equal
    update_error: float | None = None  # optimizer's first update against float32 AdamW on the same gradients
    scale_error: float | None = None  # |<g, gold> / <gold, gold> - 1| of the worst tensor
    scale_allowed: float | None = None
    scale_worst: str = ""
    shallow_tokens: int | None = None  # of the longest sample on which the shallow models were compared
    checks: list[Check] = Field(default_factory=list)  # of the full arms and of every timed trial
    full_loss_error: float | None = None  # older records: the full arms against each other, first warm-up round
    full_grad_norm_error: float | None = None
    full_loss_allowed: float | None = None
    full_grad_norm_allowed: float | None = None
    depth_noise: bool | None = None  # whether two plain runs at full depth were measured for the limits of the checks
    tolerance: str | None = None  # in words, where the toggle changes the mathematics on purpose


class RankSpread(Strict):
    """The ranks of an arm that steps on several. Its times are those of the slowest rank in each trial."""

    size: int
    slowest: list[int]  # of each trial, the rank whose total was the largest
    spread: float  # median over trials of (slowest - fastest) / slowest


class Energy(Strict):
    """What the whole GPU took over a block of one arm's steps, alone, after the trials (measure/energy.py)."""

    joules: float = Field(gt=0, allow_inf_nan=False)
    steps: int = Field(ge=1)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class Telemetry(Strict):
    """The GPU while the trials ran: (min, median, max). A disturbed trial is flagged here and kept in the lists."""

    sm_clock_mhz: tuple[float, float, float] | None = None
    power_w: tuple[float, float, float] | None = None
    temperature_c: tuple[float, float, float] | None = None
    throttle: list[str] = Field(default_factory=list)
    foreign_processes: list[str] = Field(default_factory=list)
    disturbed_trials: list[int] = Field(default_factory=list)  # 0-based rounds
    load_average: float | None = None  # of the machine, one minute, at the end: the CPU's stand-in for the above


class Cost(Strict):
    """Seconds of wall time by part. Of an arm: its own; those of a family's arms add up to the family's, because what
    belongs to all of them (processes, gold, judging) stands with its reference."""

    wall: float
    spawn: float = 0.0  # until the worker runs our first line
    build: float = 0.0
    gate: float = 0.0
    warmup: float = 0.0
    trials: float = 0.0  # the turns of all rounds
    evidence: float = 0.0  # taken and judged in them and after them
    energy: float = 0.0
    profile: float = 0.0
    other: float = 0.0  # what none of these is; 0 in records that do not say


class Shown(Strict):
    """A contrast in which an arm is the candidate: what a design says is held against what."""

    key: str  # of the cell's content: resume finds it by this
    design: str
    rung: int | None = Field(None, ge=1)  # of a ladder, from 1; older records do not say
    ablations: list[str]  # the toggles under test; empty: the reference against itself, the noise floor
    against: list[str]  # the toggles of the arm that it is held against


class ArmTokens(Strict):
    """Tokens in one step of an arm."""

    real: int  # attended, not padding; the same set in every arm of a family
    trained: int  # positions that contribute to the loss
    padded: int  # computed beside the real ones


class ArmJob(Strict):
    """One job of an arm that has several: what it trained, and what the gate found of it."""

    r: int
    tokens: ArmTokens
    numerics: Numerics | None = None
    adapter_bytes: int = 0
    optimizer_bytes: int = 0
    tflop: dict[str, float] = Field(default_factory=dict)  # useful work by phase


class Line(Strict):
    """How a line of records.jsonl begins."""

    schema_: Literal[3] = Field(SCHEMA, alias="schema")

    model_config = ConfigDict(populate_by_name=True)


class Outcome(Strict):
    """What an arm's record and that of two arms held together both say."""

    family: str  # hash of what all its arms have in common
    session: str  # the sweep run that measured it; environment.json says on which machine
    replicate: int = Field(0, ge=0)  # in which of the sessions that `repeat=` asks for; 0 in records that do not say
    kind: str
    model: str
    workload: str
    status: Status
    reason: str | None = None  # in words a user understands; required unless ok
    rank: int | None = None  # which of an arm's ranks it was
    numerics: Numerics | None = None  # of several jobs the one nearest to its limit
    applied: dict[str, int] | None = None  # sites changed, per toggle
    notes: dict[str, Any] = Field(default_factory=dict)  # what a toggle says of itself: backend, versions, graph breaks
    telemetry: Telemetry | None = None
    cost: Cost | None = None
    log: str | None = None  # tail of the worker's output, where it failed


class ArmRecord(Outcome, Line):
    """One arm of a family in one session, as it stands in a line of records.jsonl.

    A turn is one entry of `rounds`, of `seats` and of each list in `phases`: in which round it was, in which process
    (0 is the one that most arms share), and what it took. `trials` of them were made in a turn, of which the first does
    not count where there are several; the turn's value is the median of the others.
    """

    arm: str  # its name in the family
    role: Literal["reference", "twin", "candidate"]  # twin: the reference again
    toggles: list[str]
    shown: list[Shown]  # what it is held against, and why; of the reference nothing
    rounds: list[int] = Field(default_factory=list)
    seats: list[int] = Field(default_factory=list)
    # By the kind's phases, in order; no total, but in what was made of an older line.
    phases: dict[str, list[Milliseconds]] = Field(default_factory=dict)
    trials: int = Field(1, ge=1)
    tokens: ArmTokens | None = None
    memory: ArmMemory | None = None
    jobs: dict[str, ArmJob] | None = None  # where there are several
    ranks: RankSpread | None = None  # where it steps on several
    said: dict[str, Any] = Field(default_factory=dict)  # what the kind says of the arm
    roofline: dict[str, PhaseRoofline] | None = None
    energy: Energy | None = None  # where the GPU counts it

    def totals(self, phases: Sequence[str] | None = None) -> list[float]:
        """ms of each turn, over these phases or all; what was made of an older line has a sum of its own."""
        own = [ms for name, ms in self.phases.items() if phases is None or name in phases]
        return self.phases.get(TOTAL) or [math.fsum(turn) for turn in zip(*own, strict=True)]

    @model_validator(mode="after")
    def _fields_follow_status(self) -> ArmRecord:
        try:
            of_kind = kind(self.kind)
        except NameUnknown as error:  # a third party's kind, whose package is not here
            raise ValueError(f"{error}; install the package that brings this kind") from None
        if self.status != "ok" and not self.reason:
            raise ValueError(f"status {self.status} needs a reason")
        if self.status != "ok" and self.phases:
            raise ValueError(f"status {self.status} must not carry times")
        if strange := [p for p in self.phases if p not in (*of_kind.phases, TOTAL)]:
            raise ValueError(f"kind {self.kind} has no phase {strange[0]!r}; it has {', '.join(of_kind.phases)}")
        if any(len(turns) != len(self.rounds) for turns in (self.seats, *self.phases.values())):
            raise ValueError("rounds, seats and phases need lists of one length")
        if self.status == "ok" and (not self.phases or (self.numerics and not self.numerics.passed)):
            raise ValueError(f"status ok needs {'numerics that passed' if self.phases else 'times'}")
        return self


class Record(Outcome, Shown):
    """Two arms of a family held together, over the rounds that both had: made on reading, see pairs.py. `ablations` are
    the toggles under test; `reference` and `candidate` the complete lists of each arm."""

    candidate: list[str]
    arm: ArmName | None = None  # which arm ran out of memory, hung or crashed, where that is known
    # In one process, trial by trial; in processes of their own round by round; or in no common round (A B B A).
    pairing: Literal["paired", "turns", "abba"] | None = None
    # Of separate ones: how many trials each made, in their order. Of turns: how many each pair of processes made, and
    # one number where an arm was in a single process throughout.
    processes: dict[ArmName, list[int]] | None = None
    # Milliseconds in the order of the rounds, by phase and arm: the kind's phases that both arms had, in order, and
    # TOTAL; one that the kind calls optional also of one arm, and after an `oom` those of the other arm.
    phases: dict[str, dict[ArmName, list[Milliseconds]]] = Field(default_factory=dict)
    # What the arms' own records say, by arm.
    tokens: dict[ArmName, ArmTokens] = Field(default_factory=dict)
    memory: dict[ArmName, ArmMemory] = Field(default_factory=dict)
    jobs: dict[ArmName, dict[str, ArmJob]] = Field(default_factory=dict)
    ranks: dict[ArmName, RankSpread] = Field(default_factory=dict)
    roofline: dict[ArmName, dict[str, PhaseRoofline]] = Field(default_factory=dict)
    energy: dict[ArmName, Energy] = Field(default_factory=dict)

    @property
    def reference(self) -> list[str]:
        return self.against

    @property
    def is_noise_floor(self) -> bool:
        return not self.ablations

    @property
    def separate(self) -> bool:
        """Whether the two arms were in processes of their own."""
        return self.pairing in ("turns", "abba")

    @property
    def is_candidate(self) -> bool:
        """Whether the candidate is a way to do the work at all, and not the least work that there is."""
        return kind(self.kind).candidate

    @property
    def trials_by_process(self) -> tuple[list[int], list[int]] | None:
        """How many trials each process of the reference and of the candidate made; None where they shared one process
        or one of them was not measured."""
        said: dict[Any, list[int]] = dict(self.processes or {})
        return (said["reference"], said["candidate"]) if len(said) == len(ARMS) else None

    def held(self, arm: ArmName) -> ArmMemory:
        """The memory of an arm; without any number where it is not known."""
        return self.memory.get(arm) or ArmMemory()

    def ms(self, arm: ArmName, phases: Sequence[str] = (TOTAL,)) -> list[float]:
        """The arm's trials of a phase, or the sums of several, trial by trial; [] where it lacks one of them."""
        lists = [self.phases.get(name, {}).get(arm, []) for name in phases]
        return [sum(times) for times in zip(*lists, strict=True)] if all(lists) else []

    @property
    def real_tokens(self) -> int | None:
        """In a step, the same in both arms; None where a trial has no tokens."""
        own = self.tokens.get("candidate") or self.tokens.get("reference")
        return own and own.real

    def padding(self, arm: ArmName) -> int:
        """Positions that an arm computes beside the real tokens."""
        return self.tokens[arm].padded if arm in self.tokens else 0

    @property
    def own_phases(self) -> list[str]:
        """The phases that were measured, in order, without their sum."""
        return [p for p in self.phases if p != TOTAL]

    @model_validator(mode="after")
    def _fields_follow_kind(self) -> Record:
        """What a kind asks of a pair; all else its arms have been held to."""
        if self.status == "ok":
            missing = [f for f in ("phases", "pairing", *kind(self.kind).carries) if not getattr(self, f)]
            missing += [] if self.applied is not None else ["applied"]
            if missing:
                raise ValueError(f"status ok needs {missing}")
        return self
