"""The rotary embedding of an attention that is not known otherwise: its own forward runs, with our kernel in the place
of `apply_rotary_pos_emb`.

The forward that is bound is a copy of the class's function, without its decorators, that finds our function under that
name; the class and its module stay as they are. Run: python -m pytest tests/lorakernels/test_proofs.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ..ops.rope import rope
from .attention_form import CACHES, OWN, cache_name, twice, with_globals
from .forwards import unless
from .module_checks import NotFused, check_library, is_library_function
from .plans import Plan
from .proofs import ROWS, Proofs, alike, draw, gradients, own_forward

NAME = "apply_rotary_pos_emb"
HEADS, SIZE = (4, 2), 16  # of a trial


@dataclass
class RotaryPlan(Plan):
    """function: the class's forward with our rotation in it; own: its module's, which must stay what it was; unknown:
    what the forward does not call its cache."""

    function: FunctionType
    own: Callable[..., Any]
    unknown: frozenset[str]

    def what_changed(self) -> str | None:
        """The reason, in words, if the class's own forward must run."""
        same = self.same_class and own_forward(self.module).__globals__.get(NAME) is self.own
        return None if same else f"an attention's class, or {NAME}, was changed"


def looks_like_rotary(module: Any) -> bool:
    """Whether a module's forward calls transformers' function for rotary embeddings."""
    forward = own_forward(module)
    return isinstance(forward, FunctionType) and NAME in forward.__code__.co_names and NAME in forward.__globals__


def rotary_plan(module: Any, proofs: Proofs) -> RotaryPlan:
    """Of a module that calls it. Raises NotFused with the reason where that function rotates otherwise than ours."""
    check_library(module)
    forward = own_forward(module)
    own = forward.__globals__[NAME]
    if not is_library_function(own, "transformers"):
        raise NotFused(OWN)
    halved = proofs.of((NAME, id(own)), lambda: _halved(own))
    unknown = frozenset(CACHES) - {cache_name(module)}
    return RotaryPlan(module, with_globals(forward, **{NAME: _ours(own, halved)}), own, unknown)


def _halved(own: Callable[..., Any]) -> bool:
    """Whether a function takes cos and sin for one half of a head, or for both. Raises NotFused where it rotates
    otherwise."""
    q, k = (draw(2, heads, ROWS, SIZE) for heads in HEADS)
    for width in (SIZE, SIZE // 2):
        cos, sin = draw(1, ROWS, width).detach(), draw(1, ROWS, width).detach()
        both = (cos, sin) if width == SIZE else (twice(cos), twice(sin))
        try:
            wanted = torch.cat(own(q, k, cos, sin), 1)
        except Exception:
            continue
        made = torch.cat(rope(q, k, *both), 1)
        if alike(gradients(made, (q, k)), gradients(wanted, (q, k))):
            return width != SIZE
    raise NotFused(OWN)


def _ours(own: Callable[..., Any], halved: bool) -> Callable[..., Any]:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Rotated (q, k) of q (B, H, S, D) and k (B, Hk, S, D)."""
        if args or kwargs or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or q.dtype != k.dtype:
            return own(q, k, cos, sin, *args, **kwargs)
        fits = cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2] == k.shape[2]
        if not fits or cos.shape[-1] * (2 if halved else 1) != q.shape[-1]:
            return own(q, k, cos, sin)
        return rope(q, k, twice(cos), twice(sin)) if halved else rope(q, k, cos, sin)

    return rotate


def _why_left(attention: Any, *_: Any, **kwargs: Any) -> str | None:
    # Our copy is of the forward without its decorators, and the one of transformers 5.24 renames the cache.
    if not attention._lorakernels.unknown.isdisjoint(kwargs):
        return "the cache has its name of another version of transformers"
    return attention._lorakernels.what_changed()


@unless(_why_left, "rope")
def rotary_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Bound to an attention instance: whatever its class returns."""
    plan: RotaryPlan = self._lorakernels
    return plan.function(self, *args, **kwargs)
