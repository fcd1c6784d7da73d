"""The kind of a cell, as measuring sees it: what an arm is, what one trial does, what the gate compares.

One file a kind in measure/kinds. What is common to all of them (pairing, rounds, memory, telemetry, profile, time-outs)
asks the methods of this class and no kind by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.job import ADAPTER, Job
from lorabench.contract.kind import KindSpec, kind
from lorabench.contract.memory_fit import Edge
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import ONE, Ranks
from lorabench.measure.base import Base
from lorabench.record.schema import Numerics

EVIDENCE = "evidence"  # folder inside the sweep's own for what a cell's arms are certified by; emptied after each cell
Begin = Callable[[str], None]  # called with a phase's name where it begins; the end of the trial ends the last one
# A timed trial's number is (drawn * ROUNDS + round) * TURN + its position in its arm's turn. `drawn` is another one
# for each, the same in all arms: its data follows from the number, and so nobody can work ahead.
TURN, ROUNDS = 64, 1 << 16
Verdicts = Iterator[tuple[str, Numerics]]  # (job, verdict); the job is "" where there is but one


@dataclass(frozen=True)
class Request:
    """What an arm is built from. `samples` are each job's, in the jobs' order.

    `layers` cuts the depth (for the gate); `upcast` turns the finished model to float32 (the gate's gold), with the
    weights as `dtype` rounded them; `dense`: toggles that hold weights in another format leave plain linears with the
    same numbers, as `upcast` has them, in `dtype`. `scratch` is a folder of the sweep for files that its cells share.
    `base`: the frozen weights that the seat's arms share; None: the arm has its own, as a shallow one always has.
    `mine`: the number of the one job that this process trains; None: it trains all of them.
    """

    name: str
    cell: Cell
    model: ModelSpec
    jobs: list[Job]
    samples: list[list[Sample]]
    ablations: tuple[Ablation, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int
    scratch: Path
    layers: int | None = None
    upcast: bool = False
    dense: bool = False
    ranks: Ranks = ONE
    base: Base | None = None
    mine: int | None = None

    @property
    def unpatched(self) -> bool:
        """Whether toggles leave a plain model, with the numbers of the weights that they would hold."""
        return self.upcast or self.dense

    def own(self) -> Request:
        """The same with the jobs that this process trains. Where that is but one, it keeps its name, and PEFT calls its
        adapter as it does in a process without other jobs."""
        if self.mine is None:
            return self
        job = replace(self.jobs[self.mine], adapter=ADAPTER)
        return replace(self, jobs=[job], samples=[self.samples[self.mine]], mine=None)


def request_of(cell: Cell, name: str, dtype: torch.dtype, device: torch.device, scratch: Path = Path()) -> Request:
    """What one arm of a cell, "reference" or "candidate", is built from by its kind."""
    return Request(
        name=name, cell=cell, model=cell.model, jobs=cell.jobs, samples=kind(cell.kind).samples(cell),
        ablations=cell.arm(name), dtype=dtype, device=device, seed=cell.seed, scratch=scratch,
    )  # fmt: skip


@dataclass(frozen=True)
class GateRequest:
    """What a gate needs: the cell, whose candidate is judged, and how to ask for an arm."""

    cell: Cell
    arm: Callable[[str, Sequence[Ablation]], Request]  # (name, toggles) → what such an arm is built from
    ranks: Ranks
    # Called with what two right runs of each job differ by (job, name of its file, noise), before any toggle is asked.
    noise: Callable[[str, str, Any], None]


@dataclass(frozen=True)
class JobCounts:
    """One job of an arm: tokens of a step, and what it holds (bytes)."""

    real: int
    padded: int
    trained: int
    adapter_bytes: int = 0
    optimizer_bytes: int = 0


class Kind(KindSpec):
    """Base of every kind. The docstring of each method says what it has to give; most have an ordinary answer."""

    def samples(self, cell: Cell) -> list[list[Sample]]:
        """The samples of each job."""
        return [[] for _ in cell.jobs]

    def build(self, request: Request) -> Arm:
        """Build an arm. Raises what the toggles' hooks raise, WeightsError, and out-of-memory errors."""
        raise NotImplementedError

    def adapts(self, model: ModelSpec) -> bool:
        """Whether an arm of this model has adapters at all."""
        return True

    def adapter(self, model: ModelSpec) -> dict[str, Any]:
        """Keyword arguments of PEFT's LoraConfig."""
        return model.adapter()

    def trial(self, arm: Arm, begin: Begin) -> Any:
        """Do the work of one trial, with `begin(phase)` at the start of each phase. Returns what `losses` takes."""
        raise NotImplementedError

    def losses(self, arm: Arm, out: Any) -> dict[str, float]:
        """The losses of a trial by job, asked for after its last mark; {} where there is none."""
        return {}

    def clear(self, arm: Arm) -> None:
        """Give back what the last trial left: gradients, results."""

    def held(self, arm: Arm) -> dict[str, int]:
        """Bytes that the arm holds, by field of a record's ArmMemory: weights, adapters, optimizer."""
        return {}

    def measures_host(self, arm: Arm) -> bool:
        """Whether the process's resident memory is part of the result; on a CPU there is nothing else."""
        return arm.device.type == "cpu"

    def rates(self, arm: Arm) -> dict[str, float]:
        """10⁹ bytes a second at which the phases' bytes can be moved, by phase, measured now, after the trials."""
        return {}

    def audited(self, arm: Arm) -> Sequence[Ablation]:
        """The toggles whose audit has to find them at work: not those of slots that another one decides."""
        decided = {slot for ablation in arm.ablations for slot in ablation.decides}
        return [a for a in arm.ablations if a.slot not in decided]

    def imports(self, request: Request) -> None:
        """Import what an arm of this kind is built from, before any toggle is asked: what a toggle then replaces in it
        is noticed. PEFT always: beside torchao its import runs transformers' own once more."""
        import peft  # noqa: F401

    def counts(self, arm: Arm) -> dict[str, JobCounts]:
        """Tokens and bytes by job; {} where a trial has no tokens."""
        return {}

    def gate(self, gate: GateRequest) -> Verdicts:
        """Judge the cell's candidate before anything is built at full size and timed."""
        yield from ()

    def feed(self, arm: Arm, number: int) -> None:
        """Put the data of trial `number` into the arm: the same in all arms, other data in every trial; 0 is the
        workload's own. Nothing: the kind's data is the same in every trial."""

    # The evidence that arms are judged by. An arm answers trial by trial, in its own process (`first_trial` to
    # `last_trial`); the runner, which no toggle can reach, adds the answers together (`take`, `finish`) and judges
    # (`agree`). All answers are by job and cross a process's boundary: numbers, strings, paths and numpy's arrays. A
    # kind without evidence overrides none of these.

    def first_trial(self, arm: Arm, run: Callable[[], Any], request: Request) -> dict[str, Any]:
        """Run the first full trial by `run()`, and open the evidence of each job: objects with `add(number, observed)`,
        `add_sketch(number, look)` and `finish(last)`, as far as the kind gives what they take. `settle` completes
        them in place, so they are sent after it."""
        run()
        return {}

    def settle(self, arm: Arm, run: Callable[[], Any]) -> None:
        """Right after `first_trial`, without any trace: what else has to be known of the arm before it is warmed up."""

    def begin_turn(self, arm: Arm, number: int = 0, each: bool = True) -> None:
        """Before each turn, whose first trial is `number`; not `each`: it has no other, so what costs time may wait
        until the trial is picked. To a place that follows from the number alone, the same in
        all arms. What it needs on the device is put there by the first call, which comes after the arm's memory has
        been measured."""

    def observe(self, arm: Arm, number: int, losses: dict[str, float]) -> dict[str, Any]:
        """After each timed trial, before it is cleared: what there is to say of it. Cheap. `number` is the one that
        its data was fed by."""
        return {}

    def look(self, arm: Arm, number: int) -> dict[str, Any]:
        """After `observe`, of the trials that the runner picks: a sketch of what the trial left."""
        return {}

    def last_trial(self, arm: Arm, run: Callable[[], Any]) -> dict[str, Any]:
        """After the timed trials, of which none comes after it: run one more by `run()`, and say what there is to say
        of it."""
        run()
        return {}

    def cross(self, reference: Arm, candidate: Arm) -> dict[str, Any]:
        """After the `last_trial` of both, where they are in one process: what the reference's model says of the
        candidate. `finish` adds it to the candidate's evidence."""
        return {}

    def take(self, evidence: dict[str, Any], number: int, observed: dict[str, Any], looks: dict[str, Any]) -> None:
        """In the runner: add a trial's answers to the evidence. Raises KeyError, TypeError or ValueError where they
        are not what this kind's arms say. `looks`: {} of a trial that was not picked."""
        for job, own in evidence.items():
            own.add(number, observed[job])
            if looks:
                own.add_sketch(number, looks[job])

    def finish(self, evidence: dict[str, Any], last: dict[str, Any]) -> None:
        """In the runner: add the answer of `last_trial` or of `cross` to the evidence. Raises as `take` does."""
        for job, found in last.items():
            evidence[job].finish(found)

    def said(self, arm: Arm, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """After the timed trials: what a record says of this arm beside its times, which are given in milliseconds by
        phase. What JSON can hold."""
        return {}

    def agree(
        self, cell: Cell, verdict: Numerics | None, reference: Any, candidate: Any, dtype: torch.dtype
    ) -> Numerics | None:
        """In the runner: the candidate's verdict with the agreement of the full arms in it, of one job's evidence. What
        is of trials is compared over those that both arms took, by their numbers."""
        return verdict

    def edge(self, request: Request, until: float) -> Edge | None:
        """Of an arm that ran out of memory beside nobody: how large a trial would have fitted. None: nobody knows.
        `until`: by time.perf_counter(), after which nothing more is tried."""
        return None

    def explain(self, numerics: Numerics) -> str:
        """Why a verdict did not pass, in words."""
        return f"{numerics.unequal} of {numerics.tensors} differ from the reference's, first {numerics.worst}"
