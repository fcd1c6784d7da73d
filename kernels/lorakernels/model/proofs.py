"""Proofs: a module's own forward and backward, in float32 on a CPU, beside what our operation makes of the same input.

What is tried is a double of the module: its class, its attributes and its activation, with small random linears and
norms in the place of its own. So a proof costs the same for a model of any size, dtype, device or quantization, and
neither the model nor torch's random state is touched. Run: python -m pytest tests/lorakernels/test_proofs.py
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .module_checks import NotFused

ROWS = 5  # of a trial's input
NARROW = 8  # the hidden size of a double, where nothing of the module depends on it
TOLERANCE = 1e-4  # of the largest entry: float32 sums in another order are below it, another formula is not
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Proofs:
    """What one `apply` has proved: modules of a class with the same attributes are tried once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def of(self, key: Hashable, trial: Callable[[], Any]) -> Any:
        """What the trial returned for this key, or returns now. Raises NotFused with the trial's reason."""
        if key not in self._known:
            try:
                with quiet():
                    self._known[key] = trial()
            except NotFused as reason:
                self._known[key] = reason
        found = self._known[key]
        if isinstance(found, NotFused):
            raise NotFused(str(found))
        return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, everything is on the CPU and gradients are recorded in float32; when it ends, torch's random state is
    what it was."""
    with (
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.default_generator.manual_seed(0)
        yield


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in float32, with a gradient to come."""
    return (torch.randn(*shape, dtype=torch.float32) * scale).requires_grad_()


def small_linear(k: int, n: int, bias: bool) -> nn.Linear:
    """A linear of random weights (n, k), and of a random bias (n,) where one is wanted."""
    made = nn.Linear(k, n, bias=bias, dtype=torch.float32)
    with torch.no_grad():
        made.weight.normal_(0, k**-0.5)
        if bias:
            made.bias.normal_()
    return made


def double(module: nn.Module, children: dict[str, Any], **attributes: Any) -> Any:
    """A module of the same class and attributes, without hooks: the children of these names are others, its 1-D
    parameters are random."""
    other = object.__new__(type(module))
    state = {**module.__dict__, **{name: OrderedDict() for name in HOOKS}, "training": True}
    state["_modules"] = {name: children.get(name, child) for name, child in module._modules.items()}
    state["_parameters"] = {
        name: None if p is None else nn.Parameter(draw(*p.shape).detach()) for name, p in module._parameters.items()
    }
    other.__dict__.update(state)
    other.__dict__.update(attributes)
    return other


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class without decorators, as a function of a double."""
    return inspect.unwrap(type(module).forward)


def tried(what: nn.Module, function: Callable[[], Any]) -> Any:
    """What the function returns. Raises NotFused with its error where it raises one."""
    try:
        return function()
    except NotFused:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        raise NotFused(f"{type(what).__name__} could not be tried: {type(error).__name__}: {words}") from error


def gradients(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the sources' gradients of a sum over it that weighs every entry differently."""
    weights = torch.linspace(-1, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), list(sources), allow_unused=True)
    return [out, *(torch.zeros_like(s) if g is None else g for g, s in zip(found, sources, strict=True))]


def alike(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether all of these are equal but for rounding."""
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp_min(1e-6))
        for a, b in zip(got, wanted, strict=True)
    )


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a module's forward, without `self`."""
    return list(inspect.signature(inspect.unwrap(function)).parameters.values())[1:]


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether a module's forward takes its input and nothing else."""
    found = parameters_of(type(module).forward)
    return len(found) == 1 and found[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """The numbers, words and None among a module's attributes, which tell its instances apart; not which layer it
    is."""
    kinds = (bool, int, float, str, type(None))
    return tuple((n, v) for n, v in module.__dict__.items() if type(v) in kinds and n not in ("layer_idx", "training"))


def attention_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) of q (B, H, S, D) and k, v (B, Hk, S, D), in a trial that asks for what comes before and behind."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
