"""Slot `batch_size`: how many samples of a step go into one micro-batch, found by trying.

    python -m lorabench.sweep suite=auto_batch_size output=results/h200/auto_batch_size

The samples of a step stay the same set, and its loss is divided by the trained tokens of them all, so the gradient is
the same however many micro-batches they are put into. docs/batch-size.md has the method and what others do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Unsupported
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.memory_fit import GIB, Fit, Load, Measured, fit, largest, on_a_line
from lorabench.contract.rehearsal import Reading, Rehearsal, Sizing
from lorabench.contract.settings import Settings, Worth
from lorabench_ablations.fit_cache import FitCache

if TYPE_CHECKING:
    from lorabench.contract.step import Step

Tried = TypeVar("Tried")  # what a step that fits says of itself
BY_RANK = "every rank would find a size of its own, and the others would wait for micro-batches it has not"
SHAPES = "give batch_size of the workload the size that a cell without it finds"


@dataclass(frozen=True, kw_only=True)
class BatchSize(Ablation):
    """Base: a search for the micro-batch of a step within a budget, and what is said of it.

    `budget_gib`: what the arm may take in all, its weights included; null: what the device has free before the arm is
    built. A smaller budget stands for a smaller device: a step above it counts as out of memory.
    """

    slot: ClassVar[str] = "batch_size"
    excludes: ClassVar[dict[str, str]] = {
        "compilation": f"it would compile anew for every size that is tried; {SHAPES}",
        "parallel": BY_RANK,
        "limit": "the limit runs no part of the model",
    }

    budget_gib: PositiveFloat | None = None

    def size(self, rehearsal: Rehearsal) -> Sizing:
        began = perf_counter()
        budget = within(rehearsal.room, self.budget_gib)
        found = self.search(rehearsal, budget)
        told = {"budget_gib": round(budget / GIB, 3), "search_s": round(perf_counter() - began, 3)}
        return Sizing(found.batch_size, {**found.found, **told})

    def search(self, rehearsal: Rehearsal, budget: int) -> Sizing:
        """`budget` in bytes. Raises torch.OutOfMemoryError where not even one sample fits it."""
        raise NotImplementedError

    def audit(self, evidence: Evidence) -> int:
        """The number of micro-batches, of all jobs."""
        arm = evidence.arm
        for step, sizing in zip(arm.steps, arm.sizings, strict=True):
            if sizing is None:
                raise NotApplied("nothing was tried: another toggle says how many samples go into a micro-batch")
            if step.job and sizing.batch_size == step.job.workload.batch_size:
                raise NotApplied(f"it found {sizing.batch_size} samples a micro-batch, which the workload has already")
        return sum(len(step.batches) for step in arm.steps)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        arm = evidence.arm
        told = {s.name: _told(s, z) for s, z in zip(arm.steps, arm.sizings, strict=True) if z}
        return {self.name: told.get("", told)}  # of several jobs by their names


def within(room: int, gib: float | None) -> int:
    """Bytes of the budget that a device with this room has."""
    return room if gib is None else min(room, int(gib * GIB))


def _told(step: Step, sizing: Sizing) -> dict[str, Any]:
    positions = [b.real + b.padded for b in step.batches]
    return {
        "batch_size": sizing.batch_size,
        "micro_batches": len(positions),
        "most_tokens": max(positions),
        **sizing.found,
    }


@dataclass(frozen=True, kw_only=True)
class AutoBatchSize(BatchSize):
    """By a memory model: static + a x positions + b x squares of the rows' lengths, fitted to a few small steps.

    The largest size whose heaviest micro-batch is predicted to fit the budget less `head_room` is confirmed by one real
    step of that micro-batch; where it runs out of memory all the same, the size goes down by a tenth until it does not.
    `by` samples: the heaviest of this step's micro-batches, as the arm's own batching lays them out. `by` tokens: as
    many samples of seq_len tokens, so that whatever later steps bring fits; batch_size x seq_len tokens are the room
    that packing fills.
    """

    name: ClassVar[str] = "auto_batch_size"
    summary: ClassVar[str] = "the largest micro-batch that fits, by a memory model of a few small steps"
    worth_trying: ClassVar[Worth | None] = "time"

    by: Literal["samples", "tokens"] = "samples"
    head_room: Annotated[float, Field(ge=0, lt=1)] = 0.05

    def settings(self) -> Settings:
        return Settings(
            note="a trainer has no such search: give per_device_train_batch_size (Axolotl: micro_batch_size) the "
            "batch_size of this row's notes, and divide gradient_accumulation_steps by as much"
        )

    def search(self, rehearsal: Rehearsal, budget: int) -> Sizing:
        kept = FitCache(rehearsal.folder, rehearsal.configuration)
        model, found_by = kept.read(), "the fit of an earlier cell"
        if model is None:
            measured = probe(rehearsal, budget)
            found_by = "a step of one sample, the only one that fits"
            if len(measured) > 1:
                kept.write(model := fit(measured))
                found_by = f"a fit to {len(measured)} steps"
        samples = self._samples(rehearsal)
        heaviest = cache(lambda size: _heaviest(rehearsal.lay_out(samples, size), model))
        allowed = budget * (1 - self.head_room)
        fits = lambda size: model is not None and model(Load.of(heaviest(size))) <= allowed  # noqa: E731
        asked = largest(fits, len(samples))
        size, reading = confirmed(lambda size: rehearsal.run([heaviest(size)], budget), asked)
        told = {"by": self.by, "found_by": found_by, "head_room": self.head_room}
        told |= {"stepped_back": asked - size} if size < asked else {}
        return Sizing(size, told | held_to(model and model(Load.of(heaviest(size))), reading))

    def _samples(self, rehearsal: Rehearsal) -> Sequence[Sample]:
        return rehearsal.samples if self.by == "samples" else longest_possible(rehearsal, len(rehearsal.samples))


def held_to(predicted: float | None, reading: Reading) -> dict[str, Any]:
    """The prediction, where there was one, held to what the confirming step took."""
    measured = {"measured_gib": round(reading.peak / GIB, 4)}
    if predicted is None:
        return measured
    return measured | {"predicted_gib": round(predicted / GIB, 4), "error": round(predicted / reading.peak - 1, 4)}


def _heaviest(batches: Sequence[Batch], model: Fit | None) -> Batch:
    return max(batches, key=lambda batch: model(Load.of(batch)) if model else Load.of(batch).positions)


def longest_possible(rehearsal: Rehearsal, count: int) -> list[Sample]:
    """Samples of seq_len tokens, made of those of the step, of which every token is trained."""
    tokens = list(islice(cycle(rehearsal.samples[0].tokens), rehearsal.workload.seq_len))
    return [Sample(tokens, tokens)] * count


def probe(rehearsal: Rehearsal, budget: int) -> list[Measured]:
    """Steps of growing size: the longest sample; two samples; so many as are predicted to take a quarter of the budget,
    at most a quarter of all; and where these three are not on a line, of both the half. Their lengths are spread over
    the workload's, from the longest to the shortest: padding comes with a mask, and that may take another attention.

    Only the first may raise torch.OutOfMemoryError: of what one sample leaves, the others may be too much.
    """
    from torch import OutOfMemoryError

    ordered = sorted(rehearsal.samples, key=lambda s: -len(s.tokens))
    measured: list[Measured] = []

    def batch(count: int) -> Batch:
        spread = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        return _heaviest(rehearsal.lay_out(spread, count), None)

    def measure(count: int) -> None:
        tried = batch(count)
        measured.append((Load.of(tried), rehearsal.run([tried], budget).peak))

    def measure_share(share: float) -> None:
        model = fit(measured)
        fits = lambda count: model(Load.of(batch(count))) <= share * budget  # noqa: E731
        measure(max(3, largest(fits, int(share * len(ordered)))))

    measure(1)
    try:
        if len(ordered) > 1:
            measure(2)
        if len(ordered) > 3:
            measure_share(1 / 4)
            if not on_a_line(measured):
                measure_share(1 / 2)
    except OutOfMemoryError:
        pass
    return measured


def confirmed(run: Callable[[int], Tried], size: int, least: int = 1) -> tuple[int, Tried]:
    """The size whose step really fits, and what it took: a tenth less, and at least one, after each that runs out of
    memory. Raises torch.OutOfMemoryError where `least` does."""
    from torch import OutOfMemoryError

    while True:
        try:
            return size, run(size)
        except OutOfMemoryError:
            if size <= least:
                raise
            size = max(least, min(size - 1, int(0.9 * size)))


@dataclass(frozen=True, kw_only=True)
class ByCrashing(BatchSize):
    """Base of the searches that go on until memory runs out. On a CPU it does not run out: the system swaps, or ends
    the process. So there they want a budget, against which the step's own peak is held."""

    def size(self, rehearsal: Rehearsal) -> Sizing:
        if rehearsal.on_cpu and self.budget_gib is None:
            raise Unsupported(f"{self.name} tries until memory runs out; on a CPU give it a budget_gib")
        return super().size(rehearsal)


