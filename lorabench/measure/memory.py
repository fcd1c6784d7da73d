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
from lorabench.contract.hooks import first_cause, message_of
from lorabench.measure.trial import Trial, run_trial, synchronize
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


def give_back(device: torch.device, collect: bool = True) -> None:
    """What the allocator has cached to the device. `collect`: what garbage holds, too, which takes half a second in a
    process with so many objects."""
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved() if device.type == "cuda" else 0


def times_taken(device: torch.device) -> int:
    """How often the allocator has asked the device for memory so far."""
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0


def free(device: torch.device) -> int:
    """Bytes that can still be had: of a GPU with what the allocator keeps cached, as far as this process may have them
    (several ranks leave some to NCCL); of a CPU without swapping."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    held = allocated(device)
    there = torch.cuda.mem_get_info(device)[0] + max(0, torch.cuda.memory_reserved() - held)
    total = torch.cuda.get_device_properties(device).total_memory
    return min(there, int(torch.cuda.get_per_process_memory_fraction() * total) - held)


def growth(device: torch.device, run: Callable[[], Any]) -> int:
    """The most bytes that `run` had of torch's allocator at a time, above what was held when it began.

    Of a CPU too, where the resident set size would not do: a small step finds its pages among those that an earlier one
    has left to the process, and seems to take nothing. What libraries allocate for themselves is not in it.
    """
    synchronize(device)
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            run()
        events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
        changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))  # pyright: ignore[reportAttributeAccessIssue]
        return max(accumulate(changes), default=0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


class Peaks:
    """What an arm's trials take at most of memory above what was allocated when each began. Of several trials the last
    one counts."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.by_phase: dict[str, int] = {}
        self.process: int | None = None
        self.retries = 0

    def trial(self) -> Trial:
        """One trial, watched; `clear` has to follow before anything else is allocated."""
        arm = self.arm
        arm.kind.clear(arm)
        resident = _resident_now() if arm.kind.measures_host(arm) else None
        done = self._on_gpu() if arm.device.type == "cuda" else run_trial(arm)
        arm.kind.clear(arm)
        peak = _most_resident() if resident is not None else None
        self.process = None if peak is None or resident is None else max(peak - resident, 0)
        return done

    def _on_gpu(self) -> Trial:
        synchronize(self.arm.device)
        before, retries = torch.cuda.memory_allocated(), _retries()
        self.by_phase = {}
        current: list[str] = []

        def at(phase: str) -> None:
            if current:
                grown = torch.cuda.max_memory_allocated() - before
                self.by_phase[current[0]] = max(self.by_phase.get(current[0], 0), grown)
            current[:] = [phase]
            torch.cuda.reset_peak_memory_stats()  # host bookkeeping only: it does not wait for the device

        done = run_trial(self.arm, at)
        at("end")
        self.retries = _retries() - retries
        return done

    def memory(self, static: int, reserved_growth: int) -> ArmMemory:
        """With what this arm added when it was built and warm: a phase's peak is its growth and this `static` part."""
        parts = self.arm.kind.held(self.arm)
        own = static if self.arm.device.type == "cpu" else 0
        process = None if self.process is None else self.process + own
        if self.arm.device.type != "cuda":
            return ArmMemory(**parts, process=process)
        peaks = {phase: grown + static for phase, grown in self.by_phase.items()}
        return ArmMemory(
            **parts, static=static, peaks=peaks, peak=max(peaks.values()), process=process, reserved=reserved_growth,
            retries=self.retries,
        )  # fmt: skip


def measure(arm: Arm, static: int, reserved_growth: int) -> ArmMemory:
    """`Peaks` of one more trial."""
    peaks = Peaks(arm)
    peaks.trial()
    return peaks.memory(static, reserved_growth)


def _retries() -> int:
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


def _resident_now() -> int | None:
    """Bytes resident in this process, from which its peak is counted anew. None where that is not permitted. Linux
    only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak (proc(5)); not everywhere permitted
    except OSError:
        return None
    return psutil.Process().memory_info().rss


def _most_resident() -> int | None:
    status = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)


def out_of_memory(error: BaseException) -> bool:
    """torch's own exception on a GPU; of a CPU's allocator and of NCCL a RuntimeError that its text tells apart. One
    that was raised from it says the same: torch's pipelines raise one of their own from whatever a stage raises."""
    cause = first_cause(error)
    if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = message_of(cause)
    return isinstance(cause, RuntimeError) and any(words in text for words in SHORT_OF_MEMORY)
