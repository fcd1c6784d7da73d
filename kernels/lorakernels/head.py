"""The forward that `apply` binds to a causal language model: in training with labels its loss comes from the chunked
head.

In evaluation, in generation, and wherever something asks for what the chunked head does not give (a custom loss, router
losses, a slice of logits), the class's own forward runs.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .lazy_logits import lazy_logits
from .linear_cross_entropy import linear_cross_entropy
from .module_checks import GLOBAL_HOOKS, NotFused, check_library, check_weight, hooked_globally, is_unhooked
from .proofs import (
    NARROW,
    ROWS,
    Proofs,
    alike,
    double,
    draw,
    gradients,
    own_forward,
    parameters_of,
    plain_attributes,
    small_linear,
    tried,
)
from .runtime import compute_dtype

COMPUTED = ("loss", "logits", "aux_loss")  # of an output; aux_loss where router losses are asked for, which is not ours
WORDS = {"logit", "logits", "lm", "head"}  # in the name of an attribute that may scale logits
MEDIA = {"pixel_values", "input_features", "image_grid_thw", "input_values"}


class HeadPlan(NamedTuple):
    """What was proved of a causal language model. softcap: whether config.final_logit_softcapping caps its logits;
    scale: what its hidden states are multiplied with before the head, as (whether an attribute of the config, its name,
    whether it divides), or None; output: the class of its output; fields: of the base model's output, in it; base: the
    base model's name."""

    softcap: bool
    scale: tuple[bool, str, bool] | None
    output: Any
    fields: tuple[str, ...]
    base: str

    def scaled(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (…, H) times the model's scale of its logits."""
        if self.scale is None:
            return hidden
        of_config, name, divides = self.scale
        value = getattr(model.config if of_config else model, name)
        return hidden / value if divides else hidden * value

    def cap(self, model: Any) -> float | None:
        """The model's soft cap of its logits."""
        return model.config.final_logit_softcapping if self.softcap else None


def looks_like_causal_lm(module: Any) -> bool:
    """Whether a module has a base model and a head. _modules, because PEFT's wrappers pass attributes of the inner
    model through."""
    return module._modules.get("lm_head") is not None and module._modules.get(_base_name(module)) is not None


def _base_name(model: Any) -> str:
    return getattr(model, "base_model_prefix", "")


def head_plan(model: Any, proofs: Proofs) -> HeadPlan:
    """Of a model with a base model and a head. Raises NotFused with the reason if its loss must be left alone."""
    check_library(model)
    head = model.lm_head
    if type(head) is not nn.Linear:
        raise NotFused(f"its head is {type(head).__module__}.{type(head).__name__}, not torch's Linear")
    if not is_unhooked(head) or "forward" in model.__dict__:
        raise NotFused("its head has hooks, or the model's forward was replaced")
    check_weight(head.weight)
    names = {p.name for p in parameters_of(type(model).forward)}
    if not {"input_ids", "labels", "kwargs"} <= names or names & MEDIA:
        raise NotFused(f"{type(model).__name__} takes images or sound, or does not pass its arguments on")
    key = (type(model), id(model.config), plain_attributes(model), head.weight.shape, head.bias is None)
    return proofs.of(key, lambda: _proved(model))


def names_of(forward: Any) -> list[str]:
    """What a class's forward calls its arguments, in their order."""
    return [p.name for p in parameters_of(forward)]


class _Outputs(dict):
    """In the place of the base model's output: hidden states (B, S, H), and None for all that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else () if isinstance(key, slice) else super().__getitem__(key)


class _Base(nn.Module):
    """In the place of the base model `own`: the same hidden states each time; keeps what it was called with, by the
    names of its parameters."""

    def __init__(self, hidden: torch.Tensor, own: nn.Module):
        super().__init__()
        self.hidden, self.names, self.arguments = hidden, names_of(type(own).forward), {}

    def forward(self, *args: Any, **arguments: Any) -> Any:
        arguments |= dict(zip(self.names, args, strict=False))
        self.arguments = {n: v for n, v in arguments.items() if v is not None}
        return _Outputs(last_hidden_state=self.hidden)


def _proved(model: Any) -> HeadPlan:
    """Raises NotFused unless the model's own loss, with and without a number of items, is the cross-entropy of a linear
    of what its base model returns, and it hands on every argument."""
    name, vocabulary = type(model).__name__, model.lm_head.weight.shape[0]
    hidden, head = draw(2, ROWS, NARROW), small_linear(NARROW, vocabulary, model.lm_head.bias is not None)
    with torch.no_grad():
        head.weight.mul_(4)  # so that a soft cap shows
    base = _Base(hidden, getattr(model, _base_name(model)))
    other = double(model, {_base_name(model): base, "lm_head": head})
    labels = torch.arange(2 * ROWS).view(2, ROWS) % vocabulary
    labels[0, 1] = -100
    handed = {n: torch.zeros(2, ROWS, dtype=torch.long) for n in ("input_ids", "attention_mask", "position_ids")}
    sources = [hidden, *head.parameters()]
    for items in (None, 7):
        extra = {} if items is None else {"num_items_in_batch": items}
        out = tried(model, lambda extra=extra: own_forward(model)(other, **handed, labels=labels, **extra, passed_on=1))
        given = {n: v for n, v in base.arguments.items() if n not in ("output_router_logits", "use_cache")}
        unknown = set(given) - set(handed) - {"passed_on", *extra}
        if unknown or any(given.get(n) is not t for n, t in handed.items()) or "passed_on" not in given:
            raise NotFused(f"{name} does not hand its arguments on to its base model")
        scale, capped = _transform(model, out.logits, head(hidden))
        plan = HeadPlan(
            capped, scale, type(out), tuple(f for f in out.__dataclass_fields__ if f not in COMPUTED), _base_name(model)
        )
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = linear_cross_entropy(
            plan.scaled(model, hidden), head.weight, shifted, head.bias, num_items=items, softcap=plan.cap(model)
        )
        if not alike(gradients(loss, sources), tried(model, lambda out=out: gradients(out.loss, sources))):
            raise NotFused(f"the loss of {name} is not the cross-entropy of its logits")
    return plan


def _transform(model: Any, logits: torch.Tensor, plain: torch.Tensor) -> tuple[tuple[bool, str, bool] | None, bool]:
    """(the scale, whether a soft cap) that make logits of the head's output (…, V). Raises NotFused where neither
    does."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    scales: list[tuple[bool, str, bool] | None] = [None]
    for of_config, owner in ((False, model), (True, model.config)):
        found = [n for n, v in vars(owner).items() if type(v) in (int, float) and v and WORDS & set(n.split("_"))]
        scales += [(of_config, n, divides) for n in found for divides in (False, True)]
    for capped in (True, False) if cap else (False,):
        for scale in scales:
            plan = HeadPlan(capped, scale, None, (), "")
            z = plan.scaled(model, plain)
            if alike([cap * torch.tanh(z / cap) if capped and cap else z], [logits]):
                return scale, bool(capped)
    raise NotFused(f"the logits of {type(model).__name__} are neither its head's nor those scaled or soft-capped")


def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to a causal language model: its own output class, or tuple, with `lazy_logits` in it."""
    own = type(self).forward
    kwargs.update(zip(names_of(own), args, strict=False))
    if reason := _why_left(self, kwargs):
        self._lorakernels_forwards.leave("linear_cross_entropy", reason, expected=reason is NO_TRAINING)
        return own(self, **kwargs)
    self._lorakernels_forwards.fused["linear_cross_entropy"] += 1
    labels, return_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    shifted, num_items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    ignore = kwargs.pop("ignore_index", -100)
    kwargs.pop("logits_to_keep", None)
    kwargs.pop("output_router_logits", None)
    plan: HeadPlan = self._lorakernels
    out = getattr(self, plan.base)(**kwargs)
    hidden = out.last_hidden_state
    shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:] if shifted is None else shifted.reshape(hidden.shape[:-1])
    softcap = plan.cap(self)
    dtype = compute_dtype(hidden, self.lm_head.weight.dtype)
    head = self.lm_head
    bias = None if head.bias is None else head.bias.to(dtype)
    hidden, weight = plan.scaled(self, hidden.to(dtype)), head.weight.to(dtype)
    loss = linear_cross_entropy(
        hidden, weight, shifted.to(hidden.device), bias, ignore_index=ignore, num_items=num_items, softcap=softcap
    )
    rest = {name: getattr(out, name, None) for name in plan.fields}
    result = plan.output(loss=loss, logits=lazy_logits(hidden, weight, bias, softcap), **rest)
    wanted = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
    return result if wanted else result.to_tuple()


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
