"""Whether a module of the model is what it seems, and today, at this very forward, still is: hooks, classes,
activations, dropouts. PEFT and transformers are only looked at, never imported.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from ..ops.glu import ACTIVATIONS, activation
from .held import stored_weight

LIBRARIES = ("transformers", "torch")


class NotFused(Exception):
    """Why a module is left to PEFT, in words a user understands."""


def is_unhooked(module: Any, ours: Any = None) -> bool:
    """True if nothing hooks into the module: a fused path does not call it, so its hooks would be silently skipped.
    ours: a function that may be bound to it as its forward."""
    m = module
    hooked = m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    if hooked or ("forward" in m.__dict__ and (ours is None or getattr(m.forward, "__func__", None) is not ours)):
        return False
    return not m._forward_hooks or all(_is_inactive_capture(hook) for hook in m._forward_hooks.values())


def _is_inactive_capture(hook: Any) -> bool:
    """Whether a hook is one of transformers' own that is not collecting: they stay for good once anybody has asked for
    hidden states, and do nothing unless somebody asks again."""
    home = sys.modules.get("transformers.utils.output_capturing")
    if home is None or getattr(hook, "__module__", "") != home.__name__:
        return False
    collector = getattr(home, "_active_collector", None)
    if collector is None:
        return False
    collected = collector.get()
    return not collected or _captured_key(hook) not in (None, *collected)


def _captured_key(hook: Any) -> str | None:
    """What a hook of transformers collects ("hidden_states", "attentions"), or None where that is not to be found."""
    names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True)).get("key")


GLOBAL_HOOKS = "somebody hooks into every module there is (a FLOP counter, a profiler)"


def why_hooked(module: Any) -> str:
    """Why `is_unhooked` says no, in words that are the same for every module."""
    if any(_captured_key(hook) for hook in module._forward_hooks.values() if hasattr(hook, "__code__")):
        return "attentions or hidden states are collected inside a layer"
    return "a module inside has hooks or a replaced forward"


def hooked_globally() -> bool:
    """True if somebody watches every module there is (torch.nn.modules.module.register_module_forward_hook)."""
    m = torch.nn.modules.module
    forward = m._global_forward_hooks or m._global_forward_pre_hooks
    return bool(forward or m._global_backward_hooks or m._global_backward_pre_hooks)


def is_library_function(function: Any, library: str) -> bool:
    """Whether a function is this library's own: what is fused does its work, and nobody else's."""
    function = inspect.unwrap(function)
    return getattr(function, "__module__", "").partition(".")[0] == library


def check_library(module: Any) -> None:
    """Raises NotFused with the reason unless this module's class is one of transformers or torch themselves, with the
    forward that it came with: what a class of somebody's own does besides computing, no trial would show."""
    kind = own_class(module)
    name, library = kind.__name__, kind.__module__.partition(".")[0]
    if library not in LIBRARIES:
        raise NotFused(f"{name} is {kind.__module__}'s, not transformers'")
    if not is_library_function(kind.forward, library):
        raise NotFused(f"the forward of {name} was replaced")


def own_class(module: Any) -> type:
    """The class that a module had before FSDP2 put one of its own, with the same forward, in front of it."""
    first, second, *others = type(module).__mro__
    return others[0] if second.__name__ == "FSDPModule" else first


def is_gathered(module: Any) -> bool:
    """Whether FSDP2 shards the weight of this module: a plain tensor is in its place while the module's layer computes,
    forward and backward, and at no other time."""
    return getattr(module, "_is_fsdp_managed_module", False) and hasattr(stored_weight(module), "device_mesh")


def check_weight(weight: Any, module: Any = None) -> None:
    """Raises NotFused with the reason unless this weight of a module is there as a plain tensor, or will be when it is
    needed: what is moved into buffers and read by kernels has one storage of its own elements."""
    if module is not None and is_gathered(module):
        return
    if hasattr(weight, "ds_id"):
        raise NotFused("its weight is partitioned (DeepSpeed ZeRO-3)")
    if type(weight) not in (nn.Parameter, torch.Tensor):
        kind = type(weight)
        raise NotFused(f"its weight is a {kind.__module__.partition('.')[0]} {kind.__name__}, not a plain tensor")


def is_inactive_dropout(module: Any) -> bool:
    """Whether a dropout does nothing, and nobody hooks into it."""
    return type(module) is nn.Dropout and module.p == 0 and is_unhooked(module)


def activation_of(function: Any) -> str:
    """Which of ACTIVATIONS it computes, found by asking it: names differ between versions, values do not. Raises
    NotFused with the reason where it is none."""
    if isinstance(function, nn.Module) and [*function.parameters(), *function.buffers()]:
        raise NotFused(f"its activation {type(function).__name__} has parameters")
    x = torch.linspace(-40, 40, 401, dtype=torch.float64)  # as far as the tails go: some are clipped at 10
    try:
        with torch.no_grad():
            y = function(x.clone())
    except Exception as error:
        raise NotFused(f"its activation {type(function).__name__} could not be tried: {error}") from error
    for act in ACTIVATIONS:
        if y.shape == x.shape and (y - activation(x, act)).abs().max() < 1e-6:
            return act
    raise NotFused(f"its activation {type(function).__name__} is neither SiLU nor GELU")
