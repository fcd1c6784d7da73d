"""What a report shows, as text, made once from an analysis: the groups of rows, and the published numbers."""

from __future__ import annotations

from typing import NamedTuple

from lorabench.report.analysis import Analysis
from lorabench.report.cells import AnyTable, TextGroup, all_columns, giving_way, text_groups
from lorabench.report.claim_tables import claim_tables


class Shown(NamedTuple):
    """`columns`: those of all groups, for one table of them all; `giving_way`: those that it can do without, first the
    least important."""

    groups: list[TextGroup]
    columns: list[str]
    giving_way: list[str]
    claims: list[AnyTable]


def show(analysis: Analysis) -> Shown:
    found = text_groups(analysis)
    records = analysis.records
    return Shown(found, all_columns(found, records), giving_way(records), claim_tables(analysis))
