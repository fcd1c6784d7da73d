"""Slot `limit`: how fast the step could be if LoRA, norms, RoPE, activation, loss and optimizer cost nothing.

    python -m lorabench.sweep 'models=[llama-3.1-8b]' 'ablations=[lora_kernels,frozen_limit]'

Forward: for every layer the library GEMMs of the frozen weights in their widest form (q, k, v as one; o; gate and up as
one; down) and the fastest causal attention of this machine; then the head. Backward: one GEMM for the gradient of each
one's input, and the attention's backward. No optimizer step. Not a training step: nothing is learned from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Requires
from lorabench.contract.step import Step

if TYPE_CHECKING:
    from torch import nn

OTHERS = ("fused_kernels", "mlp", "qkv", "o", "norm", "rope", "loss", "compilation", "capture", "checkpointing")


@dataclass(frozen=True, kw_only=True)
class FrozenLimit(Ablation):
    """Reads the model's own frozen weights, so that no two layers share theirs; the activations are random."""

    name: ClassVar[str] = "frozen_limit"
    slot: ClassVar[str] = "limit"
    summary: ClassVar[str] = "the limit: bare frozen GEMMs plus the fastest attention, nothing else"
    requires: ClassVar[Requires] = Requires(families=frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma")))
    excludes: ClassVar[dict[str, str]] = dict.fromkeys((*OTHERS, "packing"), "the limit runs no part of the model")
    kinds: ClassVar[tuple[str, ...]] = ("limit",)
    bounds: ClassVar[str | None] = "train"

    def patch(self, model: nn.Module) -> int:
        from .limit_step import MARK, frozen, merged

        base: Any = model.get_base_model()  # type: ignore[operator]
        layers = [
            {
                "qkv": merged([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
                "o": merged([layer.self_attn.o_proj]),
                "gate_up": merged([layer.mlp.gate_proj, layer.mlp.up_proj]),
                "down": merged([layer.mlp.down_proj]),
            }
            for layer in base.model.layers
        ]
        setattr(model, MARK, (layers, frozen(base.lm_head)))
        return sum(map(len, layers)) + 1

    def step(self, step: Step) -> Step:
        from .limit_step import LimitStep

        return LimitStep(step)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        shapes = evidence.arm.step.shapes.values()  # type: ignore[attr-defined]
        return {"frozen_limit": [shape.notes for shape in shapes]}
