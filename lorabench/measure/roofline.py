"""How far from the roofline: a kind's work over the ceilings measured on this device in this run, and what bounds a
phase. An unknown ceiling gives an empty cell, never a guess.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from lorabench.contract.work import Work
from lorabench.measure.profile import Busy
from lorabench.measure.trial import Trial, synchronize
from lorabench.record.schema import PhaseRoofline

BUSY = 0.8  # a device idle for more than a fifth of a phase waits for the host
NEAR = 0.5  # matrix work that fills half of the busy time at the ceiling's rate decides the phase


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """This device's limits, measured now: sustained square GEMM in `dtype` (TFLOP/s), copy (GB/s, read + written)."""
    cuda = device.type == "cuda"
    n = 8192 if cuda else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))  # zeros would run faster than data does
    gemm = _rate(lambda: a @ b, device, 0.6 if cuda else 0.3)
    source = torch.empty((1 << 30) if cuda else (1 << 26), device=device, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    copy = _rate(lambda: target.copy_(source), device, 0.2)
    return {
        "gemm_tflops": {str(dtype).removeprefix("torch."): 2 * n**3 * gemm / 1e12},
        "copy_gbs": 2 * source.nbytes * copy / 1e9,
    }


def _rate(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Calls per second, back to back for about `seconds` after a warm-up (long enough for the power limit to act)."""
    for _ in range(3):
        call()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    calls = max(3, int(seconds / max(time.perf_counter() - began, 1e-6)))
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return calls / (time.perf_counter() - began)


def phase_rooflines(
    trials: Sequence[Trial], busy: Mapping[str, Busy] | None, work: Work, ceiling_tflops: float | None,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, PhaseRoofline]:  # fmt: skip
    """Where each phase's time goes. `busy` None: the device's busy time is unknown, and there is no label. `rates`:
    10⁹ bytes a second at which a phase's bytes can be moved, of the phases of which that was measured."""
    result: dict[str, PhaseRoofline] = {}
    for phase in trials[0].device_ms:
        median = statistics.median(t.device_ms[phase] for t in trials)
        tflop = work.tflop.get(phase) or None
        ran = busy.get(phase) if busy else None
        part = PhaseRoofline(
            host_ms=statistics.median(t.host_ms[phase] for t in trials),
            device_busy_ms=ran.device if ran else None,
            communication_ms=ran.communication or None if ran else None,
            exposed_ms=ran.exposed if ran and ran.communication else None,
            tflop=tflop,
            recompute_tflop=work.recompute_tflop.get(phase),
            gbytes=work.gbytes.get(phase),
            ceiling_gbs=rates.get(phase),
            of_ceiling=tflop / (median / 1000) / ceiling_tflops if tflop and ceiling_tflops else None,
        )
        part.label = label(median, part, ceiling_tflops)
        result[phase] = part
    return result


def label(
    median_ms: float, part: PhaseRoofline, ceiling_tflops: float | None
) -> Literal["host-bound", "memory-bound", "compute-bound"] | None:
    """host-bound: the device idles; compute-bound: matrix work at the ceiling's rate fills most of its busy time."""
    if not part.device_busy_ms:
        return None
    if part.device_busy_ms < BUSY * median_ms:
        return "host-bound"
    work = (part.tflop or 0.0) + (part.recompute_tflop or 0.0)
    if not work:
        return "memory-bound"
    if ceiling_tflops is None:
        return None
    return "compute-bound" if 1000 * work / ceiling_tflops >= NEAR * part.device_busy_ms else "memory-bound"
