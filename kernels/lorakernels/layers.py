"""The forwards that `apply` binds to instances: a whole decoder layer, or its attention, MLP and norms one by one.

A plan is made once. Each forward first asks it whether everything still is as planned (adapters neither disabled nor
merged, no new hooks); if not, the class's own forward runs, which is PEFT's. Attention is always transformers' own
interface, with the model's implementation, mask, sliding window and soft cap.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from .adapter import Loader
from .heads import Heads
from .lora_modules import LinearModule, linear_module
from .mlp_node import gated_mlp
from .module_checks import (
    NORMS,
    NotFused,
    activation_of,
    check_class,
    eps_of,
    hooked_globally,
    is_inactive_dropout,
    is_library_function,
    is_unchanged_norm,
    is_unhooked,
    norm_of,
)
from .operand import with_loaded_adapters
from .projection import Projection
from .projection_node import project
from .rms_norm import Norm, rms_norm
from .rope import rope

# Attention classes of transformers: where they take their sliding window from, and whether they soft-cap.
ATTENTION = {
    "LlamaAttention": ("none", False),
    "GemmaAttention": ("none", False),
    "MistralAttention": ("config", False),
    "MixtralAttention": ("config", False),
    "Phi3Attention": ("config", False),
    "Qwen2Attention": ("module", False),
    "Qwen3Attention": ("module", False),
    "Gemma2Attention": ("module", True),
}
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


@dataclass
class Switches:
    """What `apply` was asked for."""

    mlp: bool = True
    qkv: bool = True
    o: bool = True
    rms_norm: bool = True
    rope: bool = True
    linear_cross_entropy: bool = True
    one_gemm: bool = True
    merge_projections: bool = True
    fp8: bool = False
    sdpa_backends: tuple[str, ...] | None = None


class Linears:
    """Linears that share an input: merged into one Projection, or one each."""

    def __init__(self, modules: list[LinearModule], switches: Switches):
        self.modules = modules
        members = [m.member for m in modules]
        # One dtype, device and kind of storage a buffer; q and k in NF4 with a bf16 v stay apart.
        same = len({(m.weight.dtype, m.weight.device, m.quantized is None, m.compute_dtype) for m in members}) == 1
        parts = [members] if switches.merge_projections and same else [[m] for m in members]
        self.groups = [Projection(part, switches.one_gemm, switches.fp8) for part in parts]

    def ready(self) -> bool:
        return all(m.ready() for m in self.modules)

    def adopt(self) -> None:
        for g in self.groups:
            g.adopt()

    def release(self) -> None:
        for g in self.groups:
            g.release()


def linears(module: Any, path: str, names: list[str], switches: Switches) -> Linears:
    """The linears of these names in a module, whose path this is. Raises NotFused with the reason where one is left to
    PEFT."""
    found = []
    for name in names:
        try:
            found.append(linear_module(f"{path}.{name}", module))
        except NotFused as reason:
            raise NotFused(f"{name}: {reason}") from None
    return Linears(found, switches)


@dataclass
class Plan:
    """What was decided for one module, whose class must stay what it was."""

    module: Any

    def __post_init__(self) -> None:
        self.kind = type(self.module)

    @property
    def same_class(self) -> bool:
        return type(self.module) is self.kind


# ---- attention -------------------------------------------------------------------------------------------------------
@dataclass
class AttentionPlan(Plan):
    heads: Heads
    qkv: Any = None  # Linears, or None where they are not ours
    o: Any = None
    rope: bool = True
    backends: tuple[str, ...] | None = None
    head_norms: Any = None
    loader: Loader = field(default_factory=Loader)

    @property
    def groups(self) -> list[Projection]:
        return [g for part in (self.qkv, self.o) if part is not None for g in part.groups]

    def ready(self) -> bool:
        parts = [p for p in (self.qkv, self.o) if p is not None]
        return self.same_class and self._norms_as_planned() and all(p.ready() for p in parts)

    def _norms_as_planned(self) -> bool:
        if self.head_norms is None:
            return True
        here = self.module._modules
        ours = zip(("q_norm", "k_norm"), self.head_norms, strict=True)
        return all(
            here[n] is m and is_unchanged_norm(m, self.heads.norm_eps) and not m.weight.requires_grad for n, m in ours
        )


def head_layout(attention: Any) -> tuple[Heads, tuple[Any, Any] | None]:
    """Sizes from the projections themselves, and Qwen3's head norms where there are."""
    size, groups = attention.head_dim, attention.num_key_value_groups
    norms, eps = None, None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm, attention.k_norm)
        wanted = [norm_of(n) for n in norms]
        if wanted[0] != wanted[1] or wanted[0].offset or any(n.weight.requires_grad for n in norms):
            raise NotFused("its head norms are trained or differ")
        eps = wanted[0].eps
    n_q = attention.config.num_attention_heads
    return Heads(n_q, n_q // groups, size, True, eps), norms


def attention_plan(attention: Any, path: str, switches: Switches) -> tuple[AttentionPlan, dict[str, str]]:
    """(plan, parts left alone with the reason)."""
    if type(attention).__name__ not in ATTENTION:
        raise NotFused(f"{type(attention).__name__} is not a known attention")
    check_class(attention)
    heads, norms = head_layout(attention)
    own_rope = is_library_function(sys.modules[type(attention).__module__].apply_rotary_pos_emb, "transformers")
    rope = switches.rope and own_rope
    plan = AttentionPlan(attention, heads, rope=rope, backends=switches.sdpa_backends, head_norms=norms)
    names = {"qkv": ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"], "o": ["o_proj"]}
    left = {} if own_rope or not switches.rope else {"rope": "apply_rotary_pos_emb was replaced"}
    for part in ("qkv", "o"):
        if not getattr(switches, part):
            continue
        try:
            setattr(plan, part, linears(attention, path, names[part], switches))
        except NotFused as reason:
            left[part] = str(reason)
    if norms is not None and not (rope and plan.qkv):
        plan.head_norms = None  # they run as modules then
    return plan, left


def query_key_value(
    plan: AttentionPlan, x, position_embeddings, norm=None, norm_weight=None, pass_through=False, spare=0
) -> Any:
    """q, k, v as (B, H, S, D), rotated; with pass_through also x."""
    fused = plan.head_norms is not None
    heads = plan.heads if fused else Heads(plan.heads.n_q, plan.heads.n_k, plan.heads.size, plan.rope)
    split_norms = hasattr(plan.module, "q_norm") and not fused
    if split_norms:
        heads = Heads(heads.n_q, heads.n_k, heads.size, False)
    cos, sin = position_embeddings
    weights = tuple(n.weight for n in plan.head_norms) if fused else (None, None)
    out = project(
        x, plan.qkv.groups, norm=norm, norm_weight=norm_weight, heads=heads, cos=cos, sin=sin, head_norms=weights,
        pass_through=pass_through, spare=spare,
    )  # fmt: skip
    q, k, v = out[:3]
    if split_norms:
        q, k = plan.module.q_norm(q), plan.module.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not heads.rotate:
        q, k = rotate(plan, q, k, cos, sin)
    return (q, k, v, out[3]) if pass_through else (q, k, v)


def rotate(plan: AttentionPlan, q, k, cos, sin):
    if plan.rope:
        return rope(q, k, cos, sin)
    return sys.modules[type(plan.module).__module__].apply_rotary_pos_emb(q, k, cos, sin)


def plain_query_key_value(plan: AttentionPlan, x, position_embeddings):
    """The same through the model's own modules."""
    a, h = plan.module, plan.heads
    parts = a.qkv_proj(x).split(h.widths, -1) if hasattr(a, "qkv_proj") else (a.q_proj(x), a.k_proj(x), a.v_proj(x))
    q, k, v = (t.unflatten(-1, (-1, h.size)) for t in parts)
    if hasattr(a, "q_norm"):
        q, k = a.q_norm(q), a.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return *rotate(plan, q, k, *position_embeddings), v


def attend(plan: AttentionPlan, q, k, v, mask, past_key_values, **kwargs):
    """transformers' attention interface, called as the model's own attention calls it."""
    a = plan.module
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, a.layer_idx)
    home = sys.modules[type(a).__module__]
    name = a.config._attn_implementation
    interface = home.ALL_ATTENTION_FUNCTIONS.get_interface(name, home.eager_attention_forward)
    window, softcap = ATTENTION[type(a).__name__]
    if window != "none":
        kwargs["sliding_window"] = getattr(a.config if window == "config" else a, "sliding_window", None)
    if softcap:
        kwargs["softcap"] = a.attn_logit_softcapping
    dropout = a.attention_dropout if a.training else 0.0
    pinned = plan.backends if name == "sdpa" and mask is None else None
    with _backends(pinned):
        return interface(a, q, k, v, mask, dropout=dropout, scaling=a.scaling, **kwargs)


def _backends(names: tuple[str, ...] | None):
    if not names:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, BACKENDS[n]) for n in names], set_priority=True)


