"""Slot `batch_size`, the plain way: a step's samples in so many micro-batches. `batch_size.py` has the searches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.rehearsal import Rehearsal, Sizing
from lorabench.contract.settings import Settings


@dataclass(frozen=True, kw_only=True)
class GradientAccumulation(Ablation):
    """transformers' `gradient_accumulation_steps`, the samples of the step staying the same set.

    Every micro-batch's loss is the sum over its trained tokens divided by those of the whole step, so the gradient is
    that of one batch; a mean of the micro-batches' means would be another.
    """

    name: ClassVar[str] = "gradient_accumulation"
    slot: ClassVar[str] = "batch_size"
    summary: ClassVar[str] = "the samples of a step in several micro-batches"
    excludes: ClassVar[dict[str, str]] = {"limit": "the limit runs no part of the model"}

    steps: Annotated[int, Field(ge=2)] = 2

    def size(self, rehearsal: Rehearsal) -> Sizing:
        there = len(rehearsal.samples)
        if there < self.steps:
            raise Unsupported(f"{self.steps} micro-batches divide nothing: the step has {there} samples")
        return Sizing(math.ceil(there / self.steps), {})

    def audit(self, evidence: Evidence) -> int:
        batches = sum(len(step.batches) for step in evidence.arm.steps)
        if all(len(step.batches) < 2 for step in evidence.arm.steps):
            raise NotApplied("the samples still go into one micro-batch: another toggle lays them out")
        return batches

    def settings(self) -> Settings:
        return Settings(
            trainer={"gradient_accumulation_steps": self.steps}, axolotl={"gradient_accumulation_steps": self.steps}
        )
