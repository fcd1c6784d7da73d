"""A whole decoder layer on our kernels: norms, attention and MLP as three nodes, where everything of it is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .adapter import Loader
from .attention import AttentionPlan, attend, query_key_value
from .mlp import MLPPlan
from .mlp_node import gated_mlp
from .module_checks import (
    GLOBAL_HOOKS,
    NotFused,
    check_library,
    hooked_globally,
    is_inactive_dropout,
    is_unhooked,
    why_hooked,
)
from .norms import NormModule, norm_module
from .operand import with_loaded_adapters
from .plans import Plan
from .projection import Projection
from .projection_node import project
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
from .rms_norm import rms_norm

NORMS = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
ARGUMENTS = ("attention_mask", "position_embeddings", "past_key_values")  # what attention wants of a layer's


@dataclass
class LayerPlan(Plan):
    """norms: by name; mlp: None where the layer has experts instead; positional: the names of the
    layer's arguments behind hidden_states; own_checkpointing: whether the class's forward does the checkpointing;
    drops: Phi-3's dropouts of the residual, which must be none."""

    attention: AttentionPlan
    norms: dict[str, NormModule]
    mlp: MLPPlan | None
    positional: list[str] = field(default_factory=list)
    own_checkpointing: bool = False
    drops: dict[str, Any] = field(default_factory=dict)
    loader: Loader = field(default_factory=Loader)

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

    def norm(self, name: str) -> dict[str, Any]:
        """The norm of this name as keyword arguments of `project` and `gated_mlp`."""
        found = self.norms[name]
        return {"norm": found.norm, "norm_weight": found.module.weight}

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x (…, K) through the norm of this name."""
        found = self.norms[name]
        return rms_norm(x, found.module.weight, found.norm.eps, found.norm.offset)


def layer_plan(layer: Any, attention: AttentionPlan, mlp: MLPPlan | None, proofs: Proofs) -> LayerPlan:
    """Of a decoder layer with these parts. Raises NotFused with the reason where it cannot be taken as a whole."""
    norms = {n: norm_module(getattr(layer, n), proofs) for n in NORMS if hasattr(layer, n)}
    if not {"input_layernorm", "post_attention_layernorm"} <= set(norms) or len(norms) == 3:
        raise NotFused(f"{type(layer).__name__} has other norms than a known layer")
    check_library(layer)
    drops = {n: m for n, m in layer.named_children() if n in ("resid_attn_dropout", "resid_mlp_dropout")}
    if busy := [n for n, m in drops.items() if not is_inactive_dropout(m)]:
        raise NotFused(f"it drops out its residual, or has hooks there ({busy[0]})")
    known = {"self_attn", "mlp", *drops, *NORMS}
    if other := {n for n, _ in layer.named_children()} - known:
        raise NotFused(f"{type(layer).__name__} has parts of its own: {sorted(other)}")
    key = (type(layer), plain_attributes(layer), mlp is None, *((n, m.kind, m.norm) for n, m in norms.items()))
    proofs.of(key, lambda: _prove(layer, norms, mlp is None))
    positional = [p.name for p in parameters_of(type(layer).forward)][1:]
    # transformers checkpoints in __call__ (then our forward is inside already) or, later, in the class's forward.
    outside = any("__call__" in c.__dict__ for c in type(layer).__mro__ if c is not nn.Module)
    return LayerPlan(layer, attention, norms, mlp, positional, not outside, drops)


class _Stand(nn.Module):
    """In the place of an attention or an MLP: one linear, which keeps what else it was called with."""

    def __init__(self, pair: bool):
        super().__init__()
        self.linear, self.pair, self.arguments = small_linear(NARROW, NARROW, True), pair, {}

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        self.arguments = arguments
        return (self.linear(hidden_states), None) if self.pair else self.linear(hidden_states)


def _prove(layer: Any, norms: dict[str, NormModule], experts: bool) -> None:
    """Raises NotFused unless a layer's own forward is attention and MLP, each behind its norm and added to the residual
    as `_fused_layer` adds it, and hands on every argument. experts: where an MLP would be, which may return a pair."""
    try:
        _prove_with(layer, norms, _Stand(False))
    except NotFused:
        if not experts:
            raise
        _prove_with(layer, norms, _Stand(True))


def _prove_with(layer: Any, norms: dict[str, NormModule], mlp: _Stand) -> None:
    """The same, with this in the place of the MLP."""
    attention = _Stand(True)
    made = {n: double(norm.module, {}) for n, norm in norms.items()}
    for norm in made.values():
        norm._parameters["weight"] = nn.Parameter(draw(NARROW).detach())
        if "normalized_shape" in norm.__dict__:
            norm.__dict__["normalized_shape"] = (NARROW,)
    other = double(layer, {**made, "self_attn": attention, "mlp": mlp}, gradient_checkpointing=False)
    x, given = draw(2, ROWS, NARROW), {n: draw(1) for n in ARGUMENTS}
    sources = [x, *(p for m in (attention, mlp, *made.values()) for p in m.parameters())]
    out = tried(layer, lambda: own_forward(layer)(other, x, **given, passed_on=1))
    if not isinstance(out, torch.Tensor):
        raise NotFused(f"{type(layer).__name__} returns more than its hidden states")
    wanted = gradients(out, sources)
    handed = attention.arguments
    if mlp.arguments or "passed_on" not in handed or any(handed.get(n) is not t for n, t in given.items()):
        raise NotFused(f"{type(layer).__name__} does not hand its arguments on to its attention, or some to its MLP")

    def normed(name: str, y: torch.Tensor) -> torch.Tensor:
        return rms_norm(y, made[name].weight, norms[name].norm.eps, norms[name].norm.offset)

    sandwich = len(norms) == 4
    between = attention.linear(normed("input_layernorm", x))
    h = x + (normed("post_attention_layernorm", between) if sandwich else between)
    y = mlp.linear(normed("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm", h))
    if not alike(gradients(h + (normed("post_feedforward_layernorm", y) if sandwich else y), sources), wanted):
        raise NotFused(f"{type(layer).__name__} adds or orders its parts otherwise than a known layer")


def layer_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Bound to a decoder layer instance: (B, S, K) of hidden_states (B, S, K)."""
    plan: LayerPlan = self._lorakernels
    kwargs.update(zip(plan.positional, args, strict=False))
    if changed := _why_left(plan, kwargs):
        self._lorakernels_forwards.leave("layer", changed)
        return type(self).forward(self, hidden_states, **kwargs)
    self._lorakernels_forwards.fused["layer"] += 1
    if plan.own_checkpointing and self.training and getattr(self, "gradient_checkpointing", False):
        # A cache would be updated a second time by the recomputation.
        kwargs.update({k: v for k, v in (("use_cache", False), ("past_key_values", None)) if k in kwargs})
        return self._gradient_checkpointing_func(partial(_layer, plan, **kwargs), hidden_states)
    return _layer(plan, hidden_states, **kwargs)


