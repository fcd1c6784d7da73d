"""Whether a module of the model is what it seems, and today, at this very forward, still is: hooks, classes, norms,
activations, dropouts. PEFT and transformers are only looked at, never imported.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from .glu import ACTIVATIONS, activation
from .rms_norm import Norm

FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3")
# RMSNorm classes of transformers by the number added to their weight, and the name of their epsilon.
NORMS = {
    **{f"{n}RMSNorm": (0.0, "variance_epsilon") for n in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Phi3")},
    "GemmaRMSNorm": (1.0, "eps"),
    "Gemma2RMSNorm": (1.0, "eps"),
}


class NotFused(Exception):
    """Why a module is left to PEFT, in words a user understands."""


def is_unhooked(module: Any) -> bool:
    """True if nothing hooks into the module: a fused path does not call it, so its hooks would be silently skipped."""
    m = module
    hooked = m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    if hooked or "forward" in m.__dict__:
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


def check_class(module: Any, kind: str | None = None) -> None:
    """Raises NotFused with the reason unless this is the class of a family that is known (`kind`: "MLP",
    "DecoderLayer" …), of transformers itself, with the forward that it came with."""
    name = type(module).__name__
    if kind is not None and name not in {f"{family}{kind}" for family in FAMILIES}:
        raise NotFused(f"{name} is not a known {kind}")
    if type(module).__module__.partition(".")[0] != "transformers":
        raise NotFused(f"{name} is {type(module).__module__}'s, not transformers'")
    if not is_library_function(type(module).forward, "transformers"):
        raise NotFused(f"the forward of {name} was replaced")


def check_weight(weight: Any) -> None:
    """Raises NotFused with the reason unless this weight of a module is there as a plain tensor: what is moved into
    buffers and read by kernels has one storage of its own elements."""
    if hasattr(weight, "ds_id"):
        raise NotFused("its weight is partitioned (DeepSpeed ZeRO-3)")
    if type(weight) not in (nn.Parameter, torch.Tensor):
        kind = type(weight)
        raise NotFused(f"its weight is a {kind.__module__.partition('.')[0]} {kind.__name__}, not a plain tensor")


def norm_of(module: Any) -> Norm:
    """The constants of an RMSNorm module. Raises NotFused with the reason where it is none that is known."""
    known = NORMS.get(type(module).__name__)
    if known is None:
        raise NotFused(f"{type(module).__name__} is not a known RMSNorm")
    check_class(module)
    if not is_unhooked(module):
        raise NotFused("its norm has hooks or a replaced forward")
    check_weight(module.weight)
    return Norm(float(eps_of(module)), known[0])


def eps_of(module: Any) -> Any:
    """A known norm's epsilon, as it is now."""
    return getattr(module, NORMS[type(module).__name__][1])


def is_unchanged_norm(module: Any, eps: Any) -> bool:
    """Whether a norm of `norm_of` is what it was: its class (a parametrization would be another) and its epsilon."""
    return type(module).__name__ in NORMS and is_unhooked(module) and eps_of(module) == eps


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
