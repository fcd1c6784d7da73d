"""Memory of one arm, net of what the other arm holds: what stays allocated, and the peak of each phase."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from lorabench.contract.arm import Arm
from lorabench.contract.hooks import message_of
from lorabench.measure.trial import run_trial, synchronize
from lorabench.record.schema import ArmMemory

SHORT_OF_MEMORY = (
    "DefaultCPUAllocator", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc",
)  # fmt: skip
CONTEXT = 0.7e9  # bytes that a process takes on a GPU for itself


def allocated(device: torch.device) -> int:
    """Bytes held now: on a GPU by tensors and by captured graphs, on a CPU resident in the process."""
    synchronize(device)
    if device.type != "cuda":
        return psutil.Process().memory_info().rss
    return torch.cuda.memory_allocated() + _idle_in_pools()


def _idle_in_pools() -> int:
    """Bytes that captured graphs keep for their replays: no tensor holds them, and nothing else can have them."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def give_back(device: torch.device) -> None:
    """What garbage holds to the allocator, and what that has cached to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def free(device: torch.device) -> int:
    """Bytes that can still be had: of a GPU with what the allocator keeps cached, of a CPU without swapping."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(device)[0] + max(0, torch.cuda.memory_reserved() - allocated(device))


def growth(device: torch.device, run: Callable[[], Any]) -> int:
    """The most bytes that `run` had of torch's allocator at a time, above what was held when it began.

    Of a CPU too, where the resident set size would not do: a small step finds its pages among those that an earlier one
    has left to the process, and seems to take nothing. What libraries allocate for themselves is not in it.
    """
    synchronize(device)
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
            run()
        events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
        changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))  # pyright: ignore[reportAttributeAccessIssue]
        return max(accumulate(changes), default=0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def measure(arm: Arm, static: int, reserved_growth: int) -> ArmMemory:
    """One more trial, with the peak read per phase. `static` is what this arm added when it was built and warm.

    A phase's peak is the growth above what was allocated when the trial began (all arms' static parts), plus this
    arm's own static part.
    """
    parts = arm.kind.held(arm)
    process = _process_peak(arm, static if arm.device.type == "cpu" else 0) if arm.kind.measures_host(arm) else None
    if arm.device.type != "cuda":
        return ArmMemory(**parts, process=process)
    arm.kind.clear(arm)
    synchronize(arm.device)
    before = torch.cuda.memory_allocated()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    peaks: dict[str, int] = {}
    current: list[str] = []

    def at(phase: str) -> None:
        if current:
            peaks[current[0]] = max(peaks.get(current[0], 0), torch.cuda.max_memory_allocated())
        current[:] = [phase]
        torch.cuda.reset_peak_memory_stats()  # host bookkeeping only: it does not wait for the device

    run_trial(arm, at)
    at("end")
    arm.kind.clear(arm)
    net = {phase: peak - before + static for phase, peak in peaks.items()}
    return ArmMemory(
        **parts,
        static=static,
        peaks=net,
        peak=max(net.values()),
        process=process,
        reserved=reserved_growth,
        retries=torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
    )


def _process_peak(arm: Arm, static: int) -> int | None:
    """Peak resident set size of one trial, above what the process held, plus the arm's own part. Linux only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak (proc(5)); not everywhere permitted
    except OSError:
        return None
    before = psutil.Process().memory_info().rss
    run_trial(arm)
    arm.kind.clear(arm)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)
    return None if peak is None else max(peak - before, 0) + static


def out_of_memory(error: BaseException) -> bool:
    """torch's own exception on a GPU; of a CPU's allocator and of NCCL a RuntimeError that its text tells apart."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = message_of(error)
    return isinstance(error, RuntimeError) and any(words in text for words in SHORT_OF_MEMORY)
