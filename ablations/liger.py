"""Slot `fused_kernels`: Liger's Triton kernels, an external comparator."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Requires, Unsupported
from lorabench.contract.settings import Settings, Worth

if TYPE_CHECKING:
    from torch import nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
PARTS = ("norm", "rope", "loss", "mlp")  # slots of the sites that Liger patches
AXOLOTL = {  # keys of its configuration file
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "liger_rms_norm": True,
    "liger_fused_linear_cross_entropy": True,
}
NO_CAPTURE = "its fused cross-entropy waits for the device (.item()), which a capture forbids"


@dataclass(frozen=True, kw_only=True)
class Liger(Ablation):
    """`apply_liger_kernel_to_*(model=…)`: RMSNorm, RoPE, SwiGLU/GEGLU and the fused linear cross-entropy.

    It replaces functions of transformers' modelling module, not only of the instance, so its cell runs in processes of
    its own. Its fused cross-entropy computes the head's gradient in forward: compare totals, not phases.
    """

    name: ClassVar[str] = "liger"
    slot: ClassVar[str] = "fused_kernels"
    summary: ClassVar[str] = "Liger's norm, RoPE, activation and fused linear cross-entropy"
    requires: ClassVar[Requires] = Requires(
        device="cuda", packages={"liger_kernel": "pip install 'lorabench[gpu]'"}, families=frozenset(FAMILIES)
    )
    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(PARTS, "liger patches the same sites"),
        "cuda_graph": NO_CAPTURE,
    }
    global_patch: ClassVar[bool] = True
    worth_trying: ClassVar[Worth | None] = "time"

    def patch(self, model: nn.Module) -> int:
        return apply_liger(model)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        from importlib.metadata import version

        return {"liger": version("liger-kernel")}

    def settings(self) -> Settings:
        return Settings(trainer={"use_liger_kernel": True}, axolotl=AXOLOTL | {"liger_glu_activation": True})


def apply_liger(model: nn.Module, *, activation: bool = True) -> int:
    """Liger's kernels onto a PEFT model; returns how many modules run them. `activation` off leaves the MLP alone."""
    from liger_kernel.transformers import monkey_patch

    base = model.get_base_model()  # type: ignore[operator]
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(base.config.model_type)
    if apply is None:
        raise Unsupported(f"liger knows no model_type {base.config.model_type}")
    switches = {} if activation else {s: False for s in ("swiglu", "geglu") if s in inspect.signature(apply).parameters}
    apply(model=base, **switches)
    return sum(_is_liger_s(module) for module in base.modules())


def _is_liger_s(module: nn.Module) -> bool:
    """By where `forward` was written: a second model of a process is built with Liger's classes from the start."""
    return getattr(module.forward, "__func__", module.forward).__module__.startswith("liger_kernel")
