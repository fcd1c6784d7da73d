"""Attention on our kernels: any of q, k, v with LoRA, RoPE and o. What lies between is always transformers' own
attention interface, with the model's implementation, mask, sliding window and soft cap.

Shapes: hidden states (B, S, K); q, k, v (B, H, S, D) where attention reads them; cos, sin (B or 1, S, ≤ D).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..nodes.heads import Heads
from ..nodes.operand import with_loaded_adapters
from ..nodes.projection import Projection
from ..nodes.projection_node import project
from ..ops.adapter import Loader
from ..ops.rms_norm import Norm
from ..ops.rope import rope
from .attention_form import CACHES, HALF, KERNEL, NONE, AttentionForm, attention_form, scaled_query, twice
from .forwards import unless
from .module_checks import GLOBAL_HOOKS, NotFused, check_library, hooked_globally
from .norms import NormModule, norm_module
from .plans import Linears, Plan, Switches, linears
from .proofs import Proofs, own_forward, parameters_of

BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


@dataclass
class AttentionPlan(Plan):
    """qkv, o: None where they are not ours; form: what the class was proved to compute; function: its own forward;
    rope: whether our kernel rotates; head_norms: of q and k (Qwen3's), where they are part of our node; backends: of
    SDPA, to pin; positional: what the class calls its arguments, in their order."""

    read: ClassVar[tuple[str, ...]] = ("scaling", "attention_dropout", "attn_logit_softcapping")
    heads: Heads
    form: AttentionForm
    function: Any
    qkv: Linears | None = None
    o: Linears | None = None
    rope: bool = True
    backends: tuple[str, ...] | None = None
    head_norms: tuple[NormModule, NormModule] | None = None
    positional: list[str] = field(default_factory=list)
    loader: Loader = field(default_factory=Loader)

    @property
    def names(self) -> dict[str, Any]:
        """What the class's own forward finds under global names."""
        return self.function.__globals__

    @property
    def groups(self) -> list[Projection]:
        """Of q, k, v and of o, where they are ours."""
        return [g for part in (self.qkv, self.o) if part is not None for g in part.groups]

    def what_changed(self) -> str | None:
        """The reason, in words, if not everything is as planned."""
        if not (self.same_class and self._norms_as_planned()):
            return "attention's class or head norms were changed, trained or hooked into"
        changed = None if self.qkv is None else self.qkv.what_changed()
        return changed or (None if self.o is None else self.o.what_changed())

    def _norms_as_planned(self) -> bool:
        if self.head_norms is None:
            return True
        here = self.module._modules
        ours = zip(("q_norm", "k_norm"), self.head_norms, strict=True)
        return all(here[n] is m.module and m.is_unchanged() and not m.module.weight.requires_grad for n, m in ours)


def head_layout(attention: Any, proofs: Proofs) -> tuple[Heads, tuple[NormModule, NormModule] | None]:
    """Sizes from the projections themselves, and Qwen3's head norms where our node can make them: of one head each,
    frozen and alike; any others run as the modules that they are."""
    size, groups = attention.head_dim, attention.num_key_value_groups
    n_q = attention.config.num_attention_heads
    plain = Heads(n_q, n_q // groups, size)
    if "q_norm" not in attention._modules:
        return plain, None
    try:
        norms = norm_module(attention.q_norm, proofs), norm_module(attention.k_norm, proofs)
    except NotFused:
        return plain, None
    same = norms[0].norm == norms[1].norm and not norms[0].norm.offset
    if not same or any(n.module.weight.requires_grad or n.module.weight.numel() != size for n in norms):
        return plain, None
    return Heads(n_q, n_q // groups, size, True, norms[0].norm.eps), norms


def attention_plan(
    attention: Any, path: str, switches: Switches, proofs: Proofs, widths: frozenset[int]
) -> tuple[AttentionPlan, dict[str, str]]:
    """(plan, parts left alone with the reason) of an attention module, whose path this is. widths: of the model's cos
    and sin. Raises NotFused with the reason where nothing of it can be ours."""
    check_library(attention)
    form = attention_form(attention, proofs, widths)
    heads, norms = head_layout(attention, proofs)
    rotates = form.rotation in (KERNEL, HALF)
    if not rotates:
        heads, norms = Heads(heads.n_q, heads.n_k, heads.size, False), None
    rope = switches.rope and rotates
    plan = AttentionPlan(
        attention, heads, form, own_forward(attention), rope=rope, backends=switches.sdpa_backends, head_norms=norms,
        positional=[p.name for p in parameters_of(type(attention).forward)],
    )  # fmt: skip
    names = {"qkv": ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"], "o": ["o_proj"]}
    left = {}
    if switches.rope and form.rotation not in (KERNEL, HALF, NONE):
        left["rope"] = form.rotation
    for part in ("qkv", "o"):
        if not getattr(switches, part):
            continue
        try:
            setattr(
                plan, part, linears(attention, path, names[part], switches, switches.fp8 and switches.fp8_attention)
            )
        except NotFused as reason:
            left[part] = str(reason)
    if norms is not None and not (rope and plan.qkv):
        plan.head_norms = None  # they run as modules then
    return plan, left


def query_key_value(
    plan: AttentionPlan, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *,
    norm: Norm | None = None, norm_weight: torch.Tensor | None = None, pass_through: bool = False, spare: int = 0,
) -> Any:  # fmt: skip
    """q, k, v as (B, H, S, D), rotated, of x (B, S, K); with pass_through also x. position_embeddings: (cos, sin);
    norm, norm_weight (K,), spare: as in `project`."""
    assert plan.qkv is not None
    norms = plan.head_norms
    heads = plan.heads if norms is not None else Heads(plan.heads.n_q, plan.heads.n_k, plan.heads.size, plan.rope)
    split_norms = "q_norm" in plan.module._modules and norms is None
    if split_norms or not plan.rope:
        heads = Heads(heads.n_q, heads.n_k, heads.size, False)
    cos, sin = cos_sin(plan, position_embeddings)
    weights = (None, None) if norms is None else (norms[0].module.weight, norms[1].module.weight)
    out = project(
        x, plan.qkv.groups, norm=norm, norm_weight=norm_weight, heads=heads, cos=cos, sin=sin, head_norms=weights,
        pass_through=pass_through, spare=spare,
    )  # fmt: skip
    q, k, v = out[:3]
    if split_norms:
        q, k = normed(plan, q, k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not heads.rotate:
        q, k = rotate(plan, q, k, cos, sin)
    return (q, k, v, out[3]) if pass_through else (q, k, v)


def cos_sin(plan: AttentionPlan, position_embeddings: Any) -> tuple[Any, Any]:
    """cos and sin as `rotate` wants them, of those that the model hands over; None where nothing is rotated."""
    if plan.form.rotation == NONE:
        return None, None
    cos, sin = position_embeddings
    return (twice(cos), twice(sin)) if plan.rope and plan.form.rotation == HALF else (cos, sin)


def normed(plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, (B, S, H, D) each, through the model's own norms, of a head or of all heads side by side."""
    a = plan.module
    if not plan.form.wide_norms:
        return a.q_norm(q), a.k_norm(k)
    return a.q_norm(q.flatten(2)).view(q.shape), a.k_norm(k.flatten(2)).view(k.shape)


def rotate(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, (B, H, S, D) each, rotated by our kernel or, where that is not wanted, by the model's own function; left
    as they are where the model leaves them."""
    if plan.form.rotation == NONE:
        return q, k
    if plan.rope:
        return rope(q, k, cos, sin)
    return plan.names["apply_rotary_pos_emb"](q, k, cos, sin)


def plain_query_key_value(
    plan: AttentionPlan, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as (B, H, S, D), rotated, of x (B, S, K), through the model's own modules."""
    a, h = plan.module, plan.heads
    parts = a.qkv_proj(x).split(h.widths, -1) if hasattr(a, "qkv_proj") else (a.q_proj(x), a.k_proj(x), a.v_proj(x))
    q, k, v = (t.unflatten(-1, (-1, h.size)) for t in parts)
    if "q_norm" in a._modules:
        q, k = normed(plan, q, k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return *rotate(plan, q, k, *cos_sin(plan, position_embeddings)), v


def attend(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface, called as the model's own attention calls it, on q, k, v (B, H, S, D):
    (output (B, S, H, D), attention's weights or None). mask, kwargs: as the model got them, its cache among them."""
    a = plan.module
    cache = next((c for c in [kwargs.pop(name, None) for name in CACHES] if c is not None), None)
    if plan.form.scales_query:
        q = scaled_query(plan.names, a.config, q, kwargs["position_ids"])
    if cache is not None:
        k, v = cache.update(k, v, a.layer_idx, **({"kwargs": kwargs} if plan.form.tells_cache else {}))
    name = a.config._attn_implementation
    interface = plan.names["ALL_ATTENTION_FUNCTIONS"].get_interface(name, plan.names["eager_attention_forward"])
    for argument, of_config, attribute in plan.form.arguments:
        kwargs[argument] = getattr(a.config if of_config else a, attribute, None)
    dropout = a.attention_dropout if a.training else 0.0
    pinned = plan.backends if name == "sdpa" and mask is None else None
    with _backends(pinned):
        return interface(a, q, k, v, mask, dropout=dropout, scaling=a.scaling, **kwargs)


def _backends(names: tuple[str, ...] | None) -> contextlib.AbstractContextManager[Any]:
    if not names:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, BACKENDS[n]) for n in names], set_priority=True)


def _why_left(attention: Any, *_: Any, **__: Any) -> str | None:
    return GLOBAL_HOOKS if hooked_globally() else attention._lorakernels.what_changed()


@unless(_why_left, "attention")
def attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to an attention instance: any of q,k,v, RoPE and o may be ours. (output (B, S, K), attention's weights or
    None) of hidden_states (B, S, K)."""
    plan: AttentionPlan = self._lorakernels
    kwargs.update(zip(plan.positional, args, strict=False))
    return _attention(plan, **kwargs)


def _attention(
    plan: AttentionPlan, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    with with_loaded_adapters(plan.groups, plan.loader, hidden_states):
        make = query_key_value if plan.qkv is not None else plain_query_key_value
        q, k, v = make(plan, hidden_states, position_embeddings)
        out, weights = attend(plan, q, k, v, attention_mask, **kwargs)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        if plan.o is not None:
            return project(out, plan.o.groups).to(hidden_states.dtype), weights
        return plan.module.o_proj(out.contiguous()), weights
