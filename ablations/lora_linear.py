"""Slot `lora_linear`: how one LoRA linear is computed. PEFT runs y = W x + s·B(A x) as four operators and more."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires

if TYPE_CHECKING:
    from torch import nn

LINEAR = "linear"  # the family that lorabench/measure/kinds/operations gives to a single linear
EXCLUDES: dict[str, str] = dict.fromkeys(("fused_kernels", "mlp", "qkv", "o"), "both rewrite the LoRA linears")


@dataclass(frozen=True, kw_only=True)
class BareLinear(Ablation):
    """The frozen linear without its adapter: Y = X·Wᵀ and dX = dY·W, the least that any LoRA linear has to do. An
    RMSNorm before it runs in our kernel, so that what is left between this and `lora_kernels` is LoRA alone."""

    name: ClassVar[str] = "bare_linear"
    slot: ClassVar[str] = "lora_linear"
    summary: ClassVar[str] = "the frozen linear alone, no adapter: a bound, not a way to train"
    requires: ClassVar[Requires] = Requires(families=frozenset({LINEAR}))
    excludes: ClassVar[dict[str, str]] = EXCLUDES
    kinds: ClassVar[tuple[str, ...]] = ("limit",)
    bounds: ClassVar[str | None] = "op"

    def patch(self, model: nn.Module) -> int:
        from lorakernels.ops.rms_norm import rms_norm
        from peft.tuners.lora import Linear
        from torch import nn

        sites = [m for m in model.modules() if isinstance(m, Linear)]
        for site in sites:
            site.forward = MethodType(lambda self, x: self.base_layer(x), site)
        norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)]
        for norm in norms:
            norm.forward = MethodType(lambda self, x: rms_norm(x, self.weight, self.eps), norm)
        return len(sites) + len(norms)


@dataclass(frozen=True, kw_only=True)
class LoraAddmm(Ablation):
    """What hand-written LoRA kernels without a fused GEMM do (Axolotl, Unsloth): the base GEMM, then B's product added
    into its output in place, and dX likewise. PEFT scales and adds in passes of their own, forward and backward."""

    name: ClassVar[str] = "lora_addmm"
    slot: ClassVar[str] = "lora_linear"
    summary: ClassVar[str] = "base GEMM, then B's product added in place by addmm_; dX likewise"
    excludes: ClassVar[dict[str, str]] = EXCLUDES
    kinds: ClassVar[tuple[str, ...]] = ("train", "op")

    def patch(self, model: nn.Module) -> int:
        from .addmm_linear import fits, forward

        sites = [m for m in model.modules() if fits(m)]
        for site in sites:
            site.forward = MethodType(forward, site)
        return len(sites)

    def audit(self, evidence: Evidence) -> int:
        if not evidence.patched:
            raise NotApplied("no plain LoRA linear has its adapters in the dtype of its weight; try reference=peft_low")
        return min(evidence.patched, evidence.ops["aten::addmm_"])
