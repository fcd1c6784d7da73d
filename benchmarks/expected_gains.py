"""What each toggle brought in the published results, by model: lorabench/advice/expected.yaml, which is installed.

    python benchmarks/expected_gains.py            # write it anew
    python benchmarks/expected_gains.py --print    # only show it

`lorabench recommend` tries first what brought most on the nearest model. A toggle's speed-up is that of a stack with it
over the same stack without it, both held against one reference in one folder; the geometric mean of all such pairs.
A toggle that divides the work among GPUs is left out: its gain grows with their number. So is one that took the place
of another in the reference, but for what every reference has: checkpoints in place of checkpoints do not gain on none.
Nothing is taken from where the reference differed from itself by more than NOISE, nor of a person's own model: its
config.json, which says how large it is, is not published.
`start_s` is how many seconds longer it took beside its trials; the median.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lorabench.advice.expected import TABLE, parameters
from lorabench.plan.compose import load_config, model
from lorabench.plan.registry import ablation_class
from lorabench.record.schema import Record
from lorabench.report.analysis import Analysis

RESULTS = Path(__file__).resolve().parents[1] / "results"
EVERY = ("sdpa", "adamw_fused", "padding")  # whose slots every reference fills
NOISE = 0.5  # how far a reference may be from itself, as a share: what was measured beside another says nothing
OWN_MODEL = "case"  # what benchmarks/recommend_case.py calls its model
TAKES_AWAY = "no_gradient_checkpointing"  # it is held against checkpoints, and against nothing else
HEAD = "# Made by benchmarks/expected_gains.py from results/, which says what the fields are.\n"


class Seen(NamedTuple):
    """A toggle on one model in one folder: how many times as fast, and how many seconds longer its start was."""

    speedup: float
    start_s: float
    folder: str


def found() -> dict[str, dict[str, list[Seen]]]:
    """By toggle and model."""
    made: dict[str, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(RESULTS.rglob("records.jsonl")):
        analysis = Analysis.read(path.parent)
        groups: dict[Any, list[Record]] = defaultdict(list)
        for record in analysis.records:
            if record.kind == "train" and record.status == "ok" and record.model != OWN_MODEL:
                groups[record.model, record.workload, frozenset(record.reference)].append(record)
        for (name, _, reference), records in groups.items():
            floors = [analysis.row(record)["noise_floor"] for record in records if record.is_noise_floor]
            if min(floors, default=0.0) > NOISE:  # within a seat, where there is one
                continue
            taken = {slot(label.partition("(")[0]) for label in reference} - {slot(label) for label in EVERY}
            for toggle, seen in _of_group(analysis, records, str(path.parent.relative_to(RESULTS))):
                if not divides_among_gpus(toggle) and (slot(toggle) not in taken or toggle == TAKES_AWAY):
                    made[toggle][name.partition("(")[0]].append(seen)
    return made


def _of_group(analysis: Analysis, records: list[Record], folder: str) -> Iterator[tuple[str, Seen]]:
    """Of records with one reference."""
    gains = {frozenset[str](): 1.0}
    starts: dict[frozenset[str], float] = {}
    for record in records:
        stack = frozenset(record.ablations)
        if stack and (speedup := analysis.speedup(record)):
            gains[stack] = speedup.centre
        if record.cost:
            starts[stack] = record.cost.wall - record.cost.trials
    for stack, gain in gains.items():
        for toggle in stack:
            if toggle.isidentifier() and (without := stack - {toggle}) in gains:  # with parameters it is another toggle
                longer = starts[stack] - starts[without] if {stack, without} <= starts.keys() else 0.0
                yield toggle, Seen(gain / gains[without], longer, folder)


def table() -> str:
    """The file's text."""
    rows = {
        toggle: [_row(name, seen) for name, seen in sorted(by_model.items(), key=lambda item: size(item[0]))]
        for toggle, by_model in sorted(found().items())
    }
    return HEAD + yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=160)


def _row(name: str, seen: list[Seen]) -> dict[str, Any]:
    return {
        "model": name,
        "billions": round(size(name) / 1e9, 3),
        "speedup": round(statistics.geometric_mean(s.speedup for s in seen), 3),
        "start_s": max(0, round(statistics.median(s.start_s for s in seen))),
        "from": ", ".join(dict.fromkeys(s.folder for s in seen)),
    }


@cache
def divides_among_gpus(toggle: str) -> bool:
    made = ablation_class(toggle)
    return made.parallel and not made.process_a_job


@cache
def slot(toggle: str) -> str:
    return ablation_class(toggle).slot


@cache
def size(name: str) -> int:
    """How many parameters a named model has."""
    return parameters(model(name, load_config([])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="shown")
    if parser.parse_args().shown:
        print(table(), end="")
    else:
        TABLE.write_text(table())
