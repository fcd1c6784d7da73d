"""The first sentence about a group: the fastest stack, what it took, what it buys and what it changes; and the settings
that switch it on in a training of the reader's own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from lorabench.contract.ablation import Ablation
from lorabench.contract.names import NameUnknown
from lorabench.plan.registry import ablation
from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis, Row
from lorabench.report.answers import MS, fastest
from lorabench.report.arms import CANDIDATE, REFERENCE, Arm
from lorabench.report.cells import HOST_BOUND, host_share, moved
from lorabench.report.groups import Group
from lorabench.report.paste import switches
from lorabench.report.words import number

CHANGED = re.compile(r"(?P<name>[^(]+)\((?P<values>.*)\)")


class Opening(NamedTuple):
    """`sentence`: the answer. `doubts`: what a reader has to know beside it. `code`: (title, language, text) to paste.
    `best`: the fastest arm; None where nothing was clearly faster than the reference."""

    sentence: str
    doubts: list[str]
    code: list[tuple[str, str, str]]
    best: Arm | None


def opening(group: Group, arms: Sequence[Arm], analysis: Analysis) -> Opening:
    tried = [arm for arm in arms if arm.role == CANDIDATE]
    over = {id(r): (r, arm) for arm in tried if (r := arm.record) and frozenset(r.reference) == _base(arms)}
    faster = [r for r, _ in over.values() if str(analysis.row(r)["verdict"]).startswith("faster")]
    where = analysis.device(group.records[0])
    here = f"On this {where}" if where and where != "cpu" else "On this machine"
    what = group.title.removesuffix(f", on {where}").replace(" @ ", " at ", 1)
    if not faster:
        return _none(f"{here}, for {what},", tried, arms, analysis)
    best, *level = fastest(faster, analysis)
    row = analysis.row(best)
    buys = f"{times(row)} × {reference_name(best.reference)}"
    parts = [f"{number(row[MS])} ms for {group.kind.total}, {buys}", _memory(row)]
    sentence = f"{here} the fastest way to run {what} is {row['toggles']}: {', '.join(filter(None, parts))}"
    changes = _changes(best)
    sentence += f"; {changes}." if changes else "."
    return Opening(sentence, _doubts(best, level, analysis), settings(best.candidate), over[id(best)][1])


def times(row: Row) -> str:
    """The ratio without its interval, which the table has; without a figure the interval's ends, and of a reference
    that moved between its sessions the range of their ratios."""
    if moved(row):
        return f"{number(row['session_low'])} to {number(row['session_high'])}"
    if without_figure(row["verdict"]):
        return f"{number(row[f'{TOTAL}_low'])} to {number(row[f'{TOTAL}_high'])}"
    return number(row[f"{TOTAL}_speedup"])


def _base(arms: Sequence[Arm]) -> frozenset[str]:
    return next((frozenset(arm.own[-1].toggles) for arm in arms if arm.role == REFERENCE), frozenset())


def _verdict(arm: Arm, analysis: Analysis) -> str:
    return str(analysis.row(arm.record)["verdict"]) if arm.record else ""


def _none(start: str, tried: Sequence[Arm], arms: Sequence[Arm], analysis: Analysis) -> Opening:
    if not tried:
        return Opening(f"{start} only the reference was measured.", [], [], None)
    timed = [arm for arm in tried if arm.timed]
    unclear = sum(_verdict(arm, analysis) == "unclear" for arm in timed)
    said = f"{len(timed)} of {len(tried)} stacks were measured, {unclear} of them are unclear."
    base = next((arm for arm in arms if arm.role == REFERENCE), None)
    named = reference_name(base.own[-1].toggles) if base else "the reference"
    alone = [arm for arm in timed if base is None or not base.timed]
    if alone:
        names = ", ".join(arm.name for arm in alone)
        return Opening(f"{start} {named} does not fit, and these do: {names}.", [said], [], None)
    return Opening(f"{start} nothing that was tried is clearly faster than {named}.", [said], [], None)


def _memory(row: Row) -> str:
    used, before = row["candidate_peak_gib"], row["reference_peak_gib"]
    if not math.isfinite(used):
        return ""
    return f"{number(used)} of {number(before)} GiB" if math.isfinite(before) else f"{number(used)} GiB"


def _changes(record: Record) -> str:
    """What the arm loses beside the reference, by its gate."""
    gate = record.numerics
    if gate is None:
        return ""
    if gate.tolerance:
        return f"it changes the mathematics on purpose ({gate.tolerance})"
    return "the result is equal bit for bit" if gate.unequal == 0 else "nothing was lost but rounding"


def _doubts(best: Record, level: Sequence[Record], analysis: Analysis) -> list[str]:
    row = analysis.row(best)
    said = [f"Level with {' and with '.join(analysis.row(r)['toggles'] for r in level)}."] if level else []
    waits = host_share(row)
    if waits >= HOST_BOUND:
        said.append(f"The GPU waits for its host up to {100 * waits:.0f} % of the step: the ratio is of this host.")
    if row["dirty"]:
        said.append("Measured with uncommitted changes.")
    count = row["sessions"]
    return [*said, f"Measured in {count} sessions." if count > 1 else "Measured in one session."]


# -- the reference's name, and the settings ----------------------------------------------------------------------------


@cache
def _baselines() -> Mapping[str, list[list[str]]]:
    """The named baselines of conf/sweep.yaml: each a list of alternatives a place."""
    found = yaml.safe_load((files("lorabench.conf") / "sweep.yaml").read_text(encoding="utf-8"))["baselines"]
    return {name: [one if isinstance(one, list) else [one] for one in items] for name, items in found.items()}


def reference_name(toggles: Sequence[str]) -> str:
    """`peft_low` of the toggles that make it; toggles that have no name together stand for themselves, if few."""
    for name, places in _baselines().items():
        if len(places) == len(toggles) and all(any(t in toggles for t in place) for place in places):
            return name
    return "plain PEFT" if not toggles else " + ".join(toggles) if len(toggles) < 3 else "the reference"


def settings(labels: Sequence[str]) -> list[tuple[str, str, str]]:
    """What switches these toggles on, to paste; [] where one of them is not installed here."""
    try:
        return switches([toggle(label) for label in labels])
    except NameUnknown:
        return []


@cache
def toggle(label: str) -> Ablation:
    """Of `name` or `name(field=value, …)`. Raises NameUnknown where no package that is installed has it."""
    found = CHANGED.fullmatch(label)
    if not found:
        return ablation(label)
    pairs: list[Any] = [pair.partition("=") for pair in found["values"].split(", ")]
    return ablation({found["name"]: {name: yaml.safe_load(value) for name, _, value in pairs}})
