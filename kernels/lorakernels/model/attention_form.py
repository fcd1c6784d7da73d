"""What an attention of the model computes before and behind transformers' attention interface, found by trying it.

The class's own forward runs on a double, with a recorder in the place of the interface: q, k and v as they arrive there
and every argument that comes with them are compared with what the known forms make. Only a copy of the function sees
the recorder; the class, its module and the model do not. Run: python -m pytest tests/lorakernels/test_proofs.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any

import torch

from ..ops.rope import rope
from .lora_modules import base_linear
from .module_checks import NotFused, is_library_function
from .proofs import (
    NARROW,
    ROWS,
    Proofs,
    alike,
    attention_of,
    double,
    draw,
    gradients,
    own_forward,
    parameters_of,
    plain_attributes,
    small_linear,
    tried,
)

KERNEL, HALF, NONE = "kernel", "half", "none"
OWN = "its rotary embedding is not of two halves, or was replaced: the model's own function runs"
CACHES = ("past_key_values", "cache")  # what transformers calls a forward's cache before 5.24, and since
ARGUMENTS = [["hidden_states", "position_embeddings", "attention_mask", name] for name in CACHES]
POSITIONS = "position_ids"  # of a few attentions, which have a name for them, before the cache
QUERY_SCALE = "get_llama_4_attn_scale"  # transformers' function of positions, of a temperature and of a length
# What an argument of the interface is called as an attribute of the module, or else of its config, if otherwise.
ATTRIBUTES = {"softcap": "attn_logit_softcapping", "s_aux": "sinks"}


@dataclass(frozen=True)
class AttentionForm:
    """rotation: KERNEL (two halves, which our kernel rotates), HALF (the same, of cos and sin for one half), NONE, or
    the reason why the model's own function runs; wide_norms: whether q_norm and k_norm are of all heads side by side
    (OLMo-2's); arguments: what the interface gets besides dropout and scaling, as (argument, whether it is the
    config's, attribute, which may be missing and is None then); scales_query: whether q, once rotated, is multiplied by
    QUERY_SCALE of its positions (Ministral 3); tells_cache: whether the cache gets the forward's other arguments, too,
    as it does since transformers 5.24."""

    rotation: str
    wide_norms: bool
    scales_query: bool
    arguments: tuple[tuple[str, bool, str], ...]
    tells_cache: bool


def twice(table: torch.Tensor) -> torch.Tensor:
    """cos or sin (…, D) for both halves, of those for one (…, D / 2): GPT-OSS keeps them so."""
    return torch.cat((table, table), -1)


def scaled_query(names: dict[str, Any], config: Any, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """q (B, H, S, D), rotated, times the model's own QUERY_SCALE of its positions (B, S). names: the globals of the
    attention's forward."""
    rope = config.rope_parameters
    scale = names[QUERY_SCALE](
        positions, rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    )
    return q * scale.to(q.dtype)


class _Recorder:
    """In the place of transformers' table of attention functions: keeps what the interface is called with."""

    def __init__(self) -> None:
        self.q_k_v: list[torch.Tensor] = []
        self.mask: Any = None
        self.arguments: dict[str, Any] = {}

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        return self

    def __call__(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
        self.q_k_v, self.mask, self.arguments = [q, k, v], mask, arguments
        return attention_of(q, k, v).contiguous(), None


class _Cache:
    """In the place of a cache: what it gives back is not what it got, so it must be asked at the same place."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, **arguments: Any) -> tuple[Any, Any]:
        self.arguments = arguments
        return 2 * k, v + layer


class _Globals(dict):
    """A function's globals with other things under some names; whatever is not here is looked up where it was."""

    def __init__(self, own: dict[str, Any], **others: Any):
        super().__init__(others)
        self.own = own

    def __missing__(self, name: str) -> Any:
        return self.own[name]


def with_globals(function: FunctionType, **others: Any) -> FunctionType:
    """A copy of a function that finds other things under some global names."""
    names = _Globals(function.__globals__, **others)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def looks_like_attention(module: Any) -> bool:
    """Whether a module has the linears and the attributes of transformers' attentions."""
    linears = {n for n, m in module._modules.items() if base_linear(m) is not None}
    known = linears in ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
    return known and all(hasattr(module, n) for n in ("head_dim", "num_key_value_groups", "scaling", "config"))


def attention_form(attention: Any, proofs: Proofs, widths: frozenset[int]) -> AttentionForm:
    """The form that an attention was proved to have. widths: of the cos and sin that the model may hand to it. Raises
    NotFused with the reason where it is none that is known."""
    name, config = type(attention).__name__, attention.config
    if other := set(attention._modules) - {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}:
        raise NotFused(f"{name} has parts of its own: {sorted(other)}")
    if [p.name for p in parameters_of(type(attention).forward) if p.name != POSITIONS][:4] not in ARGUMENTS:
        raise NotFused(f"{name} takes other arguments than {', '.join(ARGUMENTS[-1])}")
    if not isinstance(function := own_forward(attention), FunctionType) or "ALL_ATTENTION_FUNCTIONS" not in (
        function.__code__.co_names
    ):
        raise NotFused(f"{name} does not ask transformers' attention interface")
    of_layer = tuple((n, repr(v[attention.layer_idx])) for n, v in vars(config).items() if _is_per_layer(v, attention))
    biases = tuple((n, b.bias is None) for n, m in attention._modules.items() if (b := base_linear(m)) is not None)
    rotary = function.__globals__.get("apply_rotary_pos_emb")
    key = (type(attention), id(config), plain_attributes(attention), of_layer, biases, widths, id(rotary))
    return proofs.of(key, lambda: _form(attention, function, rotary, widths))


def cache_name(module: Any) -> str:
    """What the forward of a module's class calls its cache."""
    names = {p.name for p in parameters_of(type(module).forward)}
    return next((name for name in CACHES if name in names), CACHES[-1])


def _is_per_layer(value: Any, attention: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > attention.layer_idx


def _form(attention: Any, function: FunctionType, rotary: Any, widths: frozenset[int]) -> AttentionForm:
    reason = NotFused(f"{type(attention).__name__} was tried with no width of cos and sin")
    found: set[AttentionForm] = set()
    for width in sorted({attention.head_dim, *widths}):
        try:
            found.add(_Trial(attention, function, rotary, width).form())
        except NotFused as error:
            reason = error
    if len(found) != 1:
        raise reason
    return found.pop()


class _Trial:
    """An attention's double and its input, for cos and sin of one width."""

    def __init__(self, attention: Any, function: FunctionType, rotary: Any, width: int):
        self.attention, self.rotary, self.size = attention, rotary, attention.head_dim
        made = {}
        for name, child in attention._modules.items():
            base = base_linear(child)
            if base is None:
                made[name] = double(child, {})
            else:
                k, n = (base.in_features, NARROW) if name == "o_proj" else (NARROW, base.out_features)
                made[name] = small_linear(k, n, base.bias is not None)
        self.double = double(attention, made)
        self.x, self.mask = draw(2, ROWS, NARROW), draw(2, 1, ROWS, ROWS)
        self.cos, self.sin = draw(1, ROWS, width).detach(), draw(1, ROWS, width).detach()
        rope = getattr(attention.config, "rope_parameters", None) or {}
        length = rope.get("original_max_position_embeddings") or 1  # a scale of q shows behind it
        self.positions = torch.arange(2 * ROWS).view(2, ROWS) * length
        self.sources = [self.x, *(p for m in made.values() for p in m.parameters())]
        self.recorder, self.cache = _Recorder(), _Cache()
        self.names = function.__globals__
        self.function = with_globals(function, ALL_ATTENTION_FUNCTIONS=self.recorder)

    def form(self) -> AttentionForm:
        """What its own forward does. Raises NotFused where that is nothing that is known."""
        out = tried(self.attention, self._own)
        wanted = gradients(out, self.sources)
        q_k_v = [t.detach() for t in self.recorder.q_k_v]
        arguments, tells_cache = self._arguments(), self._tells_cache()
        for (rotation, rotate), wide, scales in product(self._rotations(), (False, True), self._query_scales()):
            made = self._made(rotate, wide, scales)
            if made is None or not alike(made, q_k_v):
                continue
            out = attention_of(*made).flatten(2)
            if alike(gradients(self.double.o_proj(out), self.sources), wanted):
                return AttentionForm(rotation, wide, scales, arguments, tells_cache)
        if self.double.training and self._without_dropout():
            raise NotFused(f"{type(self.attention).__name__} drops out its output in training")
        raise NotFused(f"{type(self.attention).__name__} makes other q, k, v or outputs than a known attention")

    def _without_dropout(self) -> bool:
        self.double.training, dropout = False, self.double.attention_dropout
        self.double.attention_dropout = 0.0
        try:
            return bool(self.form())
        except NotFused:
            return False
        finally:
            self.double.training, self.double.attention_dropout = True, dropout

    def _own(self) -> torch.Tensor:
        out, _ = self.function(
            self.double, self.x, position_embeddings=(self.cos, self.sin), attention_mask=self.mask,
            position_ids=self.positions, passed_on=1, **{cache_name(self.attention): self.cache},
        )  # fmt: skip
        return out

    def _rotations(self) -> list[tuple[str, Callable[..., Any]]]:
        found: list[tuple[str, Callable[..., Any]]] = []
        if self.rotary is not None:
            if is_library_function(self.rotary, "transformers") and self.cos.shape[-1] <= self.size:
                found += [(KERNEL, rope), (HALF, lambda q, k, cos, sin: rope(q, k, twice(cos), twice(sin)))]
            found.append((OWN, self.rotary))
        return [*found, (NONE, lambda q, k, cos, sin: (q, k))]

    def _query_scales(self) -> tuple[bool, ...]:
        own = self.names.get(QUERY_SCALE)
        return (False, True) if own is not None and is_library_function(own, "transformers") else (False,)

    def _made(self, rotate: Callable[..., Any], wide: bool, scales: bool) -> list[torch.Tensor] | None:
        """q, k, v as the known attention hands them over, or None where the sizes do not fit."""
        a, size = self.double, self.size
        if "qkv_proj" in a._modules:
            n_q = a.config.num_attention_heads
            n_k = n_q // a.num_key_value_groups
            parts = a.qkv_proj(self.x).split([n_q * size, n_k * size, n_k * size], -1)
        else:
            parts = a.q_proj(self.x), a.k_proj(self.x), a.v_proj(self.x)
        try:
            q, k, v = (t.unflatten(-1, (-1, size)) for t in parts)
            if "q_norm" in a._modules:
                q, k = (
                    norm(t.flatten(2)).view(t.shape) if wide else norm(t) for norm, t in ((a.q_norm, q), (a.k_norm, k))
                )
            elif wide:
                return None
            q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), self.cos, self.sin)
            if scales:
                q = scaled_query(self.names, a.config, q, self.positions)
        except Exception:
            return None
        if q.shape[1] != a.config.num_attention_heads or q.shape[1] != k.shape[1] * a.num_key_value_groups:
            return None
        return [q, *_Cache().update(k, v.transpose(1, 2), a.layer_idx)]

    def _tells_cache(self) -> bool:
        """Whether the cache gets what the interface gets besides what the attention adds itself. Raises NotFused where
        it gets something else."""
        told = dict(self.cache.arguments)
        if not told:
            return False
        if told.keys() != {"kwargs"} or told["kwargs"].get("passed_on") != 1:
            raise NotFused(f"{type(self.attention).__name__} tells its cache {', '.join(told)}, which is not known")
        return True

    def _arguments(self) -> tuple[tuple[str, bool, str], ...]:
        """Where the interface's arguments come from. Raises NotFused where that is not to be seen."""
        given, a, name = dict(self.recorder.arguments), self.double, type(self.attention).__name__
        positions = given.pop(POSITIONS, None)
        if self.recorder.mask is not self.mask or positions is not self.positions or given.pop("passed_on", None) != 1:
            raise NotFused(f"{name} does not pass its arguments on to the attention interface")
        if given.pop("dropout", None) != a.attention_dropout or given.pop("scaling", None) != a.scaling:
            raise NotFused(f"{name} gives the attention interface another dropout or scaling")
        found = []
        for argument, value in given.items():
            attribute = ATTRIBUTES.get(argument, argument)
            owners = [owner for owner in (a, a.config) if hasattr(owner, attribute)] or [a.config]
            known = getattr(owners[0], attribute, None)
            if known is value or (not isinstance(value, torch.Tensor) and known == value):
                found.append((argument, owners[0] is a.config, attribute))
            else:
                raise NotFused(f"{name} gives the attention interface {argument}, which is not known")
        return tuple(found)
