"""Slot `adapter_dtype`: the precision of lora_A and lora_B. PEFT comes with float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence
from lorabench.contract.settings import Settings, Worth


@dataclass(frozen=True, kw_only=True)
class AdaptersInComputeDtype(Ablation):
    """PEFT's `autocast_adapter_dtype=False`. With float32 adapters every LoRA layer casts its whole input up and its
    output down again; this saves both, at the price of rounding the optimizer's updates."""

    name: ClassVar[str] = "adapters_in_compute_dtype"
    slot: ClassVar[str] = "adapter_dtype"
    summary: ClassVar[str] = "adapters in the base model's dtype instead of float32"
    kinds: ClassVar[tuple[str, ...]] = ("train", "op", "evaluate")
    worth_trying: ClassVar[Worth | None] = "time"

    def adapt(self, kwargs: dict[str, Any]) -> None:
        kwargs["autocast_adapter_dtype"] = False

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        return "the compute dtype is float32 here, which PEFT's adapters are in anyway" if dtype == "float32" else None

    def audit(self, evidence: Evidence) -> int:
        arm = evidence.arm
        return sum(p.dtype == arm.dtype for _, p in arm.adapters())

    def settings(self) -> Settings:
        return Settings(peft={"autocast_adapter_dtype": False}, axolotl={"peft_autocast_adapter_dtype": False})