@dataclass(frozen=True, kw_only=True)
class FindExecutableBatchSize(ByCrashing):
    """accelerate's `find_executable_batch_size`, as it is: the first size that a whole step runs with, from
    `starting_batch_size` on downwards by a tenth after each that runs out of memory."""

    name: ClassVar[str] = "find_executable_batch_size"
    summary: ClassVar[str] = "accelerate's search: from 128 down by a tenth, until a step does not run out of memory"
    requires: ClassVar[Requires] = Requires(packages={"accelerate": "pip install accelerate"})

    starting_batch_size: PositiveInt = 128

    def settings(self) -> Settings:
        return Settings(
            trainer={"auto_find_batch_size": True, "per_device_train_batch_size": self.starting_batch_size},
            note="the trainer starts the training anew after each size that runs out of memory, and leaves "
            "gradient_accumulation_steps as it is",
        )

    def search(self, rehearsal: Rehearsal, budget: int) -> Sizing:
        from accelerate.utils import find_executable_batch_size
        from torch import OutOfMemoryError

        tried: list[int] = []

        def step(batch_size: int) -> Reading:
            tried.append(batch_size)
            return rehearsal.run(rehearsal.lay_out(rehearsal.samples, batch_size), budget)

        try:
            reading = find_executable_batch_size(step, starting_batch_size=self.starting_batch_size)()
        except RuntimeError as error:
            if "reached zero" not in str(error):
                raise
            raise OutOfMemoryError("the device is out of memory. One sample is too much") from None
        size = min(tried[-1], len(rehearsal.samples))
        return Sizing(size, {"found_by": "stepping down", "tried": tried, "measured_gib": round(reading.peak / GIB, 4)})


