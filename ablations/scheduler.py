"""Slot `scheduler`: which samples of all jobs go together into a micro-batch, under a budget of tokens.

The rules are those of lorabench.schedule (docs/scheduling.md). Here each is a toggle beside one that trains several
jobs together: `batched`, `batched_packed`, `fused_multi_lora`, `pipeline_multi_adapter`. A job's loss and gradients do
not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.joint import Joint, Place
from lorabench.contract.rehearsal import Capacity, Rehearsal
from lorabench.schedule import SCHEDULERS, Budget
from lorabench_ablations.batch_size import BY_RANK, within
from lorabench_ablations.token_capacity import capacity

AUTO = "auto"
APART = "no jobs train together here, so there is nothing to share out; expected batched, batched_packed, \
fused_multi_lora or pipeline_multi_adapter beside it"


@dataclass(frozen=True, kw_only=True)
class Scheduling(Ablation):
    """Base: the rule of its name in lorabench.schedule.

    tokens: positions that a micro-batch holds at most, padding counted (LoRAFusion's published capacities are some);
    auto: as many as are found to fit `budget_gib`, which is what the arm may take in all, null: what the device has
    free before the arm is built. multiple: to which each job's rows are filled up when they are counted; LoRAFusion's
    kernels need 128, ours 1.
    """

    slot: ClassVar[str] = "scheduler"
    own_dropout_masks: ClassVar[bool] = True  # of micro-batches that the job does not have alone
    excludes: ClassVar[dict[str, str]] = {"sequential": APART}

    tokens: PositiveInt | Literal["auto"] = 4096
    multiple: PositiveInt = 1
    budget_gib: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens == AUTO:
            object.__setattr__(self, "excludes", self.excludes | {"parallel": BY_RANK})

    def capacity(self, rehearsal: Rehearsal) -> Capacity | None:
        return capacity(rehearsal, within(rehearsal.room, self.budget_gib)) if self.tokens == AUTO else None

    def schedule(self, lengths: Sequence[Sequence[int]], padded: bool, capacity: int | None) -> list[list[Place]]:
        try:
            budget = Budget(self._tokens(lengths, capacity), self.multiple, padded)
            return _scheduled(self.name, tuple(map(tuple, lengths)), budget)
        except ValueError as error:  # a sample that fits into no micro-batch
            raise Unsupported(f"{self.name}: {error}") from None

    def _tokens(self, lengths: Sequence[Sequence[int]], capacity: int | None) -> int:
        """Before the capacity is known, and on the gate's shallow models, the longest sample's."""
        if isinstance(self.tokens, int):
            return self.tokens
        longest = max(max(own, default=1) for own in lengths)
        return max(-(-longest // self.multiple), (capacity or 0) // self.multiple) * self.multiple

    def audit(self, evidence: Evidence) -> int:
        """The micro-batches of the joint steps."""
        counts = [turn.innermost.count for turn in _joint(evidence)]
        if not counts:
            raise NotApplied(APART)
        return sum(counts)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        held = [batch.real + batch.padded for batch in evidence.arm.micro_batches]
        found = [{"tokens": c.tokens, **c.found} for c in (turn.innermost.capacity for turn in _joint(evidence)) if c]
        return {"tokens_of_each_micro_batch": held} | ({"capacity": found} if found else {})


@lru_cache(maxsize=64)
def _scheduled(name: str, lengths: tuple[tuple[int, ...], ...], budget: Budget) -> list[list[Place]]:
    """Kept, because a step is laid out more than once, and a programme with a time limit need not answer twice alike.
    Raises ValueError."""
    made = SCHEDULERS[name]([[own] for own in lengths], budget)
    return [[(sample.job, sample.place) for sample in held] for held in made]


def _joint(evidence: Evidence) -> list[Any]:
    return [turn for turn in evidence.arm.turns if isinstance(turn.innermost, Joint)]


@dataclass(frozen=True, kw_only=True)
class Fifo(Scheduling):
    name: ClassVar[str] = "fifo"
    summary: ClassVar[str] = "samples of all jobs in the order of arrival (m-LoRA's Trivial)"


@dataclass(frozen=True, kw_only=True)
class FastFit(Scheduling):
    name: ClassVar[str] = "fast_fit"
    summary: ClassVar[str] = "each sample into the first micro-batch that takes it (m-LoRA's Fast-Fit)"


@dataclass(frozen=True, kw_only=True)
class OptimalFit(Scheduling):
    name: ClassVar[str] = "optimal_fit"
    summary: ClassVar[str] = "samples by length, windows of least padding (after m-LoRA's Optimal-Fit)"


@dataclass(frozen=True, kw_only=True)
class ResidualCapacity(Scheduling):
    name: ClassVar[str] = "residual_capacity"
    summary: ClassVar[str] = "jobs that leave capacity go together while that saves micro-batches (tLoRA's idea)"


@dataclass(frozen=True, kw_only=True)
class LoraFusion(Scheduling):
    name: ClassVar[str] = "lorafusion"
    summary: ClassVar[str] = "jobs paired head and tail, the fewest micro-batches by a MILP (LoRAFusion)"
