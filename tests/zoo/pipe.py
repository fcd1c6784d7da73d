"""Answers that the worker did not give."""

from __future__ import annotations

import gc
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from lorabench.measure.cell import ArmResult, Measurement, Result
from lorabench.measure.kind import JobCounts
from lorabench.record.schema import ARMS, Numerics
from lorabench.run import messages, worker
from lorabench.run.messages import send
from zoo.cheat import Cheat, Turns

PHASES = ("forward", "backward", "step", "total")
FORGED = ("untrusted", "crash")


def pipe() -> Connection:
    return next(o for o in gc.get_objects() if isinstance(o, Connection) and o.writable and not o.readable)


def times(ms: float, rounds: int) -> dict[str, list[float]]:
    return {phase: [ms * (3 if phase == "total" else 1)] * rounds for phase in PHASES}


class ForgedAnswer(Cheat):
    name = "forged_answer"
    summary = "in the middle of the trials sends the answer itself, thirty times as fast, and ends the process"
    caught = "answer"
    status = FORGED

    class Wrapper(Turns):
        def update(self) -> None:
            super().update()
            if self.full and self.taken == 6:
                measurement = next(o for o in gc.get_objects() if isinstance(o, Measurement))
                result, rounds = measurement.result, measurement.task.rounds
                for name, arm in result.arms.items():
                    arm.times = times(3.0 if name == "reference" else 0.1, rounds)
                send(pipe(), ("result", time.time(), result))
                os._exit(0)


class ForgedAtOnce(Cheat):
    name = "forged_at_once"
    summary = "sends an answer with everything in it before anything was measured"
    caught = "answer"
    status = FORGED

    def patch(self, model: Any) -> int:
        passed = Numerics(
            passed=True, loss_error=0.0, loss_allowed=1.0, grad_error=0.0, grad_allowed=1.0, plain_grad_error=0.0,
            worst="", tensors=42,
        )  # fmt: skip
        arms = {
            name: ArmResult(
                times=times(3.0 if name == "reference" else 0.1, 4),
                numerics={"": passed},
                applied={self.name: 21},
                jobs={"": JobCounts(32, 0, 30)},
            )
            for name in ARMS
        }
        send(pipe(), ("result", time.time(), Result(arms=arms)))
        os._exit(0)


class OnTheWay(Cheat):
    """Base: the answer is changed in the pipe, where it is bytes already."""

    caught = "answer"
    status = ("untrusted",)
    arm, factor = "candidate", 1 / 30

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if self.full and self.taken == 0:
                real = messages.send
                worker.send = lambda pipe, message: real(pipe, self.forged(message))
            return self.inner.forward(batch)

        def forged(self, message: Any) -> Any:
            if message[0] == "result":
                arm = message[2].arms[self.cheat.arm]
                arm.times = {phase: [self.cheat.factor * ms for ms in found] for phase, found in arm.times.items()}
            return message


class ForgedOnTheWay(OnTheWay):
    name = "forged_on_the_way"
    summary = "the candidate's times are divided by thirty in the pipe"
    caught = "whole process"


class ForgedReference(OnTheWay):
    name = "forged_reference"
    summary = "the reference's times are three times as long when they come out of the pipe"
    caught = "whole process"
    arm, factor = "reference", 3.0
