"""What the plots share of the records: the rows of a panel, their looks, and which of them one figure can show.

Colours are Okabe and Ito's, which the colour-blind tell apart; a verdict also has a marker of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lorabench.record.schema import Record
from lorabench.report.analysis import Analysis, Row
from lorabench.report.cells import host_bound
from lorabench.report.comparable import parts, references
from lorabench.report.figure import lines

BLUE, ORANGE, GREEN, VERMILLION, GREY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777", "#CC79A7"
MARKERS = "osD^vP*X"  # as matplotlib names them: circle, square, …
CIRCLE = MARKERS[0]
LOOK = {"faster": (BLUE, "^"), "slower": (VERMILLION, "v"), "same": (GREY, "s"), "unclear": (ORANGE, ""),
        "faster, few trials": (BLUE, ""), "slower, few trials": (VERMILLION, "")}  # fmt: skip
LEAST = (PURPLE, "*")  # of what is no candidate: it has no verdict
MAX_ROWS, MAX_PANELS = 150, 40  # of a figure: more take minutes to draw, and nobody reads them in a picture
MANY = 8  # panels: of more, a heat map says more than a stack that no screen holds

Figured = tuple[Figure, str] | None  # with what it leaves out; None where there is nothing to draw


class Mark(NamedTuple):
    """One row of a panel: the record and its row of the tidy table. `part`: the rows that it compares with, in words;
    '' where all do."""

    record: Record
    row: Row
    part: str = ""

    @property
    def host_bound(self) -> bool:
        return host_bound(self.row)

    def has(self, *columns: str) -> bool:
        return all(math.isfinite(self.row[column]) for column in columns)


class Panel(NamedTuple):
    """One group, as it is drawn."""

    title: str
    kind: Any
    marks: list[Mark]

    @property
    def headings(self) -> dict[int, str]:
        """What stands above the first row of each part, by the row's place."""
        above = ["", *(mark.part for mark in self.marks)]
        return {n: mark.part for n, mark in enumerate(self.marks) if mark.part != above[n]}

    @property
    def ys(self) -> list[int]:
        """The line on which each row is drawn."""
        return lines(len(self.marks), self.headings)


def panels_of(analysis: Analysis) -> list[Panel]:
    """A panel a group, its rows from the fastest to those that failed; in parts where only some of them compare."""
    found = []
    for group in analysis.groups:
        rows = [Mark(record, analysis.row(record)) for record in analysis.ordered(group)]
        alike = parts([mark.record for mark in rows], references([mark.row for mark in rows]))
        marks = [rows[n]._replace(part=said) for said, members in alike for n in members]
        found.append(Panel(group.title, group.kind, marks))
    return found


def that_fit(panels: Sequence[Panel]) -> tuple[list[Panel], str]:
    """The panels that one figure can show, the first always, and in words what is left out."""
    shown, rows = [], 0
    for panel in panels:
        if shown and (rows + len(panel.marks) > MAX_ROWS or len(shown) == MAX_PANELS):
            break
        shown.append(panel._replace(marks=panel.marks[:MAX_ROWS]))
        rows += len(shown[-1].marks)
    every = sum(len(panel.marks) for panel in panels)
    if rows == every:
        return shown, ""
    return shown, f"{rows} of {every} rows, {len(shown)} of {len(panels)} groups; the tables have them all"


def with_any(panels: Iterable[Panel], drawn: Callable[[Mark], bool]) -> tuple[list[Panel], str]:
    """The panels that hold anything to draw, with all their rows: one that failed stays in its place and says so. And
    what a figure of them leaves out."""
    return that_fit([panel for panel in panels if any(map(drawn, panel.marks))])


def look(mark: Mark) -> tuple[str, str]:
    """(colour, marker) of a verdict, or of what has none. '' is no marker: without a figure there is no centre."""
    return LOOK.get(mark.row["verdict"] or "", (GREY, CIRCLE)) if mark.record.is_candidate else LEAST


def by(key: Callable[[Mark], Any], marks: Iterable[tuple[Any, Mark]]) -> dict[Any, list[tuple[Any, Mark]]]:
    """Marks of one look together: one artist for all of them draws several times as fast as one for each."""
    found: dict[Any, list[tuple[Any, Mark]]] = {}
    for at, mark in marks:
        found.setdefault(key(mark), []).append((at, mark))
    return found
