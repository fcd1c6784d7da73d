"""What a toggle of the zoo is: a cheat with what must become of it, or an honest one that must pass."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lorabench.contract.ablation import Ablation
from lorabench.contract.step import Step, Wrapped

GATE_LAYERS = 2
REFUSALS = ("wrong_numerics", "untrusted", "not_applied", "unsupported")  # a crash or a time-out has caught nobody


class Turns(Wrapped):
    """A wrapper that knows what any toggle can find out: how many steps it has taken, and whether the model is the
    full one or the gate's shallow one."""

    cheat: Any = None  # the toggle whose wrapper this is
    taken = 0

    @property
    def full(self) -> bool:
        return is_full(self.model)

    @property
    def late(self) -> bool:
        """After the full arm's first step, the one that the other arm has to agree with."""
        return self.full and self.taken > 0

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def update(self) -> None:
        self.inner.update()
        self.taken += 1


@dataclass(frozen=True, kw_only=True)
class Animal(Ablation):
    """Base of both. Subclasses have no parameters, so they need no decorator of their own."""

    name: ClassVar[str]
    slot: ClassVar[str] = "third_party"
    command: ClassVar[tuple[str, ...]] = ()  # overrides of the zoo's command line
    alone: ClassVar[bool] = False  # changes the sweep's own process: measured in a sweep of its own
    # Around the step. A plain one does nothing, but is there: a cheat is to be caught for what it does, and not because
    # none of its hooks changed anything.
    Wrapper: ClassVar[type[Turns] | None] = Turns

    def step(self, step: Step) -> Step:
        step = super().step(step)
        if self.Wrapper is None:
            return step
        wrapper = self.Wrapper(step)
        wrapper.cheat = self
        return wrapper

    def audit(self, evidence: Any) -> int:
        return 1 if evidence.patched is None else evidence.patched


@dataclass(frozen=True, kw_only=True)
class Cheat(Animal):
    """Gets a time that it has not earned. Its record must not be `ok`."""

    caught: ClassVar[str]  # what the record's reason must say, whatever the case of its letters
    status: ClassVar[tuple[str, ...]] = REFUSALS  # what the record's status may be


@dataclass(frozen=True, kw_only=True)
class Honest(Animal):
    """Looks like a cheat and is none. Its record must be `ok`."""

    pairing: ClassVar[str] = "paired"  # what the record must have
    at_most: ClassVar[float | None] = None  # the total's speed-up, for a trick that must have gained nothing


def layers(model: Any) -> Any:
    """The decoder layers of a PEFT model; none of a lone linear."""
    inner = getattr(model.base_model.model, "model", None)
    return getattr(inner, "layers", ())


def is_full(model: Any) -> bool:
    return len(layers(model)) > GATE_LAYERS


def deep(model: nn.Module, part: str = "") -> list[nn.Parameter]:
    """The trained tensors below the depth of the gate's model."""
    return [
        p
        for i, layer in enumerate(layers(model))
        for n, p in layer.named_parameters()
        if i >= GATE_LAYERS and p.requires_grad and part in n
    ]


def others(model: nn.Module) -> list[Any]:
    """The full models of this process that are not one's own: the reference's."""
    return [m for m in gc.get_objects() if type(m) is type(model) and m is not model and is_full(m)]


def called_by(name: str) -> bool:
    """Whether a function of this name is among those that wait for the caller."""
    return _waiting(name) is not None


def local(function: str, name: str) -> Any:
    """What a local variable is in the next function of that name that waits for the caller."""
    return _waiting(function).f_locals[name]


def _waiting(name: str) -> Any:
    frame: Any = sys._getframe()
    while frame and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame


def same(loss: Tensor) -> Tensor:
    """A loss of this value without a graph behind it."""
    return loss.detach().clone()
