"""A gated MLP, and a norm, on our kernels: the plan of the first and the forwards that `apply` binds to either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .adapter import Loader
from .mlp_node import gated_mlp
from .module_checks import (
    GLOBAL_HOOKS,
    NORMS,
    NotFused,
    activation_of,
    check_class,
    eps_of,
    hooked_globally,
    is_unhooked,
)
from .operand import with_loaded_adapters
from .plans import Linears, Plan, Switches, linears
from .projection import Projection
from .rms_norm import Norm, rms_norm


@dataclass
class MLPPlan(Plan):
    """act: a key of ACTIVATIONS; function: the model's own, which must stay the one that was asked."""

    gate_up: Linears
    down: Linears
    act: str
    function: Any
    loader: Loader = field(default_factory=Loader)

    @property
    def groups(self) -> list[Projection]:
        """Of gate and up, and of down."""
        return [*self.gate_up.groups, *self.down.groups]

    def what_changed(self) -> str | None:
        """The reason, in words, if not everything is as planned."""
        function = _activation(self.module)
        same = function is self.function and (not isinstance(function, nn.Module) or is_unhooked(function))
        if not (same and self.same_class):
            return "an MLP's class or activation was changed, or hooked into"
        return self.gate_up.what_changed() or self.down.what_changed()


def _activation(mlp: Any) -> Any:
    return getattr(mlp, "act_fn", None) or mlp.activation_fn


def mlp_plan(mlp: Any, path: str, switches: Switches) -> MLPPlan:
    """Of an MLP module, whose path this is. Raises NotFused with the reason where it is left to PEFT."""
    fused = hasattr(mlp, "gate_up_proj")
    names = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
    if not all(isinstance(getattr(mlp, n, None), nn.Module) for n in [*names, "down_proj"]):
        raise NotFused(f"{type(mlp).__name__} is not a gated MLP (gate, up and down linears)")
    check_class(mlp, "MLP")
    function = _activation(mlp)
    act = activation_of(function)
    if isinstance(function, nn.Module) and not is_unhooked(function):
        raise NotFused("its activation has hooks or a replaced forward")
    gate_up, down = (linears(mlp, path, each, switches) for each in (names, ["down_proj"]))
    return MLPPlan(mlp, gate_up, down, act, function)


def mlp_forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Bound to an MLP instance: (…, K) of its one argument (…, K)."""
    (x,) = (*args, *kwargs.values())  # the families call their one argument differently
    plan: MLPPlan = self._lorakernels
    changed = GLOBAL_HOOKS if hooked_globally() else plan.what_changed()
    if changed:
        self._lorakernels_forwards.leave("mlp", changed)
        return type(self).forward(self, x)
    self._lorakernels_forwards.fused["mlp"] += 1
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return gated_mlp(x, plan.gate_up.groups, plan.down.groups[0], plan.act).to(x.dtype)


def norm_forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Bound to an RMSNorm instance: (…, K) of its one argument (…, K)."""
    (x,) = (*args, *kwargs.values())
    norm: Norm = self._lorakernels
    if hooked_globally() or type(self).__name__ not in NORMS:
        reason = GLOBAL_HOOKS if hooked_globally() else "a norm's class was changed"
        self._lorakernels_forwards.leave("rms_norm", reason)
        return type(self).forward(self, x)
    self._lorakernels_forwards.fused["rms_norm"] += 1
    y = rms_norm(x, self.weight, eps_of(self), norm.offset)
    # A float32 weight on a low-precision stream gives float32 in Llama's norm and the stream's dtype in Gemma's.
    return y if norm.offset else y.to(torch.promote_types(x.dtype, self.weight.dtype))
