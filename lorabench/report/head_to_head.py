"""Head to head: every side against every other in one table, from the cells in which two of them were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis
from lorabench.report.cells import AnyTable, whole
from lorabench.report.contrasts import how, side, versus
from lorabench.report.groups import Group

CORNER = "× as fast as"
FLIPPED = {"faster": "slower", "slower": "faster"}
FEWEST = 3  # sides: what two have to say of each other is one row of their table

Stack = frozenset[str]  # all toggles of an arm: one name may stand over two references


def matrices(analysis: Analysis) -> list[AnyTable]:
    """(caption, headings, rows) for each model @ workload with enough sides: how many times as fast the row's side is
    as the column's. A pair is measured once, so what stands across the diagonal is the inverse."""
    found: dict[tuple[str, str, str], list[Group]] = {}
    for group in analysis.groups:
        if group.head_to_head:
            first = group.records[0]
            found.setdefault((first.model, first.workload, group.kind.name), []).append(group)
    several = len({kind for _, _, kind in found}) > 1
    made = []
    for (model, workload, kind), groups in found.items():
        pairs = [r for group in groups for r in group.records if r.ablations]
        names = _names(pairs)
        if len(names) >= FEWEST:
            title = f"Head to head: {model} @ {workload}{f', {kind}' if several else ''}"
            made.append((title, [CORNER, *names.values()], _rows(names, pairs, analysis)))
    return made


def _names(pairs: Sequence[Record]) -> dict[Stack, str]:
    """The stacks in the order in which they were named: a side's name; where two stacks have it, all that they hold."""
    sides = {frozenset(r.candidate): side(r) for r in pairs}
    sides |= {frozenset(r.reference): versus(r) for r in pairs if frozenset(r.reference) not in sides}
    given = list(sides.values())
    return {s: name if given.count(name) == 1 else f"{name} of {' + '.join(sorted(s))}" for s, name in sides.items()}


def _rows(names: Mapping[Stack, str], pairs: Sequence[Record], analysis: Analysis) -> list[list[str]]:
    said: dict[tuple[Stack, Stack], str] = {}
    for record in pairs:
        own, other = frozenset(record.candidate), frozenset(record.reference)
        row = analysis.row(record)
        said[own, other] = _says(record, row)
        said[other, own] = _says(record, _inverse(row))
    return [[name, *(said.get((own, other), "") for other in names)] for own, name in names.items()]


def _says(record: Record, row: Mapping[Any, Any]) -> str:
    """The ratio with its verdict and how the two met, or why there is none."""
    if not (shown := whole(row)):
        failed = {"reference": versus(record), "candidate": side(record)}.get(record.arm or "")
        return f"{record.status} of {failed}" if failed else record.status
    verdict = row["verdict"]
    said = shown if verdict is None or without_figure(verdict) else f"{shown} {verdict}"
    return ", ".join(filter(None, (said, how(record))))


def _inverse(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """The row as it would be had the two sides changed places."""
    turned = dict(row) | {"verdict": FLIPPED.get(row["verdict"], row["verdict"])}
    turned[f"{TOTAL}_speedup"] = 1 / row[f"{TOTAL}_speedup"]
    for low, high in ((f"{TOTAL}_low", f"{TOTAL}_high"), ("session_low", "session_high")):
        turned[low], turned[high] = 1 / row[high], 1 / row[low]
    return turned
