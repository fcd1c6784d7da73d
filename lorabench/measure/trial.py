"""The timing loop. What one trial does its kind says (of training: one fresh forward, one backward, one optimizer
step); here it is put between marks, warmed up, and repeated in rounds.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter  # the function itself: whoever puts another one into `time` changes nothing here

import torch
from torch.cuda import Event
from torch.cuda import synchronize as wait_for_device  # as perf_counter

from lorabench.contract.arm import Arm

TURN_S = 0.1  # a turn is as many trials as this holds, one at least
MOST_TRIALS = 20
WARM_S = 1.0  # of trials that warm an arm up: of long ones two are enough
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


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the generators; a GPU's is kept on the host, which does not wait for it."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def put_back(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """The generators to `random_states`; a GPU's has none where it was a CPU's training."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def run_trial(
    arm: Arm, around: Callable[[str], None] = lambda phase: None, number: int | None = None
) -> Trial:  # fmt: skip
    """One trial, on the data of `number`; None: on what is there. `around` is called at each phase's start (memory
    peaks, profiler marks); it must not wait.

    A phase that comes several times in a trial (several batches, several jobs) takes the sum. An arm of several ranks
    waits for all of them before its first mark.
    """
    arm.kind.clear(arm)
    if number is not None:  # after the clearing: whoever does the step there does it on the data of another trial
        arm.kind.feed(arm, number)
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


def warm_up(arm: Arm, rounds: int, take: Callable[[], Trial] | None = None) -> list[Trial]:
    """`rounds` trials; of trials that take long two, if two take a second; and more (up to four times `rounds`) while a
    trial is still much faster than the one before it: autotuning and compilation have to be over before anything is
    timed. All ranks take as many. `take`: how a trial is made, where it is to be watched."""
    take = take or partial(run_trial, arm)
    trials = [take()]
    while arm.ranks.largest(float(_wants_more(trials, rounds))):
        trials.append(take())
    return trials


def _wants_more(trials: Sequence[Trial], rounds: int) -> bool:
    if len(trials) > 1 and trials[-1].total_ms < 0.7 * trials[-2].total_ms:
        return len(trials) < 4 * rounds
    took = sum(trial.total_ms for trial in trials) / 1000
    return len(trials) < (min(rounds, 2) if took >= WARM_S else rounds)


def trials_a_turn(ms: float) -> int:
    """How many trials a turn of a round holds, of which one takes so many milliseconds."""
    return max(1, min(MOST_TRIALS, int(1000 * TURN_S / ms))) if ms > 0 else MOST_TRIALS


def of_turn(made: Sequence[Trial]) -> tuple[Sequence[Trial], dict[str, float]]:
    """The trials of a turn that count, and their medians by phase. Its first one found the caches of the arm before."""
    counted = made[1:] or made
    return counted, {p: statistics.median(t.device_ms[p] for t in counted) for p in counted[0].device_ms}


@dataclass
class ArmRounds:
    """What the rounds of an arm came to: milliseconds by phase, one a round, and the losses of all its trials."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def run_rounds(arms: Mapping[str, Arm], rounds: int, seed: int, a_turn: int = 1) -> dict[str, ArmRounds]:
    """`rounds` rounds in this process; in each, every arm has a turn of so many trials, in fresh random order, on the
    round's own data. Two names may stand for one arm.

    Raises Diverged on a loss that is not finite. Python's garbage collector runs between turns, never inside one.
    """
    order = random.Random(seed)
    found = {name: ArmRounds() for name in arms}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in order.sample(list(arms), len(arms)):
                arm, made = arms[name], list[Trial]()
                for place in range(a_turn):
                    made.append(run_trial(arm, number=number * a_turn + place + 1))
                    if not math.isfinite(made[-1].loss):
                        raise Diverged(f"the loss of the {name} is {made[-1].loss} in round {number + 1}")
                arm.kind.clear(arm)
                found[name].losses += [trial.loss for trial in made]
                for phase, ms in of_turn(made)[1].items():
                    found[name].ms.setdefault(phase, []).append(ms)
            gc.collect(0)
    finally:
        gc.enable()
    return found
