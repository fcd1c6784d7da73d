"""Answers that the worker did not give."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Made, Ready
from lorabench.measure.trial import Trial
from lorabench.record.schema import ArmMemory, Numerics
from lorabench.run import messages, worker
from lorabench.run.messages import send
from zoo.cheat import Cheat, Turns, called_by, local

FORGED = ("untrusted", "crash")
MS = 0.1


def pipe() -> Connection:
    return next(o for o in gc.get_objects() if isinstance(o, Connection) and o.writable and not o.readable)


def answer(what: Any) -> None:
    """Answer the call that the worker is at."""
    send(pipe(), ("answer", local("main", "call"), what))


def made(losses: dict[str, float]) -> list[Made]:
    """What a turn's trial comes to, in a hurry."""
    times, now = dict.fromkeys(("forward", "backward", "step"), MS / 3), time.perf_counter()
    return [Made(Trial(times, times, losses, now - MS / 1000, now), {})]


class ForgedAnswer(Cheat):
    name = "forged_answer"
    summary = "in the middle of its first turn sends the answer itself, thirty times as fast, and ends the process"
    caught = "answer | exited with code 0"
    status = FORGED

    class Wrapper(Turns):
        def update(self) -> None:
            super().update()
            if self.full and called_by("turn"):
                answer(made({"": 5.5}))
                os._exit(0)


class ForgedConversation(Cheat):
    name = "forged_conversation"
    summary = "tells of a trial that was over at once, and answers with it, before it does the work"
    caught = "answer | its evidence is none"
    status = FORGED

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if self.full and called_by("turn"):
                told = made({"": 5.5})
                send(pipe(), ("trial", time.time(), (self.cheat.name, told[0].trial.total_ms)))
                answer(told)
            return self.inner.forward(batch)


class ForgedAtOnce(Cheat):
    name = "forged_at_once"
    summary = "says that it is ready, with everything in it, before anything was measured, and ends the process"
    caught = "answer | exited with code 0"
    status = FORGED

    def patch(self, model: Any) -> int:
        passed = Numerics(
            passed=True, loss_error=0.0, loss_allowed=1.0, grad_error=0.0, grad_allowed=1.0, plain_grad_error=0.0,
            worst="", tensors=42,
        )  # fmt: skip
        answer(
            Ready(
                numerics={"": passed}, applied={self.name: 21}, jobs={"": JobCounts(32, 0, 30)}, warm_ms=[MS] * 3,
                memory=ArmMemory(),
            )
        )  # fmt: skip
        return self.afterwards()

    def afterwards(self) -> int:
        os._exit(0)


class ForgedAndGoesOn(ForgedAtOnce):
    name = "forged_and_goes_on"
    summary = "says that it is ready before anything was measured, and lets its real answer stand for the next one"
    caught = "that nobody has asked for | evidence"

    def afterwards(self) -> int:
        return 1


class OnTheWay(Cheat):
    """Base: what is told of a trial, and the answer, are changed in the pipe, where they are bytes already."""

    status = ("untrusted",)
    arm, factor = "", 1 / 30

    class Wrapper(Turns):
        def forward(self, batch: Any) -> Tensor:
            if self.full and self.taken == 0:
                worker.send = lambda pipe, message: messages.send(pipe, self.forged(message))
            return self.inner.forward(batch)

        def forged(self, message: Any) -> Any:
            arm, factor = self.cheat.arm or self.cheat.name, self.cheat.factor
            match message:
                case ("trial", when, (name, float() as ms)) if name == arm:
                    return "trial", when, (name, factor * ms)
                case ("answer", call, [Made() as one]) if local("main", "arguments")[0] == arm:
                    shorter = {phase: factor * ms for phase, ms in one.trial.device_ms.items()}
                    return "answer", call, [replace(one, trial=replace(one.trial, device_ms=shorter))]
            return message


class ForgedOnTheWay(OnTheWay):
    name = "forged_on_the_way"
    summary = "the candidate's times are divided by thirty in the pipe"
    caught = "whole process | work outside the clock"


class ForgedReference(OnTheWay):
    name = "forged_reference"
    summary = "the reference's times are three times as long when they come out of the pipe"
    caught = "whole process"
    arm, factor = "reference", 3.0
