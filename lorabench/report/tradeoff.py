"""The figure of time against memory: a small panel a group, each stack with a look of its own, and the Pareto front."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Row
from lorabench.report.figure import SMALL, WIDTH, short, size_of
from lorabench.report.panels import (
    BLUE,
    CIRCLE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PURPLE,
    VERMILLION,
    Figured,
    Mark,
    Panel,
    with_any,
)
from lorabench.report.shown import spans

COLUMNS, PANEL, GAP = 3, 2.15, 0.75  # panels beside one another; inches of one's height, and between two
TITLE = 34  # letters of a line above a panel
MS, GIB = f"{TOTAL}_candidate_ms", "candidate_peak_gib"
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, "#56B4E9", GREY)
REFERENCE = ("#000000", CIRCLE)
GID = "cell-"  # then kind and key: the page finds the row of a point by it

Look = tuple[str, str]


class Point(NamedTuple):
    """A row where it stands: milliseconds and GiB of its candidate."""

    ms: float
    gib: float
    row: Row


def tradeoff(panels: Sequence[Panel]) -> Figured:
    """Down and to the left is better. A front is drawn through rows that compare: whose references took as long."""
    shown, left_out = with_any(panels, lambda mark: mark.has(MS, GIB) and mark.record.is_candidate)
    if not shown:
        return None
    looks = _looks([mark for panel in shown for mark in panel.marks if mark.has(MS, GIB) and mark.record.is_candidate])
    names = [short(name) for name in looks]
    across = min(COLUMNS, len(shown))
    titles = [textwrap.fill(panel.title, TITLE) for panel in shown]
    above = 0.16 * max(title.count("\n") + 1 for title in titles)
    gap = GAP + above
    rows, deep = math.ceil(len(shown) / across), math.ceil((len(names) + 2) / COLUMNS)
    key, foot = (0.28 if any("\n" in name for name in names) else 0.19) * deep + 0.1, 0.25 if left_out else 0.0
    height = rows * (PANEL + gap) + key + foot
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    width, beside = WIDTH / across, 0.62
    for n, panel in enumerate(shown):
        row, column = divmod(n, across)
        left, bottom = column * width + beside, height - key - row * (PANEL + gap) - PANEL - above - 0.1
        size = ((width - beside - 0.2) / WIDTH, PANEL / height)
        _draw(figure.add_axes((left / WIDTH, bottom / height, *size)), panel, titles[n], looks)
    handles = [
        Line2D([], [], color=c, marker=m, lw=0, ms=6, mfc=c if (c, m) != REFERENCE else "white", label=name)
        for (c, m), name in zip(looks.values(), names, strict=True)
    ]
    handles += [Line2D([], [], color=GREY, lw=1, ls="--", label="Pareto front")]
    handles += [
        Line2D([], [], color=GREY, marker=CIRCLE, mfc="white", lw=0, label="hollow: host-bound, or the reference")
    ]
    size = min(map(size_of, names))
    figure.legend(handles=handles, loc="upper center", ncols=COLUMNS, frameon=False, fontsize=size, borderaxespad=0.2)
    if left_out:
        figure.text(0.5, 0.06 / height, left_out, ha="center", va="bottom", fontsize=SMALL, color=VERMILLION)
    return figure, left_out


def _looks(marks: Sequence[Mark]) -> dict[str, Look]:
    """Toggles → (colour, marker), the same in every panel. All references are one, as they come."""
    names = dict.fromkeys(mark.row["toggles"] for mark in marks if not mark.record.is_noise_floor)
    found: dict[str, Look] = {"reference": REFERENCE} if any(mark.record.is_noise_floor for mark in marks) else {}
    for n, name in enumerate(names):
        found[name] = COLOURS[n % len(COLOURS)], MARKERS[n // len(COLOURS) % len(MARKERS)]
    return found


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both: from the fastest to the smallest."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.ms, p.gib)):
        if not kept or point.gib < kept[-1].gib:
            kept.append(point)
    return kept


def compare(rows: Sequence[Row]) -> bool:
    """Whether these rows' references took as long, within a tenth: only then may their milliseconds be ranked."""
    return len(spans(row[f"{TOTAL}_reference_ms"] for row in rows)) < 2


def _draw(ax: Axes, panel: Panel, title: str, looks: dict[str, Look]) -> None:
    placed = [m for m in panel.marks if m.has(MS, GIB) and m.record.is_candidate]
    for mark in placed:
        row = mark.row
        colour, marker = looks["reference" if mark.record.is_noise_floor else row["toggles"]]
        hollow = mark.host_bound or mark.record.is_noise_floor
        ax.plot([row[GIB]] * 2, [row[f"{MS}_low"], row[f"{MS}_high"]], "-", color=colour, lw=1.2)
        fill = "white" if hollow else colour
        ax.plot(row[GIB], row[MS], marker, color=colour, mfc=fill, ms=6, gid=f"{GID}{mark.record.kind}-{row['key']}")
    points = [Point(mark.row[MS], mark.row[GIB], mark.row) for mark in placed]
    right, top = 1.12 * max(p.gib for p in points), 1.12 * max(max(p.ms, p.row[f"{MS}_high"]) for p in points)
    remarks = ["peak GiB"]
    if compare([point.row for point in points]):
        edge = front(points)
        gib, ms = [right, *(p.gib for p in edge)], [edge[0].ms, *(p.ms for p in edge)]
        ax.step([*gib, gib[-1]], [*ms, top], "--", where="post", color=GREY, lw=1, zorder=1)
    else:
        remarks.append("references differ by over 10 %: no front")
    if missing := sum(m.record.is_candidate for m in panel.marks) - len(placed):
        remarks.append(f"{missing} failed or without a peak: in the table")
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.set_title(title, fontsize=SMALL, fontweight="bold", loc="left")
    ax.set_xlabel("\n".join(remarks), fontsize=SMALL - 1, labelpad=1)
    ax.set_ylabel("ms", fontsize=SMALL - 1, labelpad=1)
    ax.tick_params(labelsize=SMALL - 1)
    ax.grid(color="#e6e6e6", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