def attention_forward(
    self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
):
    """Bound to an attention instance: any of q,k,v, RoPE and o may be ours."""
    plan = self._lorakernels
    if hooked_globally() or not plan.ready():
        return type(self).forward(
            self, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
            past_key_values=past_key_values, **kwargs,
        )  # fmt: skip
    with with_loaded_adapters(plan.groups, plan.loader, hidden_states):
        make = query_key_value if plan.qkv is not None else plain_query_key_value
        q, k, v = make(plan, hidden_states, position_embeddings)
        out, weights = attend(plan, q, k, v, attention_mask, past_key_values, **kwargs)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        if plan.o is not None:
            return project(out, plan.o.groups).to(hidden_states.dtype), weights
        return self.o_proj(out.contiguous()), weights


# ---- MLP and norm ----------------------------------------------------------------------------------------------------
@dataclass
class MLPPlan(Plan):
    gate_up: Linears
    down: Linears
    act: str
    function: Any
    loader: Loader = field(default_factory=Loader)

    @property
    def groups(self) -> list[Projection]:
        return [*self.gate_up.groups, *self.down.groups]

    def ready(self) -> bool:
        function = _activation(self.module)
        same = function is self.function and (not isinstance(function, nn.Module) or is_unhooked(function))
        return same and self.same_class and self.gate_up.ready() and self.down.ready()