@dataclass(frozen=True, kw_only=True)
class DoublingBatchSize(ByCrashing):
    """Ludwig's search (Predibase's trainer, `batch_size: auto`), written anew from its description: sizes double from
    1; of each, five steps over made-up samples of the greatest length; it ends where memory runs out or the median
    samples per second fall, and takes the best so far. Ludwig also stops at a fifth of the data set; here it stops at
    the samples of the step.
    """

    name: ClassVar[str] = "doubling_batch_size"
    summary: ClassVar[str] = "Ludwig's search: doubles from 1 over samples of full length while throughput rises"

    steps: PositiveInt = 5

    def settings(self) -> Settings:
        return Settings(
            note="a search of Ludwig's own trainer (`batch_size: auto`): no key of TRL or Axolotl asks for it"
        )

    def search(self, rehearsal: Rehearsal, budget: int) -> Sizing:
        from torch import OutOfMemoryError

        best, size, tried, measured = 0, 1, {}, {}
        while size <= len(rehearsal.samples):
            batches = rehearsal.lay_out(longest_possible(rehearsal, size), size)
            try:
                readings = [rehearsal.run(batches, budget) for _ in range(self.steps)]
            except OutOfMemoryError:
                if not best:
                    raise
                break
            measured[size] = max(reading.peak for reading in readings)
            tried[size] = size / statistics.median(reading.seconds for reading in readings)
            if best and tried[size] < tried[best]:
                break
            best, size = size, 2 * size
        told = {str(size): round(rate, 2) for size, rate in tried.items()}
        return Sizing(
            best, {"found_by": "doubling", "samples_per_s": told, "measured_gib": round(measured[best] / GIB, 4)}
        )
