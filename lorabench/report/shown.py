"""What a report shows, made once from an analysis: the groups of rows, and the published numbers.

A table ranks only what compares: where the references of a group took over a tenth longer in one row than in another,
their hosts or clocks were not the same, and the group falls into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from lorabench.plan.estimate import duration
from lorabench.record.costs import trials_share
from lorabench.report import comparable
from lorabench.report.analysis import Analysis
from lorabench.report.cells import TIME, TOGGLE, AnyTable, TextGroup, all_columns, giving_way, text_groups
from lorabench.report.claim_tables import claim_tables
from lorabench.report.packing import packing_tables
from lorabench.report.words import percent

GROUP = "group"


class Shown(NamedTuple):
    """`groups`: in parts within which rows compare. `columns`: those of all groups, for one table of them all;
    `giving_way`: those that it can do without, first the least important. `predicted`: what was known beforehand,
    beside what was measured. `trials`: what share of the wall time they were, '' where no arm says."""

    groups: list[TextGroup]
    columns: list[str]
    giving_way: list[str]
    predicted: list[AnyTable]
    claims: list[AnyTable]
    trials: str = ""


def show(analysis: Analysis) -> Shown:
    found, records = text_groups(analysis), analysis.records
    groups = [part for group in found for part in parts(group, analysis)]
    columns = time_first(all_columns(found, records))
    beside = packing_tables(analysis), claim_tables(analysis)
    return Shown(groups, columns, giving_way(records), *beside, _trials(analysis))


def _trials(analysis: Analysis) -> str:
    """Nothing of a sweep that was ended from outside: its journal has no seconds of rounds."""
    share, wall = trials_share(analysis.arms)
    return f"Trials were {percent(share)} of {duration(wall)} of wall time." if wall and share else ""


def in_groups(shown: Shown, analysis: Analysis) -> pd.DataFrame:
    """The tidy table in the order in which it is shown, with the title of each row's group before the other columns:
    only rows of one group may be ranked."""
    titles = [group.title for group in shown.groups for _ in group.records]
    order = [analysis.place_of[id(record)] for group in shown.groups for record in group.records]
    table = analysis.table.iloc[order].reset_index(drop=True)
    table.insert(0, GROUP, titles)
    return table


def time_first(columns: Sequence[str]) -> list[str]:
    """Milliseconds stand before every ratio of them: they say what they are without a reference."""
    first = (TOGGLE, TIME)
    return [c for c in first if c in columns] + [c for c in columns if c not in first]


def parts(group: TextGroup, analysis: Analysis) -> list[TextGroup]:
    """The group's rows by how long their references took, see `comparable`. What is said of the whole group stands
    below the last part."""
    took = comparable.references([analysis.row(record) for record in group.records])
    whole = group._replace(columns=time_first(group.columns))
    found = [_part(whole, said, members) for said, members in comparable.parts(group.records, took)]
    found[-1] = found[-1]._replace(tables=group.tables)
    return found


def _part(group: TextGroup, said: str, members: Sequence[int]) -> TextGroup:
    title = f"{group.title}, {said}" if said else group.title
    rows, records = [group.rows[n] for n in members], [group.records[n] for n in members]
    return TextGroup(title, group.columns, rows, records, [])
