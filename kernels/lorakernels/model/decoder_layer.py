"""A whole decoder layer on our kernels: norms, attention and MLP as three nodes, where everything of it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..nodes.member import SavedAdapters, with_saved_adapters
from ..nodes.mlp_node import gated_mlp
from ..nodes.operand import adapters_of, with_loaded_adapters
from ..nodes.projection import Projection
from ..nodes.projection_node import project
from ..ops.adapter import Loader
from ..ops.rms_norm import rms_norm
from .attention import AttentionPlan, query_key_value
from .attention_form import CACHES, cache_name
from .forwards import unless
from .long_context import EXCLUDES, PLAIN, Call, LongContext, Pass, kept_layer
from .mlp import MLPPlan
from .module_checks import (
    GLOBAL_HOOKS,
    NotFused,
    check_library,
    hooked_globally,
    is_inactive_dropout,
    is_unhooked,
    why_hooked,
)
from .norms import NormModule, looks_like_norm, norm_module
from .offloaded import Offloaded
from .parked import Parking
from .plans import Plan
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

ARGUMENTS = ("attention_mask", "position_embeddings")  # what attention wants of a layer's, besides its cache


@dataclass(frozen=True)
class LayerForm:
    """h = x + m · after_attention(attention(before_attention(x))), y = h + m · after_mlp(mlp(before_mlp(h))): the names
    of the norms, None where there is none, and of the attribute m (Granite's multiplier), None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    multiplier: str | None


@dataclass
class LayerPlan(Plan):
    """form: the order that the class was proved to have; norms: by name; mlp: None where the layer has experts instead;
    positional: the names of the layer's arguments behind hidden_states; own_checkpointing: whether the class's forward
    does the checkpointing; drops: Phi-3's dropouts of the residual, which must be none; long, parking: where the layer
    is to be made again in backward; weights: where they wait in host memory."""

    attention: AttentionPlan
    form: LayerForm
    norms: dict[str, NormModule]
    mlp: MLPPlan | None
    positional: list[str] = field(default_factory=list)
    own_checkpointing: bool = False
    drops: dict[str, Any] = field(default_factory=dict)
    loader: Loader = field(default_factory=Loader)
    long: LongContext | None = None
    parking: Parking | None = None
    weights: Offloaded | None = None

    def what_changed(self) -> str | None:
        """The reason, in words, if not everything is as planned."""
        here = self.module._modules
        attention, mlp = self.attention.module, None if self.mlp is None else self.mlp.module
        same = here["self_attn"] is attention and (mlp is None or here["mlp"] is mlp) and self.same_class
        if not same:
            return "a layer, its attention or its MLP is another module now, or of another class"
        for module in (attention, mlp):
            if module is not None and not is_unhooked(module):
                return why_hooked(module)
        if self.drops and not all(here[n] is m and is_inactive_dropout(m) for n, m in self.drops.items()):
            return "a layer drops out its residual"
        if not all(here[n] is norm.module and norm.is_unchanged() for n, norm in self.norms.items()):
            return "a norm was changed or hooked into"
        return self.attention.what_changed() or (None if self.mlp is None else self.mlp.what_changed())

    @property
    def groups(self) -> list[Projection]:
        """Of attention and of the MLP."""
        return self.attention.groups + (self.mlp.groups if self.mlp else [])

    def norm(self, name: str | None) -> dict[str, Any]:
        """The norm of this name as keyword arguments of `project` and `gated_mlp`; none of None."""
        if name is None:
            return {}
        found = self.norms[name]
        return {"norm": found.norm, "norm_weight": found.module.weight}

    def behind(self, name: str | None, y: torch.Tensor) -> torch.Tensor:
        """What is added to the residual of y (…, K): through the norm of this name, and times the multiplier."""
        if name is not None:
            found = self.norms[name]
            y = rms_norm(y, found.module.weight, found.norm.eps, found.norm.offset)
        return y if self.form.multiplier is None else y * self.module.__dict__[self.form.multiplier]


def layer_plan(layer: Any, attention: AttentionPlan, mlp: MLPPlan | None, proofs: Proofs) -> LayerPlan:
    """Of a decoder layer with these parts. Raises NotFused with the reason where it cannot be taken as a whole."""
    check_library(layer)
    children = dict(layer.named_children())
    drops = {n: m for n, m in children.items() if n in ("resid_attn_dropout", "resid_mlp_dropout")}
    if busy := [n for n, m in drops.items() if not is_inactive_dropout(m)]:
        raise NotFused(f"it drops out its residual, or has hooks there ({busy[0]})")
    others = {n: m for n, m in children.items() if n not in ("self_attn", "mlp", *drops)}
    if parts := sorted(n for n, m in others.items() if next(m.children(), None) is not None or not looks_like_norm(m)):
        raise NotFused(f"{type(layer).__name__} has parts of its own: {parts}")
    norms = {n: norm_module(m, proofs) for n, m in others.items()}
    key = (type(layer), plain_attributes(layer), mlp is None, *((n, m.kind, m.norm) for n, m in norms.items()))
    form = proofs.of(key, lambda: _form(layer, norms, mlp is None))
    positional = [p.name for p in parameters_of(type(layer).forward)][1:]
    # transformers checkpoints in __call__ (then our forward is inside already) or, later, in the class's forward.
    outside = any("__call__" in c.__dict__ for c in type(layer).__mro__ if c is not nn.Module)
    return LayerPlan(layer, attention, form, norms, mlp, positional, not outside, drops)


class _Stand(nn.Module):
    """In the place of an attention or an MLP: one linear, which keeps what else it was called with."""

    def __init__(self, pair: bool):
        super().__init__()
        self.linear, self.pair, self.arguments = small_linear(NARROW, NARROW, True), pair, {}

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        self.arguments = arguments
        return (self.linear(hidden_states), None) if self.pair else self.linear(hidden_states)


def _form(layer: Any, norms: dict[str, NormModule], experts: bool) -> LayerForm:
    """The order in which a layer's own forward calls and adds its parts. Raises NotFused where it is none that
    `_fused_layer` has, or an argument is not handed on. experts: where an MLP would be, which may return a pair."""
    try:
        return _form_with(layer, norms, _Stand(False))
    except NotFused:
        if not experts:
            raise
        return _form_with(layer, norms, _Stand(True))


def _form_with(layer: Any, norms: dict[str, NormModule], mlp: _Stand) -> LayerForm:
    """The same, with this in the place of the MLP."""
    name, attention, calls = type(layer).__name__, _Stand(True), []
    made = {n: double(norm.module, {}) for n, norm in norms.items()}
    for norm in made.values():
        norm._parameters["weight"] = nn.Parameter(draw(NARROW).detach())
        if "normalized_shape" in norm.__dict__:
            norm.__dict__["normalized_shape"] = (NARROW,)
    for part, module in {**made, "self_attn": attention, "mlp": mlp}.items():
        module.register_forward_pre_hook(lambda _, __, part=part: calls.append(part))
    other = double(layer, {**made, "self_attn": attention, "mlp": mlp}, gradient_checkpointing=False)
    x, given = draw(2, ROWS, NARROW), {n: draw(1) for n in (*ARGUMENTS, cache_name(layer))}
    sources = [x, *(p for m in (attention, mlp, *made.values()) for p in m.parameters())]
    out = tried(layer, lambda: own_forward(layer)(other, x, **given, passed_on=1))
    if not isinstance(out, torch.Tensor):
        raise NotFused(f"{name} returns more than its hidden states")
    wanted = gradients(out, sources)
    handed = attention.arguments
    if mlp.arguments or "passed_on" not in handed or any(handed.get(n) is not t for n, t in given.items()):
        raise NotFused(f"{name} does not hand its arguments on to its attention, or some to its MLP")
    for form in _forms(calls, [n for n, v in layer.__dict__.items() if type(v) is float]):

        def normed(part: str | None, y: torch.Tensor) -> torch.Tensor:
            return y if part is None else rms_norm(y, made[part].weight, norms[part].norm.eps, norms[part].norm.offset)

        m = 1.0 if form.multiplier is None else getattr(layer, form.multiplier)
        h = x + m * normed(form.after_attention, attention.linear(normed(form.before_attention, x)))
        y = h + m * normed(form.after_mlp, mlp.linear(normed(form.before_mlp, h)))
        if alike(gradients(y, sources), wanted):
            return form
    raise NotFused(f"{name} adds or orders its parts otherwise than a known layer")


def _forms(calls: list[str], attributes: list[str]) -> Iterator[LayerForm]:
    """What a layer may be that calls its parts in this order and has numbers under these names."""
    if calls.count("self_attn") != 1 or calls.count("mlp") != 1 or len(set(calls)) != len(calls):
        return
    i, j = calls.index("self_attn"), calls.index("mlp")
    before, between, after = calls[:i], calls[i + 1 : j], calls[j + 1 :]
    if i > j or len(before) > 1 or len(between) > 2 or len(after) > 1:
        return
    two = (
        [(between[0], between[1])] if len(between) == 2 else [(None, n) for n in between] + [(n, None) for n in between]
    )
    for behind, ahead in two or [(None, None)]:
        for m in (None, *attributes):
            yield LayerForm(before[0] if before else None, behind, ahead, after[0] if after else None, m)


def _why_left(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    plan: LayerPlan = layer._lorakernels
    if (reason := _reason(plan, args, kwargs)) is not None:
        _bring(plan)
    return reason


def _bring(plan: LayerPlan) -> None:
    """For a forward that is not made again. Where it has a backward the weights stay, because nobody says when that has
    been."""
    if plan.weights is not None:
        plan.weights.bring(stay=True) if torch.is_grad_enabled() else plan.weights.need(1)


def _reason(plan: LayerPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    kwargs.update(zip(plan.positional, args, strict=False))
    if kwargs.get("output_attentions", False) or getattr(plan.attention.module.config, "output_attentions", False):
        return "attentions are asked for"
    if hooked_globally():
        return GLOBAL_HOOKS
    if kwargs.get("position_embeddings") is None:
        return "a layer was called without position_embeddings"
    return plan.what_changed()


@unless(_why_left, "layer")
def layer_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Bound to a decoder layer instance: (B, S, K) of hidden_states (B, S, K)."""
    plan: LayerPlan = self._lorakernels
    kwargs.update(zip(plan.positional, args, strict=False))
    checkpointed = self.training and getattr(self, "gradient_checkpointing", False)
    if checkpointed and plan.long is not None:
        raise RuntimeError(EXCLUDES)
    trained = _trained(plan, hidden_states) if plan.long is not None and self.training else None
    if (checkpointed and plan.own_checkpointing) or trained is not None:
        # A cache would be updated a second time by the recomputation.
        kwargs.update({k: v for k, v in (("use_cache", False), *((n, None) for n in CACHES)) if k in kwargs})
    if trained is not None:
        return kept_layer(_call(plan, **kwargs), hidden_states, trained)
    _bring(plan)
    if checkpointed and plan.own_checkpointing:
        run = partial(_layer_again, plan, adapters_of(plan.groups), apart=True, **kwargs)
        return self._gradient_checkpointing_func(run, hidden_states)
    return _layer(plan, hidden_states, apart=checkpointed, **kwargs)


def _trained(plan: LayerPlan, x: torch.Tensor) -> list[torch.Tensor] | None:
    """The layer's parameters that are trained; None where this forward has no backward."""
    parameters = [p for p in plan.module.parameters() if p.requires_grad]
    return parameters if torch.is_grad_enabled() and (parameters or x.requires_grad) else None


def _call(plan: LayerPlan, **kwargs: Any) -> Call:
    """This forward as one that can be run again. Experts are modules of the model's own, which may draw."""
    draws = plan.mlp is None or bool(plan.attention.module.attention_dropout) or any(g.dropped for g in plan.groups)
    assert plan.long is not None and plan.parking is not None

    def run(x: torch.Tensor, long_pass: Pass) -> torch.Tensor:
        counts = plan.module._lorakernels_forwards.fused
        if plan.weights is not None:
            counts["weights brought"] += plan.weights.need(-1 if long_pass.again else 1)
        if long_pass.again:
            counts["layer made again"] += 1
            counts["attention kept"] += long_pass.keeps_attention
        return _layer(plan, x, long_pass=long_pass, **kwargs)

    return Call(run, plan.long, plan.parking, draws, adapters_of(plan.groups))


def _layer(plan: LayerPlan, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return _fused_layer(plan, x, *args, **kwargs)


def _layer_again(plan: LayerPlan, adapters: SavedAdapters, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`_layer`, of which a checkpoint runs the second pass in the backward: other forwards may have read other adapters
    since."""
    with with_saved_adapters(adapters):
        return _layer(plan, x, **kwargs)


def _fused_layer(
    plan: LayerPlan, x: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None, *,
    long_pass: Pass = PLAIN, apart: bool = False, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """apart: whether a checkpoint runs the layer again, so that down is better a node of its own."""
    assert plan.attention.o is not None
    form = plan.form
    spare = plan.mlp.down.groups[0].p if plan.mlp else 0  # x is another layer's down projection, of the same rank
    q, k, v, x = query_key_value(
        plan.attention, x, position_embeddings, **plan.norm(form.before_attention), pass_through=True, spare=spare
    )
    out = long_pass.attend(plan.attention, q, k, v, attention_mask, **kwargs)
    del q, k, v
    out = out.reshape(*x.shape[:-1], -1)
    out = plan.behind(form.after_attention, project(out, plan.attention.o.groups))
    if form.before_mlp is None:
        x = x + out
        y = plan.module.mlp(x) if plan.mlp is None else _mlp(plan.mlp, x, tile=long_pass.tile, apart=apart)
    elif plan.mlp is None:
        norm = plan.norms[form.before_mlp]
        y, x = rms_norm(out, norm.module.weight, norm.norm.eps, norm.norm.offset, residual=x)
        y = plan.module.mlp(y)
    else:
        before = plan.norm(form.before_mlp)
        if form.after_mlp is None and form.multiplier is None:
            tiles = {"tile": long_pass.tile, "output": not long_pass.again}
            return _mlp(plan.mlp, out, residual=x, add=True, apart=apart, **tiles, **before)
        y, x = _mlp(plan.mlp, out, residual=x, pass_through=True, tile=long_pass.tile, apart=apart, **before)
    y = y[0] if isinstance(y, tuple) else y  # GPT-OSS' experts give their router's scores, too
    return x + plan.behind(form.after_mlp, y)


def _mlp(plan: MLPPlan, x: torch.Tensor, **arguments: Any) -> Any:
    return gated_mlp(x, plan.gate_up.groups, plan.down.groups[0], plan.act, **arguments)
