"""What a step costs in energy: one arm's steps alone, after the trials, over NVML's counter of the GPU's total energy.

In a round all arms take their turns within milliseconds, and the counter moves some ten times a second:
what it says of a round is of both. So each arm gets a block of its own, of seconds, from one movement of the counter to
another; a step that takes as long alone is a block of one. What the GPU draws while it waits between two steps is part
of it, and so is whatever else runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from lorabench.contract.arm import Arm
from lorabench.measure.machine import nvml_handle
from lorabench.measure.trial import run_trial
from lorabench.record.schema import Energy

# What is missing at a block's ends is no longer than a step, nor than the 100 ms between two movements of the counter:
# of so many steps, or of so many seconds, some 3 %.
ENOUGH_STEPS = 30
SHORTEST_S, LONGEST_S = 1.0, 3.0
STILL_S = 1.0  # a counter that does not move for so long is none
SAME_WORK = 0.8  # a block whose steps took less of what the trials took did something else


class Reading(NamedTuple):
    """The counter where it was seen to have moved: mJ, seconds (perf_counter), and the steps until then."""

    mj: int
    at: float
    steps: int


class Meter:
    """The counter of a GPU, for a process that does not use it and reads it between turns."""

    def __init__(self, uuid: str | None) -> None:
        self._nvml = nvml_handle(uuid) if uuid else None

    def read(self) -> int | None:
        """mJ; None where nothing counts them."""
        if self._nvml is None:
            return None
        library, handle = self._nvml
        try:
            return library.nvmlDeviceGetTotalEnergyConsumption(handle)
        except library.NVMLError:
            self._nvml = None
            return None


def measure(arm: Arm, usual_ms: float) -> Energy | None:
    """The arm's energy. `usual_ms`: the median of its trials. None where it is not known: without a GPU or NVML, on a
    GPU that does not count (before Volta, or a part of one), and of an arm that steps on several GPUs."""
    if arm.device.type != "cuda" or arm.ranks.size > 1 or not (nvml := nvml_handle()):
        return None
    library, handle = nvml
    try:
        return block(lambda: run_trial(arm), lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle), usual_ms)
    except library.NVMLError:
        return None
    finally:
        arm.kind.clear(arm)


def block(
    step: Callable[[], object], read: Callable[[], int], usual_ms: float, now: Callable[[], float] = perf_counter
) -> Energy | None:
    """Steps for `least` seconds or more, from one movement of the counter to another. `read` gives mJ."""
    least = least_s(usual_ms)
    if usual_ms >= 1000 * least:
        begin = Reading(read(), now(), 0)
        step()
        return _energy(begin, Reading(read(), now(), 1), usual_ms)
    begin = _moved(step, read, now)
    if begin is None:
        return None
    steps = 0
    while now() - begin.at < least:
        step()
        steps += 1
    end = _moved(step, read, now)
    return end and _energy(begin, end._replace(steps=steps + end.steps), usual_ms)


def least_s(usual_ms: float) -> float:
    """How long a block lasts at least, of a step that usually takes so long."""
    return min(LONGEST_S, max(SHORTEST_S, ENOUGH_STEPS * usual_ms / 1000))


def _energy(begin: Reading, end: Reading, usual_ms: float) -> Energy | None:
    """Of the steps until `end`. None where the counter stood still, or the steps were too fast to be the usual ones."""
    if end.mj <= begin.mj:
        return None
    steps, seconds = end.steps, end.at - begin.at
    if seconds / steps < SAME_WORK * usual_ms / 1000:
        return None
    return Energy(joules=(end.mj - begin.mj) / 1000, steps=steps, seconds=seconds)


def _moved(step: Callable[[], object], read: Callable[[], int], now: Callable[[], float]) -> Reading | None:
    """Steps until the counter says something else; None where it stands still."""
    before, began, steps = read(), now(), 0
    while True:
        step()
        steps += 1
        mj, at = read(), now()
        if mj != before:
            return Reading(mj, at, steps)
        if at - began > STILL_S:
            return None
