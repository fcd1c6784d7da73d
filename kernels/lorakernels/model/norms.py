"""RMSNorms of the model: found by what they have, proved by what they compute, whatever their class is called.

y = x · rstd · (weight + offset), rstd = 1 / sqrt(mean(x²) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.rms_norm import Norm, rms_norm
from .forwards import unless
from .module_checks import GLOBAL_HOOKS, NotFused, check_library, check_weight, hooked_globally, is_unhooked
from .proofs import Proofs, alike, double, draw, gradients, own_forward, takes_one_tensor, tried


@dataclass(frozen=True)
class NormModule:
    """An RMSNorm of the model. kind: its class, which a parametrization would change; norm: its constants; eps_name:
    the attribute that its epsilon is read from; promotes: whether a float32 weight makes the output of a low-precision
    input float32 (Llama's), or leaves it the input's dtype (Gemma's)."""

    module: Any
    kind: type
    norm: Norm
    eps_name: str
    promotes: bool

    def is_unchanged(self) -> bool:
        """Whether the norm is what it was: its class, its epsilon, and nobody hooks into it."""
        module = self.module
        return type(module) is self.kind and is_unhooked(module) and module.__dict__.get(self.eps_name) == self.norm.eps


def looks_like_norm(module: Any) -> bool:
    """Whether a module has what an RMSNorm has: one weight for each column, no children, and an epsilon."""
    weight = module._parameters.get("weight")
    own = weight is not None and len(module._parameters) == 1 and not module._modules and not module._buffers
    return own and len(_eps_names(module)) == 1


def _eps_names(module: Any) -> list[str]:
    return [name for name, value in module.__dict__.items() if "eps" in name.lower() and type(value) is float]


def norm_module(module: Any, proofs: Proofs) -> NormModule:
    """The norm that a module is. Raises NotFused with the reason where it is none, or computes something else."""
    if not looks_like_norm(module):
        raise NotFused(f"{type(module).__name__} is not an RMSNorm with a weight and an epsilon of its own")
    check_library(module)
    if not is_unhooked(module):
        raise NotFused("its norm has hooks or a replaced forward")
    check_weight(module.weight, module)
    if module.weight.dim() != 1 or not takes_one_tensor(module):
        raise NotFused(f"{type(module).__name__} takes more than its input, or its weight is no vector")
    (name,) = _eps_names(module)
    eps = module.__dict__[name]
    key = (type(module), name, eps, module.weight.numel())
    offset, promotes = proofs.of(key, lambda: _proved(module, eps))
    return NormModule(module, type(module), Norm(eps, offset), name, promotes)


def _proved(module: Any, eps: float) -> tuple[float, bool]:
    """(the number added to the weight, whether the weight promotes). Raises NotFused where it is no RMSNorm."""
    other, own = double(module, {}), own_forward(module)
    weight = other.weight
    x = draw(4, weight.numel())
    with torch.no_grad():  # the smallest row is where the epsilon shows
        x *= torch.tensor([1.0, 1.0, 30.0, max(eps, 1e-12) ** 0.5])[:, None]
    wanted = tried(module, lambda: gradients(own(other, x), (x, weight)))
    for offset in (0.0, 1.0):
        if alike(gradients(rms_norm(x, weight, eps, offset), (x, weight)), wanted):
            low = tried(module, lambda: own(other, x.bfloat16()))
            return offset, low.dtype is torch.float32
    raise NotFused(f"{type(module).__name__} computes something else than x · rstd · (weight + 0 or 1)")


def _why_left(norm: Any, *_: Any, **__: Any) -> str | None:
    if hooked_globally():
        return GLOBAL_HOOKS
    return None if type(norm) is norm._lorakernels.kind else "a norm's class was changed"


@unless(_why_left, "rms_norm")
def norm_forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Bound to an RMSNorm instance: (…, K) of its one argument (…, K)."""
    (x,) = (*args, *kwargs.values())
    plan: NormModule = self._lorakernels
    weight: nn.Parameter = self.weight
    y = rms_norm(x, weight, self.__dict__[plan.eps_name], plan.norm.offset)
    return y.to(torch.promote_types(x.dtype, weight.dtype)) if plan.promotes else y
