"""The timing loop. What one trial does its kind says (of training: one fresh forward, one backward, one optimizer
step); here it is put between marks, warmed up, and repeated in rounds.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter  # the function itself: whoever puts another one into `time` changes nothing here

import torch
from torch.cuda import Event
from torch.cuda import synchronize as wait_for_device  # as perf_counter

from lorabench.contract.arm import Arm

_record, _elapsed, _wait = Event.record, Event.elapsed_time, Event.synchronize  # as perf_counter


class Diverged(Exception):
    """A loss that is not finite in the middle of the trials: such times are of no use."""


@dataclass(frozen=True)
class Trial:
    """Milliseconds of one trial per phase, on the device and on the host (until the call returned, no waiting), the
    losses by job (none where the kind has none), its start and end (perf_counter, seconds), and for how many
    milliseconds after its last mark the device still worked, on streams that the marks do not wait for."""

    device_ms: dict[str, float]
    host_ms: dict[str, float]
    losses: dict[str, float]
    began: float
    ended: float
    late_ms: float = 0.0

    @property
    def loss(self) -> float:
        return sum(self.losses.values())

    @property
    def total_ms(self) -> float:
        return sum(self.device_ms.values())


class Clock:
    """Marks between phases. On CUDA events on the current stream, beside the host's clock; on a CPU the host's alone,
    where both are the same because every call waits for its result."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.host: list[float] = []
        self.events: list[Event] = []
        self.late_ms = 0.0

    def mark(self) -> None:
        if self.cuda:
            event = Event(enable_timing=True)
            _record(event)
            self.events.append(event)
        self.host.append(perf_counter())

    def host_ms(self) -> list[float]:
        return [1000 * (b - a) for a, b in zip(self.host, self.host[1:], strict=False)]

    def device_ms(self) -> list[float]:
        if not self.cuda:
            return self.host_ms()
        _wait(self.events[-1])
        marked = perf_counter()
        wait_for_device()
        self.late_ms = 1000 * (perf_counter() - marked)
        return [_elapsed(a, b) for a, b in zip(self.events, self.events[1:], strict=False)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        wait_for_device()


def run_trial(arm: Arm, around: Callable[[str], None] = lambda phase: None) -> Trial:
    """One trial. `around` is called at each phase's start (memory peaks, profiler marks); it must not wait.

    A phase that comes several times in a trial (several batches, several jobs) takes the sum. An arm of several ranks
    waits for all of them before its first mark.
    """
    arm.kind.clear(arm)
    synchronize(arm.device)
    arm.ranks.barrier()
    clock, labels = Clock(arm.device), []

    def begin(phase: str) -> None:
        clock.mark()
        labels.append(phase)
        arm.ranks.beat()
        around(phase)

    out = arm.kind.trial(arm, begin)
    clock.mark()
    device_ms, host_ms = clock.device_ms(), clock.host_ms()
    ended = perf_counter()
    losses, began = arm.kind.losses(arm, out), clock.host[0]
    return Trial(_sums(device_ms, labels), _sums(host_ms, labels), losses, began, ended, clock.late_ms)


def _sums(times: Sequence[float], labels: Sequence[str]) -> dict[str, float]:
    """Milliseconds by phase, in the order in which the phases first came."""
    made: dict[str, float] = {}
    for phase, ms in zip(labels, times, strict=True):
        made[phase] = made.get(phase, 0.0) + ms
    return made


def warm_up(arm: Arm, rounds: int) -> list[Trial]:
    """At least `rounds` trials, and more (up to four times as many) while a trial is still much faster than the one
    before it: autotuning and compilation have to be over before anything is timed. All ranks take as many."""
    trials = [run_trial(arm) for _ in range(rounds)]
    while 2 <= len(trials) < 4 * rounds and arm.ranks.largest(float(_still_faster(trials))):
        trials.append(run_trial(arm))
    return trials


def _still_faster(trials: Sequence[Trial]) -> bool:
    return trials[-1].total_ms < 0.7 * trials[-2].total_ms


def run_rounds(
    arms: Mapping[str, Arm | None], rounds: int, seed: int, tell: Callable[[int], None] = lambda n: None,
    seen: Callable[[str, Trial], None] = lambda name, trial: None,
    timed: Callable[[str, Trial | None], None] = lambda name, trial: None,
) -> dict[str, list[Trial]]:  # fmt: skip
    """`rounds` rounds; in each, every arm runs once, in random order, on the round's own data; each of two arms is the
    first one in half of the rounds. Raises Diverged on a loss that is not finite. `seen` is called after each trial,
    before what it left is cleared; `timed` before it, and right after it with the trial.

    An arm that is None runs on other ranks than this one: its turn is kept, so that all ranks draw the same order.
    Python's garbage collector runs between trials, never inside one.
    """
    order = random.Random(seed)
    one = order.sample(list(arms), len(arms))
    turns = [one[:: -1 if number % 2 else 1] for number in range(rounds)]
    order.shuffle(turns)
    trials: dict[str, list[Trial]] = {name: [] for name, arm in arms.items() if arm}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            tell(number)
            for name in turns[number]:
                arm = arms[name]
                if arm is None:
                    continue
                arm.kind.feed(arm, number + 1)
                timed(name, None)
                trial = run_trial(arm)
                timed(name, trial)
                if not math.isfinite(trial.loss):
                    raise Diverged(f"the loss of the {name} is {trial.loss} in trial {number + 1}")
                trials[name].append(trial)
                seen(name, trial)
                arm.kind.clear(arm)
            gc.collect(0)
    finally:
        gc.enable()
    return trials