def _why_left(plan: LayerPlan, kwargs: dict[str, Any]) -> str | None:
    if kwargs.get("output_attentions", False) or getattr(plan.attention.module.config, "output_attentions", False):
        return "attentions are asked for"
    if hooked_globally():
        return GLOBAL_HOOKS
    if kwargs.get("position_embeddings") is None:
        return "a layer was called without position_embeddings"
    return plan.what_changed()


def _layer(plan: LayerPlan, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return _fused_layer(plan, x, *args, **kwargs)


def _fused_layer(
    plan: LayerPlan, x: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None,
    past_key_values: Any = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    assert plan.attention.o is not None
    sandwich = "pre_feedforward_layernorm" in plan.norms
    spare = plan.mlp.down.groups[0].p if plan.mlp else 0  # x is another layer's down projection, of the same rank
    q, k, v, x = query_key_value(
        plan.attention, x, position_embeddings, **plan.norm("input_layernorm"), pass_through=True, spare=spare
    )
    out, _ = attend(plan.attention, q, k, v, attention_mask, past_key_values, **kwargs)
    out = out.reshape(*x.shape[:-1], -1)
    out = project(out, plan.attention.o.groups)
    if sandwich:
        out = plan.normed("post_attention_layernorm", out)
    before = plan.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
    if plan.mlp is None:
        y, x = rms_norm(out, before["norm_weight"], before["norm"].eps, before["norm"].offset, residual=x)
        y = plan.module.mlp(y)
        y = y[0] if isinstance(y, tuple) else y  # GPT-OSS' experts give their router's scores, too
        return x + (plan.normed("post_feedforward_layernorm", y) if sandwich else y)
    mlp = partial(gated_mlp, out, plan.mlp.gate_up.groups, plan.mlp.down.groups[0], plan.mlp.act, residual=x, **before)
    if not sandwich:
        return mlp(add=True)
    y, x = mlp(pass_through=True)
    return x + plan.normed("post_feedforward_layernorm", y)