def _activation(mlp: Any) -> Any:
    return getattr(mlp, "act_fn", None) or mlp.activation_fn


def mlp_plan(mlp: Any, path: str, switches: Switches) -> MLPPlan:
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


def mlp_forward(self, *args, **kwargs):
    (x,) = (*args, *kwargs.values())  # the families call their one argument differently
    plan = self._lorakernels
    if hooked_globally() or not plan.ready():
        return type(self).forward(self, x)
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return gated_mlp(x, plan.gate_up.groups, plan.down.groups[0], plan.act).to(x.dtype)


def norm_forward(self, *args, **kwargs):
    (x,) = (*args, *kwargs.values())
    norm = self._lorakernels
    if hooked_globally() or type(self).__name__ not in NORMS:
        return type(self).forward(self, x)
    y = rms_norm(x, self.weight, eps_of(self), norm.offset)
    # A float32 weight on a low-precision stream gives float32 in Llama's norm and the stream's dtype in Gemma's.
    return y if norm.offset else y.to(torch.promote_types(x.dtype, self.weight.dtype))


# ---- the whole decoder layer -----------------------------------------------------------------------------------------
@dataclass
class LayerPlan(Plan):
    attention: AttentionPlan
    norms: dict[str, tuple[Any, Norm]]
    mlp: MLPPlan | None
    positional: list[str] = field(default_factory=list)
    own_checkpointing: bool = False
    drops: dict[str, Any] = field(default_factory=dict)  # Phi-3's dropout of the residual, which must be none
    loader: Loader = field(default_factory=Loader)

    def ready(self) -> bool:
        here = self.module._modules
        same = here["self_attn"] is self.attention.module and is_unhooked(here["self_attn"]) and self.same_class
        if self.drops:
            same = same and all(here[n] is m and is_inactive_dropout(m) for n, m in self.drops.items())
        if self.mlp is not None:
            same = same and here["mlp"] is self.mlp.module and is_unhooked(here["mlp"])
        norms = all(here[n] is m and is_unchanged_norm(m, norm.eps) for n, (m, norm) in self.norms.items())
        return same and norms and self.attention.ready() and (self.mlp is None or self.mlp.ready())

    @property
    def groups(self) -> list[Projection]:
        return self.attention.groups + (self.mlp.groups if self.mlp else [])

    def norm(self, name: str) -> dict:
        module, norm = self.norms[name]
        return {"norm": norm, "norm_weight": module.weight}


