"""Slot `checkpointing`: what is kept for the backward and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lorabench.contract.ablation import Ablation
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
