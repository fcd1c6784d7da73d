"""TRL's trainers put a head of their own around a model's forward (`trl.trainer.utils.add_fused_lm_head`), which goes
past the loss that `apply` has bound there. This takes its place: the same output, from `linear_log_probs`.

TRL is looked at through that forward alone: what it was asked for lies in its closure. A version in which it is not to
be found there keeps its own head, and a warning says so.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..ops.linear_log_probs import linear_log_probs
from ..runtime import compute_dtype
from .module_checks import GLOBAL_HOOKS, hooked_globally, is_unhooked

PART = "linear_log_probs"
HEAD, THEIRS = "_lorakernels_head", "_lorakernels_trl"  # on the watched module: the model; on the model: TRL's forward
WHOLE = {"log_probs", "entropy", "is_top1"}
KNOWN = {"outputs", "temperature", "logit_scale", "cast_lm_head_to_fp32", "final_logit_softcapping"}


def is_trl_forward(forward: Any) -> bool:
    """Whether a model's forward is one that TRL has put there."""
    function = getattr(forward, "__func__", forward)
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] == "trl"


def _asked_for(theirs: Any) -> dict[str, Any] | None:
    """What `add_fused_lm_head` was asked for, by name, or None where this is not to be found."""
    function = theirs.__func__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    fused = "FusedCausalLMOutput" in function.__globals__
    return closure if fused and set(closure) >= KNOWN else None


def watch(module: Any, args: Any) -> None:
    """A forward pre-hook of the model that was given to `apply`: TRL comes later."""
    if torch.compiler.is_dynamo_compiling():
        return
    model = module.__dict__[HEAD]
    forward = model.__dict__.get("forward")
    if forward is not None and not hasattr(forward, "_lorakernels_forward") and is_trl_forward(forward):
        take_over(model)


def take_over(model: Any) -> None:
    """Puts our forward around TRL's, which stays for what ours cannot do."""

    @wraps(type(model).forward)
    def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, *args, **kwargs)

    signed._lorakernels_forward = signed  # type: ignore[attr-defined]
    model.__dict__[THEIRS] = model.__dict__["forward"]
    model.forward = MethodType(signed, model)


def give_back(model: Any) -> None:
    """TRL's own forward again."""
    theirs = model.__dict__.pop(THEIRS, None)
    if theirs is not None and hasattr(model.__dict__.get("forward"), "_lorakernels_forward"):
        model.forward = theirs


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = self.__dict__[THEIRS]
    if not kwargs.get("fused_lm_head"):
        return theirs(*args, **kwargs)  # which calls the forward that it found: ours
    asked = _asked_for(theirs)
    if reason := _why_left(self, args, asked):
        self._lorakernels_forwards.leave(PART, f"TRL's own head runs: {reason}")
        return theirs(*args, **kwargs)
    assert asked is not None
    self._lorakernels_forwards.fused[PART] += 1
    return _fused(self, asked, theirs.__func__.__globals__["FusedCausalLMOutput"], **kwargs)


def _why_left(model: Any, args: Any, asked: dict[str, Any] | None) -> str | None:
    if asked is None or args:
        return "this version of TRL is not known here"
    if asked["temperature"] != 1 or asked["logit_scale"] != 1 or set(asked["outputs"]) not in (WHOLE, {"log_probs"}):
        return "it scales its logits or asks for other statistics"
    head = model.lm_head
    if type(head) is not nn.Linear or not is_unhooked(head):
        return "the head is no plain Linear, or has hooks"
    if any(p is not None and (p.requires_grad or type(p) is not nn.Parameter) for p in (head.weight, head.bias)):
        return "the head learns, or its weight is sharded"
    if asked["cast_lm_head_to_fp32"] and head.weight.dtype != torch.float32:
        return "its head is to run in float32"
    if getattr(model.config, "output_router_logits", False):
        return "router losses are asked for"
    return GLOBAL_HOOKS if hooked_globally() else None


def _fused(
    model: Any, asked: dict[str, Any], output: Any, fused_lm_head: bool, labels: Any = None, shift_labels: Any = None,
    num_items_in_batch: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """TRL's output of hidden states (B, S, H): a value for each but the last token, or for all of shift_labels."""
    base, head = getattr(model, model.base_model_prefix), model.lm_head
    hidden = base(**{**kwargs, "use_cache": False}).last_hidden_state
    target = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    target = target.to(hidden.device)
    dtype = head.weight.dtype if asked["cast_lm_head_to_fp32"] else compute_dtype(hidden, head.weight.dtype)
    bias = None if head.bias is None else head.bias.to(dtype)
    made = linear_log_probs(
        hidden.to(dtype), head.weight.to(dtype), target, bias, softcap=asked["final_logit_softcapping"]
    )
    counted = slice(None, -1 if shift_labels is None else None)
    mask = (target != -100)[:, counted]
    values = {n: t[:, counted] for n, t in made._asdict().items() if n in asked["outputs"]}
    tokens = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return output(loss=-values["log_probs"].sum() / tokens, label_mask=mask, **values)
