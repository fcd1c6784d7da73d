"""What a step costs in energy: one arm's steps alone, after the trials, over NVML's counter of the GPU's total energy.

In a round all arms take their turns within milliseconds, and the counter moves some ten times a second: what it says of
a round is of both. So each arm gets a block of its own, of a second or of one step. A thread sees meanwhile when the
counter moves. The power between two movements, times what a step takes, is a step's energy. What the GPU draws while it
waits between two steps is part of it, and so is whatever else runs there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lorabench.contract.arm import Arm
from lorabench.measure.machine import nvml_handle
from lorabench.measure.trial import run_trial
from lorabench.record.schema import Energy

LEAST_S = 1.0  # of a block: some ten movements of the counter
EVERY_S = 0.002  # between two looks at the counter: so late a movement is seen, of a second some 0.2 %
MOVEMENTS = 5  # that a block needs
STILL_S = 1.0  # how much longer a block lasts for their sake
SAME_WORK = 0.8  # a block whose steps took less of what the trials took did something else


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


class Movements:
    """When the counter moved, and to what, while this context is open: seen by a thread."""

    def __init__(self, read: Callable[[], int], now: Callable[[], float] = perf_counter) -> None:
        """`read` gives mJ; what it raises ends the looking."""
        self._read, self._now = read, now
        self._last: int | None = None
        self._seen: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Movements:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(EVERY_S):
                self.look()
        except Exception:  # NVML's own, of a GPU that does not count
            return

    def look(self) -> None:
        mj, last = self._read(), self._last
        self._last = mj
        if last is not None and mj != last:
            self._seen.append((self._now(), mj))

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def watts(self) -> float | None:
        """Between the first movement and the last one. None where there were too few, or the counter went back."""
        if len(self._seen) < MOVEMENTS:
            return None
        (began, low), (ended, high) = self._seen[0], self._seen[-1]
        return (high - low) / 1000 / (ended - began) if high > low else None


def measure(arm: Arm, usual_ms: float) -> Energy | None:
    """The arm's energy. `usual_ms`: the median of its trials. None where it is not known: without a GPU or NVML, on a
    GPU that does not count (before Volta, or a part of one), and of an arm that steps on several GPUs."""
    if arm.device.type != "cuda" or arm.ranks.size > 1 or not (nvml := nvml_handle()):
        return None
    library, handle = nvml
    try:
        moved = Movements(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle))
        return block(lambda: run_trial(arm), moved, usual_ms)
    finally:
        arm.kind.clear(arm)


def block(
    step: Callable[[], object], moved: Any, usual_ms: float, now: Callable[[], float] = perf_counter
) -> Energy | None:
    """Steps for a second, at least one. `moved`: of the counter, a context while they run. None where that says
    nothing, or the steps were too fast to be the usual ones."""
    began, steps, seconds = now(), 0, 0.0
    with moved:
        while seconds < LEAST_S or (len(moved) < MOVEMENTS and seconds < LEAST_S + STILL_S):
            step()
            steps += 1
            seconds = now() - began
    if moved.watts is None or seconds / steps < SAME_WORK * usual_ms / 1000:
        return None
    return Energy(joules=moved.watts * seconds, steps=steps, seconds=seconds)
