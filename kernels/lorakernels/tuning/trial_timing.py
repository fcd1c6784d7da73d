"""How long a form takes on the GPU, whatever its host does: a small CUDA graph of it, replayed between two events.

    timers = trial_timers({"one": f, "addmm": g}, device)      # each call of timers["one"] is one measurement, in ms

A graph holds the form several times, so that a form of a few microseconds stands out of an event's noise, and is one
launch for the host; eight runs between two events were once chosen by, and measured a slow host (docs/lab-notes.md).
Before each measurement comes work that draws the power a training step draws: a GPU that has idled runs at a higher
clock than the power cap leaves it later, which favours the form with more arithmetic. Where a form cannot be captured,
it is timed by itself between two events behind the same work, all forms alike.

Forms run on real data (zeros draw little power) and may run any number of times.
Run: python -m pytest tests/lorakernels/test_trial_timing.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..side_stream import stream_of

# Products of square matrices of this size, and how many: a millisecond or two, while a form is launched.
LOAD = (4096, 8)
LONG_ENOUGH = 0.2  # ms that a graph should take
MOST_RUNS = 16  # of a form in its graph
Form = Callable[[], Any]


def trial_timers(forms: Mapping[str, Form], device: torch.device) -> dict[str, Callable[[], float]]:
    """A timer of each form, which must have run once (compiled, its spare tensors made); a call gives milliseconds on
    the device for one run."""
    load = power_load(device)
    timers = event_timers(forms, load)
    runs = runs_for(min(timer() for timer in timers.values()))
    pool = torch.cuda.graph_pool_handle()  # one for all: nothing reads what a form has made, so the next may have it
    try:
        graphs = {name: captured(run, runs, device, pool) for name, run in forms.items()}
    except RuntimeError:  # a form that synchronizes or that asks for memory the GPU has no more
        torch.cuda.synchronize(device)
        return timers
    for graph in graphs.values():
        graph.replay()  # the first one uploads it
    return {name: partial(_of_one, load, graph, runs) for name, graph in graphs.items()}


def event_timers(forms: Mapping[str, Form], load: Form) -> dict[str, Callable[[], float]]:
    """As `trial_timers`, of one run behind the load, launched by the host."""
    return {name: partial(between_events, load, run) for name, run in forms.items()}


def runs_for(milliseconds: float) -> int:
    """How often a form that takes so long goes into its graph."""
    return max(1, min(MOST_RUNS, math.ceil(LONG_ENOUGH / max(milliseconds, 1e-6))))


def power_load(device: torch.device) -> Form:
    """Queues work that draws the power that a training step draws; the user's random numbers stay as they are."""
    size, times = LOAD
    own = torch.Generator(device).manual_seed(0)
    a = torch.randn(size, size, dtype=torch.float16, device=device, generator=own)
    out = torch.empty_like(a)
    return lambda: [torch.mm(a, a, out=out) for _ in range(times)]


def between_events(load: Form, run: Form) -> float:
    """Milliseconds of a run behind the load, which the host uses to launch it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    load()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _of_one(load: Form, graph: torch.cuda.CUDAGraph, runs: int) -> float:
    return between_events(load, graph.replay) / runs


def captured(run: Form, runs: int, device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many runs, in this memory pool. Raises RuntimeError where it cannot be captured."""
    stream, graph = stream_of(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # libraries take their workspace for this stream now, and not out of the graph's memory
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for _ in range(runs):
                run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


@contextlib.contextmanager
def trial_on(device: torch.device) -> Iterator[None]:
    """Inside, this GPU is the current one. At the end, memory that nobody uses is the GPU's again, and the peak that
    torch tells of is what it was before: no step ends by a trial, so whoever asks what a step takes is not told of
    it."""
    with torch.cuda.device(device):
        peak = torch.cuda.max_memory_allocated()
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(torch.OutOfMemoryError):  # torch can only forget a peak, so the old one is made
                missing = max(0, peak - torch.cuda.memory_allocated())  # none, where the trial's results are kept
                torch.empty(missing, dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()
