"""Slot `adapter_dtype`: the precision of lora_A and lora_B. PEFT comes with float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lorabench.plan.ablation import Ablation, Evidence, NotApplied


@dataclass(frozen=True, kw_only=True)
class AdaptersInComputeDtype(Ablation):
    """PEFT's `autocast_adapter_dtype=False`. With float32 adapters every LoRA layer casts its whole input up and its
    output down again; this saves both, at the price of rounding the optimizer's updates."""

    name: ClassVar[str] = "adapters_in_compute_dtype"
    slot: ClassVar[str] = "adapter_dtype"
    summary: ClassVar[str] = "adapters in the base model's dtype instead of float32"

    def adapt(self, kwargs: dict[str, Any]) -> None:
        kwargs["autocast_adapter_dtype"] = False

    def audit(self, evidence: Evidence) -> int:
        arm = evidence.arm
        if arm.dtype == torch.float32:
            raise NotApplied("the compute dtype is float32 here, which PEFT's adapters are in anyway")
        return sum(p.dtype == arm.dtype for _, p in arm.adapters())
