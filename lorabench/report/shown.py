"""What a report shows, made once from an analysis: the groups of rows, and the published numbers.

A table ranks only what compares: where the references of a group took over a tenth longer in one row than in another,
their hosts or clocks were not the same, and the group falls into parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Analysis
from lorabench.report.cells import AGAINST, TIME, TOGGLE, AnyTable, TextGroup, all_columns, giving_way, text_groups
from lorabench.report.claim_tables import claim_tables
from lorabench.report.head_to_head import matrices
from lorabench.report.packing import packing_tables
from lorabench.report.shares import REFERENCES_APART
from lorabench.report.words import number

GROUP = "group"


class Shown(NamedTuple):
    """`groups`: in parts within which rows compare. `columns`: those of all groups, for one table of them all;
    `giving_way`: those that it can do without, first the least important. `predicted`: what was known beforehand,
    beside what was measured."""

    groups: list[TextGroup]
    columns: list[str]
    giving_way: list[str]
    head_to_head: list[AnyTable]
    predicted: list[AnyTable]
    claims: list[AnyTable]


def show(analysis: Analysis) -> Shown:
    found, records = text_groups(analysis), analysis.records
    groups = [part for group in found for part in parts(group, analysis)]
    columns = time_first(all_columns(found, records))
    beside = matrices(analysis), packing_tables(analysis), claim_tables(analysis)
    return Shown(groups, columns, giving_way(records), *beside)


def in_groups(shown: Shown, analysis: Analysis) -> pd.DataFrame:
    """The tidy table in the order in which it is shown, with the title of each row's group before the other columns:
    only rows of one group may be ranked."""
    place = {id(record): n for n, record in enumerate(analysis.records)}
    titles = [group.title for group in shown.groups for _ in group.records]
    order = [place[id(record)] for group in shown.groups for record in group.records]
    table = analysis.table.iloc[order].reset_index(drop=True)
    table.insert(0, GROUP, titles)
    return table


def time_first(columns: Sequence[str]) -> list[str]:
    """Milliseconds stand before every ratio of them: they say what they are without a reference."""
    first = (TOGGLE, AGAINST, TIME)
    return [c for c in first if c in columns] + [c for c in columns if c not in first]


def parts(group: TextGroup, analysis: Analysis) -> list[TextGroup]:
    """The group's rows by how long their references took; one part where they compare. What has no time stands apart
    only where there are several. What is said of the whole group stands below the last."""
    took = [float(analysis.row(record)[f"{TOTAL}_reference_ms"]) for record in group.records]
    alike = spans(took)
    whole = group._replace(columns=time_first(group.columns))
    if len(alike) < 2:
        return [whole]
    made = [_part(whole, f"references of {_span(low, high)} ms", [low <= ms <= high for ms in took])
            for low, high in alike]  # fmt: skip
    if not all(map(math.isfinite, took)):
        made.append(_part(whole, "without times", [not math.isfinite(ms) for ms in took]))
    made[-1] = made[-1]._replace(tables=group.tables)
    return made


def spans(took: Iterable[float]) -> list[tuple[float, float]]:
    """(shortest, longest) of each set of times that lie within a tenth of its shortest, from the shortest."""
    found: list[tuple[float, float]] = []
    for ms in sorted(ms for ms in took if math.isfinite(ms)):
        if found and ms <= found[-1][0] * (1 + REFERENCES_APART):
            found[-1] = found[-1][0], ms
        else:
            found.append((ms, ms))
    return found


def _span(low: float, high: float) -> str:
    return "–".join(dict.fromkeys((number(low), number(high))))


def _part(group: TextGroup, said: str, has: Sequence[bool]) -> TextGroup:
    rows = list(itertools.compress(group.rows, has))
    return TextGroup(f"{group.title}, {said}", group.columns, rows, list(itertools.compress(group.records, has)), [])
