"""A gated MLP on our kernels, down(act(gate(x)) · up(x)), whatever its class and its linears are called: how it is
found and proved, its plan, and the forward that `apply` binds to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import nn

from ..nodes.mlp_node import gated_mlp
from ..nodes.operand import with_loaded_adapters
from ..nodes.projection import Projection
from ..ops.adapter import Loader
from ..ops.glu import ACTIVATIONS, activation
from .forwards import unless
from .lora_modules import base_linear
from .module_checks import GLOBAL_HOOKS, NotFused, activation_of, check_library, hooked_globally, is_unhooked
from .plans import Linears, Plan, Switches, linears
from .proofs import (
    NARROW,
    Proofs,
    alike,
    double,
    draw,
    gradients,
    own_forward,
    plain_attributes,
    small_linear,
    takes_one_tensor,
    tried,
)

EMPTY = "an MLP was called with no rows"


@dataclass
class MLPPlan(Plan):
    """act: a key of ACTIVATIONS; function: the model's own under function_name, which must stay the one that was asked;
    None where the class itself calls torch's."""

    gate_up: Linears
    down: Linears
    act: str
    function_name: str | None
    function: Any
    loader: Loader = field(default_factory=Loader)

    @property
    def groups(self) -> list[Projection]:
        """Of gate and up, and of down."""
        return [*self.gate_up.groups, *self.down.groups]

    def what_changed(self) -> str | None:
        """The reason, in words, if not everything is as planned."""
        function = None if self.function_name is None else _attribute(self.module, self.function_name)
        same = function is self.function and (not isinstance(function, nn.Module) or is_unhooked(function))
        if not (same and self.same_class):
            return "an MLP's class or activation was changed, or hooked into"
        return self.gate_up.what_changed() or self.down.what_changed()


def _attribute(module: Any, name: str) -> Any:
    return module._modules[name] if name in module._modules else module.__dict__.get(name)


def _functions(module: Any) -> list[str]:
    """The names of what a module may apply besides its linears: modules without parameters, and plain functions."""
    inside = [n for n, m in module._modules.items() if m is not None and base_linear(m) is None]
    return inside + [n for n, value in module.__dict__.items() if n[0] != "_" and callable(value)]


def _orders(module: Any) -> Iterator[tuple[list[str], str]]:
    """Which linears may be gate and up (or both in one), and which down, going by their shapes."""
    sizes = {n: (b.in_features, b.out_features) for n, m in module._modules.items() if (b := base_linear(m))}
    if len(sizes) == 3:
        for gate, up, down in permutations(sizes):
            if sizes[gate] == sizes[up] == sizes[down][::-1]:
                yield [gate, up], down
    elif len(sizes) == 2:
        for both, down in permutations(sizes):
            if sizes[both] == (sizes[down][1], 2 * sizes[down][0]):
                yield [both], down


def looks_like_mlp(module: Any) -> bool:
    """Whether a module's linears have the shapes of a gated MLP's, and it has nothing with parameters besides."""
    if module._parameters or module._buffers or not 2 <= len(module._modules) <= 4:
        return False
    return next(_orders(module), None) is not None and len(_functions(module)) <= 1


def mlp_plan(mlp: Any, path: str, switches: Switches, proofs: Proofs) -> MLPPlan:
    """Of a module that may be a gated MLP, whose path this is. Raises NotFused with the reason where it is left to
    PEFT."""
    if not looks_like_mlp(mlp):
        raise NotFused(f"{type(mlp).__name__} is not a gated MLP (gate, up and down linears)")
    check_library(mlp)
    if not takes_one_tensor(mlp):
        raise NotFused(f"{type(mlp).__name__} takes more than its input")
    name = next(iter(_functions(mlp)), None)
    function = None if name is None else _attribute(mlp, name)
    if isinstance(function, nn.Module) and not is_unhooked(function):
        raise NotFused("its activation has hooks or a replaced forward")
    acts = tuple(ACTIVATIONS) if name is None else (activation_of(function),)
    shapes = tuple((n, b.in_features, b.out_features, b.bias is None) for n, b in _bases(mlp))
    key = (type(mlp), plain_attributes(mlp), acts, shapes)
    first, last, act = proofs.of(key, lambda: _proved(mlp, acts))
    gate_up, down = (linears(mlp, path, each, switches, switches.fp8) for each in (first, [last]))
    return MLPPlan(mlp, gate_up, down, act, name, function)


def _bases(mlp: Any) -> list[tuple[str, Any]]:
    return [(n, b) for n, m in mlp._modules.items() if (b := base_linear(m)) is not None]


def _proved(mlp: Any, acts: tuple[str, ...]) -> tuple[list[str], str, str]:
    """(names of gate and up, name of down, activation) that make an MLP's own output and gradients. Raises NotFused
    where none do. The width I is the model's, which some classes split by; the hidden size is small."""
    differs = NotFused(f"{type(mlp).__name__} computes something else than down(act(gate) * up)")
    orders = list(_orders(mlp))
    for first, last in orders:
        try:
            if act := _activation_of_order(mlp, first, last, acts):
                return first, last, act
        except NotFused as reason:  # where gate, up and down are all square, another order may still be right
            differs = reason if len(orders) <= 2 else differs
    with contextlib.suppress(NotFused):
        if any(_activation_of_order(mlp, *order, acts, training=False) for order in orders):
            differs = NotFused(f"{type(mlp).__name__} drops out in training")
    raise differs


def _activation_of_order(
    mlp: Any, first: list[str], last: str, acts: tuple[str, ...], training: bool = True
) -> str | None:
    """The activation with which linears in this order make what the MLP makes, or None. Raises NotFused where its own
    forward fails."""
    bases = dict(_bases(mlp))
    width = bases[last].in_features
    made = {name: small_linear(NARROW, width * (3 - len(first)), bases[name].bias is not None) for name in first}
    made[last] = small_linear(width, NARROW, bases[last].bias is not None)
    other, x = double(mlp, made, training=training), draw(2, 3, NARROW, scale=2.0)
    sources = [x, *(made[name].weight for name in (*first, last))]
    wanted = tried(mlp, lambda: gradients(own_forward(mlp)(other, x), sources))
    for act in acts:
        gate, up = made[first[0]](x).chunk(2, -1) if len(first) == 1 else (made[name](x) for name in first)
        if alike(gradients(made[last](activation(gate, act) * up), sources), wanted):
            return act
    return None


def _why_left(mlp: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> str | None:
    (x,) = (*args, *kwargs.values())  # the families call their one argument differently
    if x.numel() == 0:  # an expert that no token chose
        return EMPTY
    return GLOBAL_HOOKS if hooked_globally() else mlp._lorakernels.what_changed()


@unless(_why_left, "mlp", expected=EMPTY)
def mlp_forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Bound to an MLP instance: (…, K) of its one argument (…, K)."""
    (x,) = (*args, *kwargs.values())
    plan: MLPPlan = self._lorakernels
    with with_loaded_adapters(plan.groups, plan.loader, x):
        return gated_mlp(x, plan.gate_up.groups, plan.down.groups[0], plan.act).to(x.dtype)
