"""Base of the operations: what of kind `op` depends on which operation it is."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from lorabench.contract.model import ModelSpec
from lorabench.contract.step import Step
from lorabench.measure import flops
from lorabench.measure.kind import Request


class Operation:
    family: ClassVar[str]  # `model_type` of its models; their names have it before the first hyphen, or after `norm-`
    form: ClassVar[str]  # how such a model is named, with an example
    adapts: ClassVar[bool] = True  # whether there is an adapter on it

    def config(self, name: str) -> dict[str, Any] | None:
        """The configuration of the model of that name, without `model_type`; None where the name is not well formed."""
        raise NotImplementedError

    def takes(self, slot: str) -> bool:
        """Whether it has anything that a toggle of this slot could change."""
        raise NotImplementedError

    def shape(self, model: ModelSpec) -> flops.Shape:
        """What its useful work is counted from."""
        raise NotImplementedError

    def bytes_per_token(self, model: ModelSpec) -> int:
        """About what one token takes in a float32 forward and backward."""
        raise NotImplementedError

    def base(self, request: Request, load: dict[str, Any]) -> nn.Module:
        """Its module, on the device; `load` as the toggles left it."""
        raise NotImplementedError

    def configuration(self, model: ModelSpec) -> Any:
        """Its configuration, as an object."""
        raise NotImplementedError

    def step(self, request: Request, *args: Any) -> Step:
        """Of (model, optimizer, batches, job, samples) the step; its `fill(number)` puts in the data of a trial."""
        raise NotImplementedError

    def imports(self) -> None:
        """Import what it is built from, before any toggle is asked."""
