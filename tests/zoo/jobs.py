"""Several jobs, and other kinds of cells."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lorabench.contract.step import Step
from zoo.cheat import Cheat, Turns


class SecondJob(Cheat):
    name = "second_job"
    summary = "of two jobs the second has no backward after the first step"
    caught = "long"
    command = ("workload=two_jobs",)

    class Wrapper(Turns):
        def backward(self, loss: Tensor) -> None:
            if not self.late:
                self.inner.backward(loss)

    def step(self, step: Step) -> Step:
        return super().step(step) if step.name == "long" else step


class WrongSignOfAnOperation(Cheat):
    name = "wrong_sign_of_an_operation"
    summary = "a single linear of more than 256 tokens has one gradient's sign wrong"
    caught = "gradient"
    kinds = ("op",)
    command = ("models=[linear-64x128]", "workload=1x300")

    class Wrapper(Turns):
        def backward(self, loss: Any) -> None:
            self.inner.backward(loss)
            weight = self.model.base_model.model.linear.lora_A["default"].weight
            if loss.shape[1] > 256:
                weight.grad = -weight.grad
