"""A LoRA linear by addmm_: its forward and its autograd function. `lora_linear.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional as F


def fits(module: nn.Module) -> bool:
    """PEFT's LoRA linear, with one plain adapter on a plain linear, everything in one dtype."""
    if type(module) is not Linear:
        return False
    if len(module.lora_A) != 1 or any(module.use_dora.values()) or any(module.lora_bias.values()):
        return False
    (a,), (b,) = module.lora_A.values(), module.lora_B.values()
    base = module.base_layer
    return type(base) is nn.Linear and bool(a.weight.dtype == b.weight.dtype == base.weight.dtype)


def forward(self: Linear, x: Tensor) -> Tensor:
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
