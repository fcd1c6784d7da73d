"""The forward that `apply` binds to a causal language model: in training with labels its loss comes from the chunked
head.

In evaluation, in generation, and wherever something asks for what the chunked head does not give (a custom loss, router
losses, a slice of logits), the class's own forward runs.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .lazy_logits import lazy_logits
from .linear_cross_entropy import linear_cross_entropy
from .module_checks import GLOBAL_HOOKS, NotFused, check_class, check_weight, hooked_globally, is_unhooked
from .runtime import compute_dtype


def check_head(model: Any) -> None:
    """Raises NotFused with the reason if this model's loss must be left alone."""
    check_class(model, "ForCausalLM")
    head = model.lm_head
    if type(head) is not nn.Linear:
        raise NotFused(f"its head is {type(head).__module__}.{type(head).__name__}, not torch's Linear")
    if not is_unhooked(head) or "forward" in model.__dict__:
        raise NotFused("its head has hooks, or the model's forward was replaced")
    check_weight(head.weight)


def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to a causal language model: its own output class, or tuple, with `lazy_logits` in it."""
    own = type(self).forward
    names = list(inspect.signature(inspect.unwrap(own)).parameters)[1:]
    kwargs.update(zip(names, args, strict=False))
    if reason := _why_left(self, kwargs):
        self._lorakernels_forwards.leave("linear_cross_entropy", reason, expected=reason is NO_TRAINING)
        return own(self, **kwargs)
    self._lorakernels_forwards.fused["linear_cross_entropy"] += 1
    labels, return_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    shifted, num_items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    ignore = kwargs.pop("ignore_index", -100)
    kwargs.pop("logits_to_keep", None)
    kwargs.pop("output_router_logits", None)
    out = self.model(**kwargs)
    hidden = out.last_hidden_state
    shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:] if shifted is None else shifted.reshape(hidden.shape[:-1])
    softcap = getattr(self.config, "final_logit_softcapping", None)
    dtype = compute_dtype(hidden, self.lm_head.weight.dtype)
    head = self.lm_head
    bias = None if head.bias is None else head.bias.to(dtype)
    hidden, weight = hidden.to(dtype), head.weight.to(dtype)
    loss = linear_cross_entropy(
        hidden, weight, shifted.to(hidden.device), bias, ignore_index=ignore, num_items=num_items, softcap=softcap
    )
    result = _output_class(self)(
        loss=loss, logits=lazy_logits(hidden, weight, bias, softcap), past_key_values=out.past_key_values,
        hidden_states=out.hidden_states, attentions=out.attentions,
    )  # fmt: skip
    wanted = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
    return result if wanted else result.to_tuple()


def _output_class(model: Any) -> Any:
    home = sys.modules[type(model).__module__]
    return getattr(home, "MoeCausalLMOutputWithPast", None) or home.CausalLMOutputWithPast


NO_TRAINING = "no forward of training with labels"


def _why_left(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Why this forward's loss is not ours; None where it is."""
    if not model.training or kwargs.get("labels") is None or not torch.is_grad_enabled():
        return NO_TRAINING
    if hooked_globally():
        return GLOBAL_HOOKS
    keep = kwargs.get("logits_to_keep", 0)
    router = kwargs.get("output_router_logits")
    router = getattr(model.config, "output_router_logits", False) if router is None else router
    if router or not (isinstance(keep, int) and keep == 0):
        return "router losses or a part of the logits are asked for (output_router_logits, logits_to_keep)"
    losses = sys.modules.get("transformers.loss.loss_utils")
    if model.loss_function is not getattr(losses, "ForCausalLMLoss", None):
        return "the model's loss_function is not transformers' own"
    own_head = type(model.lm_head) is nn.Linear and is_unhooked(model.lm_head)
    return None if own_head else "the head is no plain Linear, or has hooks"
