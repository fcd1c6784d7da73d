"""Slot `lora_linear`: how one LoRA linear is computed. PEFT runs y = W x + s·B(A x) as four operators and more."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires
from lorabench.measure.kinds.op import LINEAR

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
        from lorakernels.rms_norm import rms_norm

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
        sites = [m for m in model.modules() if type(m) is Linear and fits(m)]
        for site in sites:
            site.forward = MethodType(_forward, site)
        return len(sites)

    def audit(self, evidence: Evidence) -> int:
        if not evidence.patched:
            raise NotApplied("no plain LoRA linear has its adapters in the dtype of its weight; try reference=peft_low")
        return min(evidence.patched, evidence.ops["aten::addmm_"])


def fits(module: Linear) -> bool:
    """One plain adapter on a plain linear, everything in one dtype."""
    if len(module.lora_A) != 1 or any(module.use_dora.values()) or any(module.lora_bias.values()):
        return False
    (a,), (b,) = module.lora_A.values(), module.lora_B.values()
    base = module.base_layer
    return type(base) is nn.Linear and bool(a.weight.dtype == b.weight.dtype == base.weight.dtype)


def _forward(self: Linear, x: Tensor) -> Tensor:
    """Bound to a LoRA linear. Submodules are looked up here and not in `patch`: the gate changes `lora_dropout`."""
    base: Any = self.base_layer
    if self.disable_adapters or self.merged or x.dtype != base.weight.dtype or torch.is_autocast_enabled(x.device.type):
        return type(self).forward(self, x)
    (key,) = self.lora_A
    a, b, s = self.lora_A[key].weight, self.lora_B[key].weight, self.scaling[key]
    flat = x.flatten(0, -2)
    dropped = None if isinstance(self.lora_dropout[key], nn.Identity) else self.lora_dropout[key](flat)
    return _AddmmLinear.apply(flat, dropped, base.weight, base.bias, a, b, s).view(*x.shape[:-1], -1)


class _AddmmLinear(torch.autograd.Function):
    """Y = X·Wᵀ + bias + s·(X̂·Aᵀ)·Bᵀ. X: (M, K), X̂: the same after dropout, or None; A: (r, K), B: (N, r)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, s: float
    ) -> Tensor:
        seen = x if dropped is None else dropped
        hidden = seen @ a.t()
        ctx.save_for_backward(seen, weight, a, b, hidden)
        ctx.s, ctx.dropout = s, dropped is not None
        return F.linear(x, weight, bias).addmm_(hidden, b.t(), alpha=s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        seen, weight, a, b, hidden = ctx.saved_tensors
        ds = (dy @ b).mul_(ctx.s)
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        d_dropped = None
        if ctx.dropout:
            d_dropped = ds @ a if ctx.needs_input_grad[1] else None
        elif dx is not None:
            dx.addmm_(ds, a)
        d_bias = dy.sum(0) if ctx.needs_input_grad[3] else None
        return dx, d_dropped, None, d_bias, ds.t() @ seen, (dy.t() @ hidden).mul_(ctx.s), None