def layer_plan(layer: Any, attention: AttentionPlan, mlp: MLPPlan | None) -> LayerPlan:
    names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms = {n: (getattr(layer, n), norm_of(getattr(layer, n))) for n in names if hasattr(layer, n)}
    if not {"input_layernorm", "post_attention_layernorm"} <= set(norms) or len(norms) == 3:
        raise NotFused(f"{type(layer).__name__} has other norms than a known layer")
    check_class(layer, "DecoderLayer")
    drops = {n: m for n, m in layer.named_children() if n in ("resid_attn_dropout", "resid_mlp_dropout")}
    if busy := [n for n, m in drops.items() if not is_inactive_dropout(m)]:
        raise NotFused(f"it drops out its residual, or has hooks there ({busy[0]})")
    known = {"self_attn", "mlp", *drops, *names}
    if other := {n for n, _ in layer.named_children()} - known:
        raise NotFused(f"{type(layer).__name__} has parts of its own: {sorted(other)}")
    signature = inspect.signature(inspect.unwrap(type(layer).forward))
    positional = list(signature.parameters)[2:]
    # transformers checkpoints in __call__ (then our forward is inside already) or, later, in the class's forward.
    outside = any("__call__" in c.__dict__ for c in type(layer).__mro__ if c is not nn.Module)
    return LayerPlan(layer, attention, norms, mlp, positional, not outside, drops)


def layer_forward(self, hidden_states, *args, **kwargs):
    """Bound to a decoder layer instance."""
    plan: LayerPlan = self._lorakernels
    kwargs.update(zip(plan.positional, args, strict=False))
    asked = kwargs.get("output_attentions", False) or getattr(plan.attention.module.config, "output_attentions", False)
    if asked or hooked_globally() or not plan.ready() or kwargs.get("position_embeddings") is None:
        return type(self).forward(self, hidden_states, **kwargs)
    if plan.own_checkpointing and self.training and getattr(self, "gradient_checkpointing", False):
        # A cache would be updated a second time by the recomputation.
        kwargs.update({k: v for k, v in (("use_cache", False), ("past_key_values", None)) if k in kwargs})
        return self._gradient_checkpointing_func(partial(_layer, plan, **kwargs), hidden_states)
    return _layer(plan, hidden_states, **kwargs)


def _layer(plan: LayerPlan, x, *args, **kwargs):
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return _fused_layer(plan, x, *args, **kwargs)


def _fused_layer(plan: LayerPlan, x, attention_mask=None, position_embeddings=None, past_key_values=None, **kwargs):
    sandwich = "pre_feedforward_layernorm" in plan.norms
    spare = plan.mlp.down.groups[0].p if plan.mlp else 0  # x is another layer's down projection, of the same rank
    q, k, v, x = query_key_value(
        plan.attention, x, position_embeddings, **plan.norm("input_layernorm"), pass_through=True, spare=spare
    )
    out, _ = attend(plan.attention, q, k, v, attention_mask, past_key_values, **kwargs)
    out = out.reshape(*x.shape[:-1], -1)
    out = project(out, plan.attention.o.groups)
    if sandwich:
        module, norm = plan.norms["post_attention_layernorm"]
        out = rms_norm(out, module.weight, norm.eps, norm.offset)
    before = plan.norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
    if plan.mlp is None:
        y, x = rms_norm(out, before["norm_weight"], before["norm"].eps, before["norm"].offset, residual=x)
        return x + plan.module.mlp(y)
    mlp = partial(gated_mlp, out, plan.mlp.gate_up.groups, plan.mlp.down.groups[0], plan.mlp.act, residual=x, **before)
    if not sandwich:
        return mlp(add=True)
    y, x = mlp(pass_through=True)
    module, norm = plan.norms["post_feedforward_layernorm"]
    return x + rms_norm(y, module.weight, norm.eps, norm.offset)
