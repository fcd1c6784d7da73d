"""Slot `generation`: how a checkpoint's evaluation generates its answers. transformers comes with a KV cache, and
answers what it is given at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from lorabench.contract.ablation import Ablation, Evidence, NotApplied

NOTHING = "no text is generated here: add text_metrics to reference="


@dataclass(frozen=True, kw_only=True)
class NoKvCache(Ablation):
    """`use_cache=False`: every new token computes all positions before it again. What the cache is worth is its
    inverse."""

    name: ClassVar[str] = "no_kv_cache"
    slot: ClassVar[str] = "generation"
    kinds: ClassVar[tuple[str, ...]] = ("evaluate",)
    summary: ClassVar[str] = "greedy generation without the cache of keys and values"

    def generate(self, kwargs: dict[str, Any]) -> None:
        kwargs["use_cache"] = False

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        if not arm.answers:
            raise NotApplied(NOTHING)
        if arm.with_cache:
            raise NotApplied(f"{arm.with_cache} of {len(arm.answers)} answers kept keys and values all the same")
        return len(arm.answers)


@dataclass(frozen=True, kw_only=True)
class BatchedGeneration(Ablation):
    """Several prompts at a time, padded on the left: a step of decoding reads the weights once for all of them."""

    name: ClassVar[str] = "batched_generation"
    slot: ClassVar[str] = "generation"
    kinds: ClassVar[tuple[str, ...]] = ("evaluate",)
    summary: ClassVar[str] = "greedy generation of several answers at a time"

    batch_size: Annotated[int, Field(ge=2)] = 8

    def generate(self, kwargs: dict[str, Any]) -> None:
        kwargs["batch_size"] = self.batch_size

    def audit(self, evidence: Evidence) -> int:
        arm: Any = evidence.arm
        if not arm.answers:
            raise NotApplied(NOTHING)
        if max(arm.batches) < 2:
            raise NotApplied("there is one answer to generate, so there is nothing to put together")
        return sum(size for size in arm.batches if size > 1)
