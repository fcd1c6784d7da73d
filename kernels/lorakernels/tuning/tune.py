"""Which of two forms to take: measured once for a shape on the GPU that runs, remembered in the process and on disk.

`pick("qkv", (M, K, N), {"one": f, "addmm": g})` times f and g and returns the faster one's name. It is the device's
time that counts (`trial_timing.py`): where the host is the slower of the two, a CUDA graph is the remedy, and it too
replays by the device's time. The forms' kernels are compiled beside one another first (`compile_ahead.py`), and what
was chosen is looked up before anything is compiled (`choice_cache.py`). While a CUDA graph is captured nothing can be
timed, so a shape met there for the first time gets the first form: warm up before capturing.
Where the GPU has no memory left for a trial, the form of fewer rows is taken, or the first; what was measured while
somebody else seems to have used the GPU is not kept on disk. On a CPU the first form is taken. Within
`forced("addmm")` that is the answer wherever there is such a form.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import compile_ahead
from ..runtime import deterministic, next_power_of_2
from . import choice_cache
from .trial_timing import trial_on, trial_timers

Spare = Callable[[], Sequence[Any]]

_chosen: dict[tuple, str] = {}
_forced: str | None = None
ROUNDS = 5
# Processes that share a GPU have it in turns of milliseconds, several times as long as what is timed; a change of
# clock makes less of a difference.
STEADY = 1.5


@contextlib.contextmanager
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


def pick(
    name: str, key: tuple, forms: Mapping[str, Callable[..., Any]], device: torch.device, spare: Spare = tuple
) -> str:
    """The name of the form to run. `name` and `key` (rows, then shapes and dtypes: all that the time depends on, and
    what decides which forms there are) say what is chosen; `forms` are complete calls, the library's is the last.

    They are run to be timed, so they must not change what they read: forms that write over it or add to it are called
    with what `spare` makes, which is made once, and only if anything is measured. Where torch is to be deterministic
    the library's form is taken, unmeasured: the others add up atomically, and the clock may decide otherwise next time.
    """
    first = next(iter(forms))
    if deterministic():
        return list(forms)[-1]
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
                given = spare()
                for run in forms.values():
                    run(*given)
                return first
            if torch.cuda.is_current_stream_capturing():
                return first
            found = tried(forms, device, spare)
            known = _of_fewer_rows(full, forms) if found is None else found.form
            if found is not None and found.steady:
                on_disk.put((name, *key), found.form)
        _chosen[full] = str(known)
    return _chosen[full]


def measures(device: torch.device) -> bool:
    """Whether forms are measured there."""
    return device.type == "cuda"


class Trial(NamedTuple):
    """The form that takes the least time, and whether the GPU was ours alone, as far as the times tell."""

    form: str
    steady: bool


def tried(forms: Mapping[str, Callable[..., Any]], device: torch.device, spare: Spare) -> Trial | None:
    """What measuring the forms shows; None where the GPU has no memory left for that. A trial takes more of it than the
    step does: there are spare tensors, and forms that need more than the one that is taken in the end."""
    with trial_on(device), contextlib.suppress(torch.OutOfMemoryError):
        given = spare()
        return measured({name: partial(run, *given) for name, run in forms.items()}, device)
    return None


def _of_fewer_rows(full: tuple, forms: Mapping[str, Any]) -> str:
    """What was chosen at the next fewer rows at which there was a choice, else the first form."""
    name, rows, *others = full
    while rows := rows // 2:
        if (known := _chosen.get((name, rows, *others))) in forms:
            return str(known)
    return next(iter(forms))


def measured(forms: Mapping[str, Callable[[], Any]], device: torch.device) -> Trial:
    """The form that takes this GPU the least time."""
    compile_ahead.kernels_of(forms.values())
    forms = {name: run for name, run in forms.items() if _runs(run)}  # warms up, too
    if len(forms) == 1:
        return Trial(next(iter(forms)), True)
    return fastest(trial_timers(forms, device))


def fastest(timers: Mapping[str, Callable[[], float]]) -> Trial:
    """The timer with the least median; they measure in turns, so that a change of clock meets all. Not steady are times
    of which one form's longest is STEADY times its shortest."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name].append(timer())
    form = min(times, key=lambda name: statistics.median(times[name]))
    return Trial(form, all(max(each) <= STEADY * min(each) for each in times.values()))


def _runs(run: Callable[[], Any]) -> bool:
    """False for a tile that needs more shared memory or registers than this GPU has; any other error is an error."""
    try:
        run()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return False
    return True
