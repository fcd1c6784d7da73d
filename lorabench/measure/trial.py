"""The timing loop: one trial is one fresh forward, one backward, one optimizer step of one arm.

Never `backward` twice over one graph: in-place kernels overwrite what they saved, and a second backward times garbage.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lorabench.measure.arm import Arm, Step

TIMED = ("forward", "backward", "step")


class Diverged(Exception):
    """A loss that is not finite in the middle of the trials: such times are of no use."""


@dataclass(frozen=True)
class Trial:
    """Milliseconds of one trial per phase, on the device and on the host (until the call returned, no waiting), its
    loss, and its start and end (time.perf_counter, seconds)."""

    device_ms: dict[str, float]
    host_ms: dict[str, float]
    loss: float
    began: float
    ended: float

    @property
    def total_ms(self) -> float:
        return sum(self.device_ms.values())


class Clock:
    """Marks between phases. On CUDA events on the current stream, beside the host's clock; on a CPU the host's alone,
    where both are the same because every call waits for its result."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.host: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        self.host.append(time.perf_counter())

    def host_ms(self) -> list[float]:
        return [1000 * (b - a) for a, b in zip(self.host, self.host[1:], strict=False)]

    def device_ms(self) -> list[float]:
        if not self.cuda:
            return self.host_ms()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.events, self.events[1:], strict=False)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_trial(arm: Arm, around: Callable[[str], None] = lambda phase: None) -> Trial:
    """One trial. `around` is called at each phase's start (memory peaks, profiler marks); it must not wait.

    With several batches to a step, a phase's time is the sum over the batches.
    """
    step: Step = arm.step
    step.clear()
    synchronize(arm.device)
    step.settle()
    clock, labels, losses = Clock(arm.device), [], []
    began = time.perf_counter()
    clock.mark()
    for batch in step.batches:
        around("forward")
        loss = step.forward(batch)
        clock.mark()
        around("backward")
        step.backward(loss)
        clock.mark()
        losses.append(loss.detach())
        labels += ["forward", "backward"]
    if "step" in step.phases:
        around("step")
        step.update()
        clock.mark()
        labels.append("step")
    device_ms, host_ms = clock.device_ms(), clock.host_ms()
    ended = time.perf_counter()
    sums = lambda times: {p: sum((t for t, l in zip(times, labels, strict=True) if l == p), 0.0) for p in step.phases}  # noqa: E731
    return Trial(sums(device_ms), sums(host_ms), sum(step.loss_of(x) for x in losses), began, ended)


def warm_up(arm: Arm, rounds: int) -> list[Trial]:
    """At least `rounds` trials, and more (up to four times as many) while a trial is still much faster than the one
    before it: autotuning and compilation have to be over before anything is timed."""
    trials = [run_trial(arm) for _ in range(rounds)]
    while len(trials) < 4 * rounds and len(trials) >= 2 and trials[-1].total_ms < 0.7 * trials[-2].total_ms:
        trials.append(run_trial(arm))
    return trials


def run_rounds(
    arms: Sequence[Arm], rounds: int, seed: int, tell: Callable[[int], None] = lambda n: None
) -> dict[str, list[Trial]]:
    """`rounds` rounds; in each, every arm runs once, in random order. Raises Diverged on a loss that is not finite.

    Python's garbage collector runs between trials, never inside one.
    """
    order = random.Random(seed)
    trials: dict[str, list[Trial]] = {arm.name: [] for arm in arms}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            tell(number)
            for arm in order.sample(list(arms), len(arms)):
                trial = run_trial(arm)
                if not math.isfinite(trial.loss):
                    raise Diverged(f"the loss of the {arm.name} is {trial.loss} in trial {number + 1}")
                trials[arm.name].append(trial)
                arm.step.clear()
            gc.collect(0)
    finally:
        gc.enable()
    return trials
