"""Slot `checkpointing`: what is kept for the backward and what is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied
from lorabench.contract.settings import Settings, Worth

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class GradientCheckpointing(Ablation):
    """transformers' `gradient_checkpointing_enable`: each decoder layer keeps its input and runs again in backward."""

    name: ClassVar[str] = "gradient_checkpointing"
    slot: ClassVar[str] = "checkpointing"
    summary: ClassVar[str] = "keep each decoder layer's input only, compute the rest again in backward"
    recomputes: ClassVar[bool] = True
    worth_trying: ClassVar[Worth | None] = "memory"

    use_reentrant: bool = False

    def patch(self, model: nn.Module) -> int:
        from transformers.modeling_layers import GradientCheckpointingLayer

        base = model.get_base_model()  # type: ignore[operator]
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.use_reentrant})
        if self.use_reentrant:  # a reentrant checkpoint needs an input that requires a gradient
            base.enable_input_require_grads()
        return sum(m.gradient_checkpointing for m in base.modules() if isinstance(m, GradientCheckpointingLayer))

    def settings(self) -> Settings:
        switches = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": self.use_reentrant},
        }
        return Settings(trainer=switches, axolotl=switches)


@dataclass(frozen=True, kw_only=True)
class NoGradientCheckpointing(Ablation):
    """Takes the place of what a reference has in this slot: nothing is computed again, every activation stays."""

    name: ClassVar[str] = "no_gradient_checkpointing"
    slot: ClassVar[str] = "checkpointing"
    summary: ClassVar[str] = "switch the reference's gradient checkpointing off: keep every activation"

    def patch(self, model: nn.Module) -> int:
        base = model.get_base_model()  # type: ignore[operator]
        base.gradient_checkpointing_disable()
        return base.config.get_text_config().num_hidden_layers

    def audit(self, evidence: Evidence) -> int:
        if again := sum(getattr(m, "gradient_checkpointing", False) for m in evidence.arm.model.modules()):
            raise NotApplied(f"{again} modules still run again in backward")
        return super().audit(evidence)

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        if any(a.slot == self.slot and a.name != self.name for a in reference):
            return None
        return "the reference keeps every activation already; put gradient_checkpointing into reference="

    def settings(self) -> Settings:
        return Settings(trainer={"gradient_checkpointing": False}, axolotl={"gradient_checkpointing": False})
