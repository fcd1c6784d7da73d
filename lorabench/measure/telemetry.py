"""The GPU while trials run: clock, power, temperature, throttle reasons and other processes, sampled beside them.

A disturbed trial is flagged and shown, never silently dropped.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import or_
from typing import Any

from lorabench.measure.machine import nvml_handle
from lorabench.measure.trial import Trial
from lorabench.record.schema import Telemetry

EVERY_S = 0.05
# A trial whose clock is below this share of what its own arm usually has was disturbed. Of its own arm: under the power
# cap an arm that does more arithmetic a second runs at a lower clock, always.
SLOW_CLOCK = 0.9
# nvmlClocksEventReasons (NVML reference): the power cap acts in any long GEMM and is no disturbance; heat and hardware
# slowdowns are.
REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
DISTURBING = 0x8 | 0x20 | 0x40 | 0x80


class Sampler:
    """Context manager around the rounds; `summary` then tells what happened. Samples nothing without a GPU or NVML."""

    def __init__(self, uuid: str | None, ours: Callable[[], Collection[int]]) -> None:
        """`uuid`: the GPU's; `ours`: the processes that are now to be there."""
        self._uuid, self._ours = uuid, ours
        self._samples: list[tuple[float, float, float, float, int]] = []
        self._foreign: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        if self._uuid and (nvml := nvml_handle(self._uuid)):
            self._thread = threading.Thread(target=self._run, args=nvml, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self, nvml: Any, handle: Any) -> None:
        ticks = 0
        while not self._stop.wait(EVERY_S):
            try:
                self._samples.append(
                    (
                        time.perf_counter(),
                        nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                        nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                    )
                )
                if ticks % 20 == 0:
                    self._look_for_others(nvml, handle)
            except nvml.NVMLError:
                return  # a GPU that does not tell: what is there so far stays
            ticks += 1

    def _look_for_others(self, nvml: Any, handle: Any) -> None:
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid not in self._ours():
                self._foreign.add(f"pid {process.pid}, {(process.usedGpuMemory or 0) >> 20} MiB")

    def summary(self, trials: Sequence[Trial]) -> Telemetry:
        """While these trials of one arm ran; a disturbed one is named by its place among them."""
        load = os.getloadavg()[0]
        if not self._samples:
            return Telemetry(load_average=load)
        _, clock, power, heat, reasons = zip(*self._samples, strict=True)
        seen, usual = reduce(or_, reasons), self._usual_clock(trials)
        return Telemetry(
            sm_clock_mhz=_spread(clock),
            power_w=_spread(power),
            temperature_c=_spread(heat),
            throttle=[words for bit, words in REASONS.items() if seen & bit],
            foreign_processes=sorted(self._foreign),
            disturbed_trials=[number for number, trial in enumerate(trials) if self._disturbed(trial, usual)],
            load_average=load,
        )

    def _inside(self, trial: Trial) -> list[tuple[float, float, float, float, int]]:
        return [s for s in self._samples if trial.began <= s[0] <= trial.ended]

    def _usual_clock(self, trials: Sequence[Trial]) -> float:
        """Median SM clock of one arm's trials, MHz; 0 where no sample fell into one."""
        clocks = [s[1] for t in trials for s in self._inside(t)]
        return statistics.median(clocks) if clocks else 0.0

    def _disturbed(self, trial: Trial, usual: float) -> bool:
        inside = self._inside(trial)
        return any(s[4] & DISTURBING for s in inside) or (
            bool(inside) and statistics.median(s[1] for s in inside) < SLOW_CLOCK * usual
        )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return float(min(values)), float(statistics.median(values)), float(max(values))
