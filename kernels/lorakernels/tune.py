"""Which of two forms to take: measured once for a shape on the GPU that runs, remembered in the process and on disk.

`pick("qkv", (M, K, N), {"one": f, "addmm": g})` times f and g and returns the faster one's name. It is the device's
time that counts (`trial_timing.py`): where the host is the slower of the two, a CUDA graph is the remedy, and it too
replays by the device's time. The forms' kernels are compiled beside one another first (`compile_ahead.py`), and what
was chosen is looked up before anything is compiled (`choice_cache.py`). While a CUDA graph is captured nothing can be
timed, so a shape met there for the first time gets the first form: warm up before capturing.
On a CPU the first form is taken. Within `forced("addmm")` that is the answer wherever there is such a form.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from . import choice_cache, compile_ahead
from .runtime import next_power_of_2
from .trial_timing import give_memory_back, trial_timers

_chosen: dict[tuple, str] = {}
_forced: str | None = None
ROUNDS = 5


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Within, the form of this name wherever there is one, unmeasured; what was chosen before is kept."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choices() -> dict[tuple, str]:
    """What was chosen so far, for a report."""
    return {tuple(str(x) if isinstance(x, torch.device) else x for x in key): form for key, form in _chosen.items()}


def forget() -> None:
    """Lets this process look every choice up again, on disk or by measuring."""
    _chosen.clear()


def bucket(m: int) -> int:
    """Row counts share a measurement up to the next power of two: real batches hardly ever repeat a length."""
    return next_power_of_2(m)


def pick(name: str, key: tuple, forms: Mapping[str, Callable[[], Any]], device: torch.device) -> str:
    """The name of the form to run. `name` and `key` (shapes, dtypes: all that the time depends on) say what is chosen;
    `forms` are complete calls, which are run to be timed, so they must not change what they read (`on_spare`)."""
    first = next(iter(forms))
    if _forced in forms:
        return str(_forced)
    if not measures(device) or len(forms) == 1:
        return first
    full = (name, *key, device)
    if full not in _chosen:
        on_disk = choice_cache.of_device(device)
        known = on_disk.get((name, *key))
        if known not in forms:
            if compile_ahead.collecting():
                for run in forms.values():
                    run()
                return first
            if torch.cuda.is_current_stream_capturing():
                return first
            known = measured(forms, device)
            on_disk.put((name, *key), known)
        _chosen[full] = str(known)
    return _chosen[full]


def measures(device: torch.device) -> bool:
    """Whether forms are measured there."""
    return device.type == "cuda"


def on_spare(
    forms: Mapping[str, Callable[..., Any]], make: Callable[[], Sequence[Any]]
) -> dict[str, Callable[[], Any]]:
    """Trials for `pick` of forms that write over what they read or add to it, which measuring would do several times:
    they are called with what `make` gives, which is made once, and only if anything is measured."""
    made: list[Sequence[Any]] = []

    def trial(form: Callable[..., Any]) -> Any:
        if not made:
            made.append(make())
        return form(*made[0])

    return {name: partial(trial, form) for name, form in forms.items()}


def measured(forms: Mapping[str, Callable[[], Any]], device: torch.device) -> str:
    """The name of the form that takes this GPU the least time."""
    compile_ahead.kernels_of(forms.values())
    forms = {name: run for name, run in forms.items() if _runs(run)}  # warms up, too
    if len(forms) == 1:
        return next(iter(forms))
    try:
        return fastest(trial_timers(forms, device))
    finally:
        give_memory_back(device)


def fastest(timers: Mapping[str, Callable[[], float]]) -> str:
    """The name of the timer with the least median; they measure in turns, so that a change of clock meets all."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name].append(timer())
    return min(times, key=lambda name: statistics.median(times[name]))


def _runs(run: Callable[[], Any]) -> bool:
    """False for a tile that needs more shared memory or registers than this GPU has; any other error is an error."""
    try:
        run()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return False
    return True
