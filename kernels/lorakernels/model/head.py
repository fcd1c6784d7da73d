"""The forward that `apply` binds to a causal language model: in training with labels its loss comes from the chunked
head.

In evaluation, in generation, and wherever something asks for what the chunked head does not give (a custom loss, router
losses, a slice of logits), the class's own forward runs.
"""

from __future__ import annotations

import copy
import sys
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..ops.linear_cross_entropy import linear_cross_entropy
from ..runtime import compute_dtype
from .forwards import unless
from .lazy_logits import lazy_logits, loss_of
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

COMPUTED = ("loss", "logits", "aux_loss")  # of an output; aux_loss where router losses are asked for, which is not ours
WORDS = {"logit", "logits", "lm", "head"}  # in the name of an attribute that may scale logits
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # of a config
MEDIA = {"pixel_values", "input_features", "image_grid_thw", "input_values"}
# What a head's forward takes for itself.
OWN = {"labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "output_router_logits"}
# What a base model decides itself where nobody does, as the head would have decided it.
DECIDED = {"output_router_logits", "use_cache"}


class HeadPlan(NamedTuple):
    """What was proved of a causal language model. softcap: which attribute of the config caps its logits, or None;
    scale: what its hidden states are multiplied with before the head, as (path of the attribute's owner, its name,
    whether it divides), or None; output: the class of its output; fields: of the base model's output, in it; base: the
    path of the module that makes the hidden states; handed: the arguments that this gets, of those that the forward
    has names for; others: whether it gets those without a name there, too; in_float32: whether logits are made
    float32."""

    softcap: str | None
    scale: tuple[str, str, bool] | None
    output: Any = None
    fields: tuple[str, ...] = ()
    base: str = ""
    handed: frozenset[str] = frozenset()
    others: bool = True
    in_float32: bool = False

    def scaled(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (…, H) times the model's scale of its logits."""
        if self.scale is None:
            return hidden
        owner, name, divides = self.scale
        value = getattr(_inside(model, owner), name)
        return hidden / value if divides else hidden * value

    def cap(self, model: Any) -> float | None:
        """The model's soft cap of its logits."""
        return getattr(model.config, self.softcap) if self.softcap else None

    def outputs(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """Of the base model, called as the class's own forward calls it with these arguments."""
        names = names_of(type(model).forward)
        given = {n: v for n, v in kwargs.items() if n in self.handed or (self.others and n not in names)}
        if "return_dict" in self.handed:
            given["return_dict"] = True
        return _inside(model, self.base)(**given)


def _inside(model: Any, path: str) -> Any:
    return attrgetter(path)(model) if path else model


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
    check_weight(head.weight, head)
    names = set(names_of(type(model).forward))
    if not {"input_ids", "labels", "kwargs"} <= names or names & MEDIA:
        raise NotFused(f"{type(model).__name__} takes images or sound, or does not pass its arguments on")
    base = plain_attributes(model._modules[_base_name(model)])
    key = (type(model), id(model.config), plain_attributes(model), base, head.weight.shape, head.bias is None)
    return proofs.of(key, lambda: _proved(model))


def names_of(forward: Any) -> list[str]:
    """What a class's forward calls its arguments, in their order."""
    return [p.name for p in parameters_of(forward)]


class _Outputs(dict):
    """In the place of the base model's output: hidden states (B, S, H), and None for all that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return ()
        if key not in (0, "last_hidden_state"):
            raise NotFused("its logits are made of more than the base model's hidden states")
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _Base:
    """In the place of the base model `own`, and of every module inside it (OPT's head calls its decoder): the same
    hidden states each time. It keeps who was called with what, by the names of the parameters, and which numbers were
    read (Falcon-H1's scale of its logits). Nothing else of the model is to be had: it would run, or be real weights."""

    def __init__(self, own: nn.Module, path: str, hidden: torch.Tensor):
        self._own, self._path, self._hidden = own, path, hidden
        self._calls: list[tuple[str, Any, dict[str, Any]]] = []
        self._read: list[tuple[str, str, Any]] = []

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        forward = type(self._own).forward
        arguments |= dict(zip(names_of(forward), args, strict=False))
        self._calls.append((self._path, forward, {n: v for n, v in arguments.items() if v is not None}))
        return _Outputs(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if isinstance(value, nn.Module):
            inside = _Base(value, f"{self._path}.{name}", self._hidden)
            inside._calls, inside._read = self._calls, self._read
            return inside
        if type(value) not in (bool, int, float, str, type(None)):
            raise NotFused("its logits or its loss are made of more than the base model's hidden states")
        self._read.append((self._path, name, value))
        return value


class _Trial:
    """A double of a model with a head, and what its own forward did with arguments that are told apart."""

    def __init__(self, model: Any):
        self.model, self.name, self.prefix = model, type(model).__name__, _base_name(model)
        self.hidden = draw(2, ROWS, NARROW)
        self.head = small_linear(NARROW, model.lm_head.weight.shape[0], model.lm_head.bias is not None)
        with torch.no_grad():
            self.head.weight.mul_(4)  # so that a soft cap shows
        self.labels = torch.arange(2 * ROWS).view(2, ROWS) % self.head.out_features
        self.labels[0, 1] = -100
        self.names = names_of(type(model).forward)

    def out(self, dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[Any, _Base]:
        """The output of the own forward on hidden states and a head in dtype, and the base model's place, as it was
        left."""
        base = _Base(self.model._modules[self.prefix], self.prefix, self.hidden.to(dtype))
        head = self.head if dtype == torch.float32 else copy.deepcopy(self.head).to(dtype)
        other = double(self.model, {self.prefix: base, "lm_head": head})
        out = tried(self.model, lambda: own_forward(self.model)(other, **arguments))
        if len(base._calls) != 1 or not isinstance(getattr(out, "logits", None), torch.Tensor):
            raise NotFused(f"{self.name} does not make its logits of one call of its base model")
        return out, base

    def arguments(self) -> dict[str, Any]:
        """A value for everything but OWN that its forward has a name for, and for what it may be handed besides."""
        named = [n for n in self.names if n not in (*OWN, "kwargs", "return_dict")]
        switches = [n for n in named if n == "use_cache" or n.startswith("output_")]
        tensors = {*named, "input_ids", "attention_mask", "position_ids", "passed_on"}.difference(switches)
        return {n: torch.arange(2 * ROWS).view(2, ROWS) % 2 for n in sorted(tensors)} | dict.fromkeys(switches, True)

    def handed(self, base: _Base, arguments: dict[str, Any]) -> frozenset[str]:
        """Which of these the base model got. Raises NotFused where it got anything else."""
        _, forward, got = base._calls[0]
        handed = {n for n, value in arguments.items() if got.get(n) is value}
        without_names = set(arguments) - set(self.names) - OWN
        defaults = {p.name: p.default for p in parameters_of(forward)}
        more = {n: v for n, v in got.items() if n not in handed | DECIDED}
        if any(n not in OWN or v is not defaults.get(n) for n, v in more.items()):
            raise NotFused(f"{self.name} calls its base model with arguments that it was not given")
        if "input_ids" not in handed or not (without_names <= handed or not without_names & handed):
            raise NotFused(f"{self.name} hands on some of its arguments to its base model and not others")
        return frozenset(handed)


def _proved(model: Any) -> HeadPlan:
    """Raises NotFused unless the model's own loss, with few arguments and with all, with and without a number of items,
    is the cross-entropy of a linear of what its base model returns."""
    trial = _Trial(model)
    everything = trial.arguments()
    few = {n: everything[n] for n in ("input_ids", "passed_on")}
    least, *most = (_plan(trial, items, given) for items, given in ((None, few), (None, everything), (7, everything)))
    if {*most, least._replace(handed=most[0].handed)} != {most[0]} or not least.handed <= most[0].handed:
        raise NotFused(f"{trial.name} does otherwise with some of its arguments")
    lower, _ = trial.out(torch.bfloat16, **few)
    return most[0]._replace(in_float32=lower.logits.dtype == torch.float32)


def _plan(trial: _Trial, items: int | None, given: dict[str, Any]) -> HeadPlan:
    """What the model does with these arguments and this number of items. Raises NotFused where that is not known."""
    model, hidden, head = trial.model, trial.hidden, trial.head
    given = given | ({"return_dict": True} if "return_dict" in trial.names else {})
    given = given | ({} if items is None else {"num_items_in_batch": items})
    out, base = trial.out(**given, labels=trial.labels)
    handed = trial.handed(base, given) - OWN
    softcap, scale = _transform(model, base._read, out.logits, head(hidden))
    plan = HeadPlan(
        softcap, scale, type(out), tuple(f for f in out.__dataclass_fields__ if f not in COMPUTED),
        base._calls[0][0], handed & set(trial.names), "passed_on" in handed,
    )  # fmt: skip
    shifted = F.pad(trial.labels, (0, 1), value=-100)[..., 1:]
    loss = linear_cross_entropy(
        plan.scaled(model, hidden), head.weight, shifted, head.bias, num_items=items, softcap=plan.cap(model)
    )
    sources = [hidden, *head.parameters()]
    if not alike(gradients(loss, sources), tried(model, lambda: gradients(out.loss, sources))):
        raise NotFused(f"the loss of {trial.name} is not the cross-entropy of its logits and the next tokens")
    return plan


def _transform(
    model: Any, read: list[tuple[str, str, Any]], logits: torch.Tensor, plain: torch.Tensor
) -> tuple[str | None, tuple[str, str, bool] | None]:
    """(the soft cap, the scale) that make logits of the head's output (…, V). read: the base model's attributes that
    the forward looked at, as (path, name, value). Raises NotFused where neither makes them."""
    owners = [("", model), ("config", model.config)]
    named = [(path, n, v) for path, owner in owners for n, v in vars(owner).items() if WORDS & set(n.split("_"))]
    numbers = [(path, n) for path, n, v in (*read, *named) if type(v) in (int, float) and v]
    scales = [None, *((path, n, divides) for path, n in numbers for divides in (False, True))]
    for softcap in (*(n for n in CAPS if getattr(model.config, n, None)), None):
        for scale in scales:
            plan = HeadPlan(softcap, scale)
            z, cap = plan.scaled(model, plain), plan.cap(model)
            if alike([cap * torch.tanh(z / cap) if cap else z], [logits]):
                return softcap, scale
    raise NotFused(f"the logits of {type(model).__name__} are neither its head's nor those scaled or soft-capped")


NO_TRAINING = "no forward of training with labels"


def _why_left(model: Any, *args: Any, **kwargs: Any) -> str | None:
    """Why this forward's loss is not ours; None where it is."""
    kwargs.update(zip(names_of(type(model).forward), args, strict=False))
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


@unless(_why_left, "linear_cross_entropy", expected=NO_TRAINING)
def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to a causal language model: its own output class, or tuple, with `lazy_logits` in it."""
    kwargs.update(zip(names_of(type(self).forward), args, strict=False))
    labels, return_dict = kwargs.pop("labels"), kwargs.pop("return_dict", None)
    shifted, num_items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    ignore = kwargs.pop("ignore_index", -100)
    kwargs.pop("logits_to_keep", None)
    kwargs.pop("output_router_logits", None)
    plan: HeadPlan = self._lorakernels
    out = plan.outputs(self, kwargs)
    hidden = out.last_hidden_state
    shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:] if shifted is None else shifted.reshape(hidden.shape[:-1])
    shifted = shifted.to(hidden.device)
    softcap = plan.cap(self)
    dtype = compute_dtype(hidden, self.lm_head.weight.dtype)
    head = self.lm_head
    bias = None if head.bias is None else head.bias.to(dtype)
    hidden, weight = plan.scaled(self, hidden.to(dtype)), head.weight.to(dtype)
    loss = linear_cross_entropy(
        hidden, weight, shifted, bias, ignore_index=ignore, num_items=num_items, softcap=softcap
    )
    rest = {name: getattr(out, name, None) for name in plan.fields}
    logits = lazy_logits(hidden, weight, bias, softcap)
    logits = logits.float() if plan.in_float32 else logits
    if loss.requires_grad:
        loss = loss_of(loss, logits, shifted, num_items, ignore)
    result = plan.output(loss=loss, logits=logits, **rest)
    wanted = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
    return result if wanted else result.to_tuple()
