"""Slot `generation`: how a checkpoint's evaluation generates its answers. transformers comes with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied


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
        if arm.with_cache:
            raise NotApplied(f"{arm.with_cache} of {len(arm.answers)} answers kept keys and values all the same")
        return len(arm.answers)
