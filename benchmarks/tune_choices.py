"""Does `lorakernels.tune` choose better by small CUDA graphs than by events? One arm, with the choices of either.

    python benchmarks/tune_choices.py 'models=[smollm2-135m@1x512,smollm2-1.7b@1x512]' \\
        'ablations=[[lora_kernels,adapters_in_compute_dtype,cuda_graph]]'

Arguments are the sweep's. Each candidate is built ROUNDS times with each way of timing, in turns, in this one process:
every form is measured anew (nothing is read from disk), the arm warms up, and its trials give the step's milliseconds.
Then the choices in which the ways differ. Where one way differs from itself, the forms lie within its noise.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ["LORAKERNELS_CACHE"] = "0"  # before the first choice

import torch
from lorakernels import tune
from lorakernels.tuning import trial_timing

from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown
from lorabench.measure import trial
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.plan.compose import ConfigError, load_config, plan

ROUNDS = 3
Timers = Callable[[Mapping[str, Any], torch.device], dict[str, Callable[[], float]]]


def by_events(forms: Mapping[str, Any], device: torch.device) -> dict[str, Callable[[], float]]:
    """One run between two events, which `tune` did before and does where no graph can be captured."""
    return trial_timing.event_timers(forms, trial_timing.power_load(device))


WAYS: dict[str, Timers] = {"events": by_events, "graphs": trial_timing.trial_timers}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        config = load_config(arguments)
        machine = describe()
        cells = [cell for cell in plan(config, machine.device).cells if cell.toggles]
    except (ConfigError, NameUnknown) as error:
        print(f"tune_choices: {error}", file=sys.stderr)
        return 2
    for cell in cells:
        for line in compared(cell, getattr(torch, machine.dtype(config.dtype)), torch.device(machine.device)):
            print(line, flush=True)
    return 0


def compared(cell: Cell, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Lines of text: the step by each way's choices, and where these differ."""
    yield f"\n{cell.title}"
    chosen: dict[str, list[dict[tuple, str]]] = {way: [] for way in WAYS}
    for turn in range(ROUNDS):
        for way in WAYS if turn % 2 else reversed(WAYS):
            step = built_with(WAYS[way], cell, dtype, device)
            chosen[way].append(tune.choices())
            yield f"  {way}: {step:.3f} ms"
    yield from differences(chosen)


def built_with(timers: Timers, cell: Cell, dtype: torch.dtype, device: torch.device) -> float:
    """Milliseconds of a step, the median of the cell's trials, of an arm whose forms were chosen by these timers."""
    before, tune.trial_timers = tune.trial_timers, timers
    tune.forget()
    try:
        arm = kind(cell.kind).build(request_of(cell, "candidate", dtype, device))
        trial.warm_up(arm, cell.warmup)
        done = [trial.run_trial(arm) for _ in range(cell.trials)]
    finally:
        tune.trial_timers = before
    return statistics.median(sum(t.device_ms.values()) for t in done)


def differences(chosen: Mapping[str, Sequence[Mapping[tuple, str]]]) -> list[str]:
    """A line for each choice that was not the same every time, with each way's forms in the order of its turns."""
    keys = sorted({key for turns in chosen.values() for turn in turns for key in turn}, key=str)
    lines = []
    for key in keys:
        forms = {way: [turn.get(key, "-") for turn in turns] for way, turns in chosen.items()}
        if len({form for each in forms.values() for form in each}) > 1:
            lines.append(f"  {key}: " + "; ".join(f"{way} {', '.join(each)}" for way, each in forms.items()))
    same = len(keys) - len(lines)
    return [f"  {same} of {len(keys)} choices are the same every time", *lines]


if __name__ == "__main__":
    raise SystemExit(main())
