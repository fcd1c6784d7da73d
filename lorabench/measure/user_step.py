"""A user's own training step as an arm: what `lorabench.measure` is given, in the shape that the trials know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.contract.batch import Batch
from lorabench.contract.step import Step
from lorabench.measure.judging.limits import FLOOR
from lorabench.measure.kind import Begin, Kind
from lorabench.measure.kinds.train import Train
from lorabench.record.schema import TOTAL


@dataclass(frozen=True, kw_only=True)
class Phases:
    """One optimizer step in calls that are timed apart.

    `forward` returns the loss, a tensor of one element. The rest has ordinary answers: `backward(loss)` is
    `loss.backward()`, `step()` is the optimizer's (without one there is no update), and `clear()`, which is not timed,
    drops the gradients of the optimizer or the model. The numerics gate and the memory of weights need `model`. With a
    gradient scaler, `backward` has to unscale for the gate.

    Raises ValueError for what is no function, and where nothing says how gradients are dropped.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None = None
    step: Callable[[], Any] | None = None
    clear: Callable[[], Any] | None = None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None

    def __post_init__(self) -> None:
        for call in fields(self)[:-2]:  # the last two are objects
            given = getattr(self, call.name)
            if given is not call.default and not callable(given):
                raise ValueError(f"Phases({call.name}=…) has to be a function, not {type(given).__name__}")
        if self.clear is None and self.optimizer is None and self.model is None:
            raise ValueError("Phases needs clear=, optimizer= or model=: a trial starts without gradients")


Variant = Callable[[], Any] | Phases | Step


class PhasesStep(Step):
    """Phases as the contract's Step; the batch is the user's own business."""

    def __init__(self, phases: Phases) -> None:
        optimizer: Any = phases.optimizer
        super().__init__(phases.model or nn.Module(), optimizer, [Batch({}, real=0, padded=0, trained=0)])
        self.phases = phases
        self.updates = phases.step is not None or optimizer is not None

    def clear(self) -> None:
        if self.phases.clear is not None:
            self.phases.clear()
        elif self.optimizer is not None:
            super().clear()
        else:
            self.model.zero_grad(set_to_none=True)

    def forward(self, batch: Batch) -> Tensor:
        loss = self.phases.forward()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"Phases.forward returned {_what(loss)}; expected the loss, a tensor of one element")
        return loss

    def backward(self, loss: Tensor) -> None:
        if self.phases.backward is not None:
            self.phases.backward(loss)
        else:
            super().backward(loss)

    def update(self) -> None:
        if self.phases.step is not None:
            self.phases.step()
        else:
            super().update()


class PhasedKind(Train):
    """A user's step whose forward, backward and update are timed apart, as those of a training cell are."""

    name: ClassVar[str] = "user_phases"

    def clear(self, arm: Arm) -> None:
        """As the user does it, whose step this is."""
        for step in arm.steps:
            step.clear()

    def held(self, arm: Arm) -> dict[str, int]:
        """Bytes of the model that the user named; {} where none was."""
        if not any(True for _ in arm.model.parameters()):
            return {}
        if arm.step.optimizer is not None:
            return super().held(arm)
        return arm.parameter_bytes()


@dataclass
class WholeArm(Arm):
    """An arm whose trial is one call of a user's function."""

    call: Callable[[], Any] = lambda: None


class WholeKind(Kind):
    """A user's step that is one call, clearing and update included: one phase, TOTAL."""

    name: ClassVar[str] = "user_step"
    summary: ClassVar[str] = "one call of a user's function"
    phases: ClassVar[tuple[str, ...]] = (TOTAL,)
    total: ClassVar[str] = "the whole call"

    def trial(self, arm: Arm, begin: Begin) -> Any:
        assert isinstance(arm, WholeArm)
        begin(TOTAL)
        return arm.call()

    def losses(self, arm: Arm, out: Any) -> dict[str, float]:
        return {"": loss_of(out, arm.name)}


def loss_of(out: Any, name: str) -> float:
    """The loss that a user's function returned. Raises ValueError where it is no number."""
    if (isinstance(out, Tensor) and out.numel() == 1) or (isinstance(out, (int, float)) and not isinstance(out, bool)):
        return float(out.detach() if isinstance(out, Tensor) else out)
    raise ValueError(f"the {name} returned {_what(out)}; expected its loss, a number or a tensor of one element")


def _what(out: Any) -> str:
    return f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"{type(out).__name__}"


def model_of(variant: Variant) -> nn.Module | None:
    """The model that a variant names, or None."""
    return variant.model if isinstance(variant, (Phases, Step)) else None


def arm_of(name: str, variant: Variant, device: torch.device) -> Arm:
    """The arm of a variant that `user_pair` has found to be in order."""
    model = model_of(variant) or nn.Module()
    dtype = compute_dtype(model)
    if isinstance(variant, Phases):
        return Arm(name, (), model, [PhasesStep(variant)], dtype, device, PhasedKind())
    if isinstance(variant, Step):
        return Arm(name, (), model, [variant], dtype, device, PhasedKind())
    return WholeArm(name, (), model, [], dtype, device, WholeKind(), call=variant)


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The coarsest number format among the model's parameters for which the gate knows what rounding makes; float32
    where there is none."""
    known = {p.dtype for p in model.parameters() if p.dtype in FLOOR}
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
