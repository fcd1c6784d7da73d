"""The figure of time against memory: a panel a group, each stack with a look of its own, and the Pareto front.

Where the names of all points find room beside them, they stand there, in larger panels. Else a legend has them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Row
from lorabench.report.figure import SMALL, TWO_LINES, WIDTH, extent, short, size_of
from lorabench.report.panels import (
    BLUE,
    CIRCLE,
    GREEN,
    GREY,
    MANY,
    MARKERS,
    ORANGE,
    PURPLE,
    VERMILLION,
    Figured,
    Mark,
    Panel,
    with_any,
)
from lorabench.report.placing import Box, Place, place
from lorabench.report.shown import spans

LEFT, RIGHT, GAP = 0.62, 0.2, 0.75  # inches beside a panel, and between two that lie one under the other
LETTERS, LINE = 12.5, 28  # of a title on an inch; of a name beside its point on a line
COLUMNS = 3  # of the legend
MS, GIB = f"{TOTAL}_candidate_ms", "candidate_peak_gib"
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, "#56B4E9", GREY)
ITSELF, REFERENCE = "reference", ("#000000", CIRCLE)
GID = "cell-"  # then kind and key: the page finds the row of a point by it

Look = tuple[str, str]


class Point(NamedTuple):
    """A row where it stands: milliseconds and GiB of its candidate."""

    ms: float
    gib: float
    row: Row


class Frame(NamedTuple):
    """What one panel draws: the marks that have a place and where, the ends of its axes, the front's corners as (GiB,
    ms), and what it says below."""

    title: str
    marks: list[Mark]
    points: list[Point]
    right: float
    top: float
    edge: list[tuple[float, float]]  # empty where milliseconds may not be ranked
    remarks: list[str]

    @classmethod
    def of(cls, panel: Panel) -> Frame:
        marks = [m for m in panel.marks if _has_place(m)]
        points = [Point(m.row[MS], m.row[GIB], m.row) for m in marks]
        right, top = 1.12 * max(p.gib for p in points), 1.12 * max(max(p.ms, p.row[f"{MS}_high"]) for p in points)
        edge, remarks = [], ["peak GiB"]
        if compare([point.row for point in points]):
            kept = front(points)
            edge = [(right, kept[0].ms), *((p.gib, p.ms) for p in kept), (kept[-1].gib, top)]
        else:
            remarks.append("references differ by over 10 %: no front")
        if missing := sum(m.record.is_candidate for m in panel.marks) - len(marks):
            remarks.append(f"{missing} failed or without a peak: in the table")
        return cls(panel.title, marks, points, right, top, edge, remarks)


class Grid(NamedTuple):
    """Panels beside one another: how many, and the height of each in inches."""

    across: int
    height: float

    def of(self, panels: int) -> Grid:
        """No more beside one another than there are."""
        return self._replace(across=min(self.across, panels))

    @property
    def width(self) -> float:
        """Of what one draws into, inches."""
        return WIDTH / self.across - LEFT - RIGHT


NAMED, WITH_LEGEND = (Grid(2, 3.2), Grid(1, 3.6)), Grid(3, 2.15)  # of the first, the one in which all names find room
CROWDED = 20  # points of a panel, and MANY panels: of more nobody would read the names


def tradeoff(panels: Sequence[Panel]) -> Figured:
    """Down and to the left is better. A front is drawn through rows that compare: whose references took as long."""
    shown, left_out = with_any(panels, _has_place)
    if not shown:
        return None
    frames = [Frame.of(panel) for panel in shown]
    looks = _looks([mark for frame in frames for mark in frame.marks])
    handles = [Line2D([], [], color=GREY, lw=1, ls="--", label="Pareto front")]
    handles += [
        Line2D([], [], color=GREY, marker=CIRCLE, mfc="white", lw=0, label="hollow: host-bound, or the reference")
    ]
    grid, names = _named(frames) or (WITH_LEGEND.of(len(frames)), None)
    if names is None:
        handles = [_handle(name, look) for name, look in looks.items()] + handles
    figure, axes = _laid_out([frame.title for frame in frames], grid, handles, left_out)
    for n, (ax, frame) in enumerate(zip(axes, frames, strict=True)):
        _draw(ax, frame, looks)
        if names is not None:
            _write(ax, frame, looks, grid, names[n])
    return figure, left_out


def _has_place(mark: Mark) -> bool:
    return mark.has(MS, GIB) and mark.record.is_candidate


def _name(mark: Mark) -> str:
    return ITSELF if mark.record.is_noise_floor else mark.row["toggles"]


def _looks(marks: Sequence[Mark]) -> dict[str, Look]:
    """Toggles → (colour, marker), the same in every panel. All references are one, as they come."""
    names = dict.fromkeys(_name(mark) for mark in marks if not mark.record.is_noise_floor)
    found: dict[str, Look] = {ITSELF: REFERENCE} if any(mark.record.is_noise_floor for mark in marks) else {}
    for n, name in enumerate(names):
        found[name] = COLOURS[n % len(COLOURS)], MARKERS[n // len(COLOURS) % len(MARKERS)]
    return found


def _handle(name: str, look: Look) -> Line2D:
    colour, marker = look
    fill = "white" if look == REFERENCE else colour
    return Line2D([], [], color=colour, marker=marker, lw=0, ms=6, mfc=fill, label=short(name))


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


def _laid_out(names: Sequence[str], grid: Grid, handles: Sequence[Line2D], left_out: str) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for each of the names and a legend above them; what it leaves out, at its foot."""
    titles = [textwrap.fill(name, round(LETTERS * (grid.width + RIGHT))) for name in names]
    labels = [str(handle.get_label()) for handle in handles]
    above = 0.16 * max(title.count("\n") + 1 for title in titles)
    key = (0.28 if any("\n" in label for label in labels) else 0.19) * math.ceil(len(handles) / COLUMNS) + 0.1
    deep = grid.height + GAP + above
    height = math.ceil(len(names) / grid.across) * deep + key + (0.25 if left_out else 0.0)
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    axes = []
    for n, title in enumerate(titles):
        row, column = divmod(n, grid.across)
        left, bottom = column * WIDTH / grid.across + LEFT, height - key - row * deep - grid.height - above - 0.1
        axes.append(figure.add_axes((left / WIDTH, bottom / height, grid.width / WIDTH, grid.height / height)))
        axes[-1].set_title(title, fontsize=SMALL, fontweight="bold", loc="left")
    size = min(map(size_of, labels))
    figure.legend(
        handles=list(handles), loc="upper center", ncols=COLUMNS, frameon=False, fontsize=size, borderaxespad=0.2
    )
    if left_out:
        figure.text(0.5, 0.06 / height, left_out, ha="center", va="bottom", fontsize=SMALL, color=VERMILLION)
    return figure, axes


def _draw(ax: Axes, frame: Frame, looks: dict[str, Look]) -> None:
    for mark, point in zip(frame.marks, frame.points, strict=True):
        row = mark.row
        colour, marker = looks[_name(mark)]
        hollow = mark.host_bound or mark.record.is_noise_floor
        ax.plot([point.gib] * 2, [row[f"{MS}_low"], row[f"{MS}_high"]], "-", color=colour, lw=1.2)
        fill = "white" if hollow else colour
        ax.plot(point.gib, point.ms, marker, color=colour, mfc=fill, ms=6, gid=f"{GID}{mark.record.kind}-{row['key']}")
    if frame.edge:
        ax.step(*zip(*frame.edge, strict=True), "--", where="post", color=GREY, lw=1, zorder=1)
    ax.set(xlim=(0, frame.right), ylim=(0, frame.top))
    ax.set_xlabel("\n".join(frame.remarks), fontsize=SMALL - 1, labelpad=1)
    ax.set_ylabel("ms", fontsize=SMALL - 1, labelpad=1)
    ax.tick_params(labelsize=SMALL - 1)
    ax.grid(color="#e6e6e6", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


# -- names ----------------------------------------------------------------------------------------------------------


def _lines(name: str) -> str:
    """A name as it stands beside its point: what is too long for one line has its parameters on a second."""
    first, _, rest = name.partition("(")
    if rest and len(name) > LINE:
        return f"{short(first, LINE)}\n{short('(' + rest, LINE)}"
    return short(name, LINE, lines=3)


def _named(frames: Sequence[Frame]) -> tuple[Grid, list[list[Place]]] | None:
    """A grid in which the names of all points find room, and their places, a list a panel. None where there is none."""
    if len(frames) > MANY or any(len(frame.marks) > CROWDED for frame in frames):
        return None
    for grid in (grid.of(len(frames)) for grid in NAMED):
        found = [places for places in takewhile(bool, (_placed(frame, grid) for frame in frames)) if places]
        if len(found) == len(frames):
            return grid, found
    return None


def _placed(frame: Frame, grid: Grid) -> list[Place] | None:
    """Where the names lie in a panel of this size, in inches from its corner; None where they do not all find room."""
    x, y = grid.width / frame.right, grid.height / frame.top
    sizes = [extent(_lines(_name(mark)), TWO_LINES) for mark in frame.marks]
    bars = [Box(p.gib * x, p.row[f"{MS}_low"] * y, p.gib * x, p.row[f"{MS}_high"] * y) for p in frame.points]
    points, panel = [(p.gib * x, p.ms * y) for p in frame.points], Box(0.03, 0.03, grid.width, grid.height)
    corners = [(gib * x, ms * y) for gib, ms in frame.edge]  # from the right to the left, each step up at its end
    steps = [box for (x0, y0), (x1, y1) in pairwise(corners) for box in (Box(x1, y0, x0, y0), Box(x1, y0, x1, y1))]
    return place(points, sizes, panel, [*bars, *steps]) or place(points, sizes, panel, bars)


def _write(ax: Axes, frame: Frame, looks: dict[str, Look], grid: Grid, places: Sequence[Place]) -> None:
    """The names where they were placed; those that lie further off have a line to their points."""
    for mark, point, (box, _, line_to) in zip(frame.marks, frame.points, places, strict=True):
        name, middle = _name(mark), ((box.x0 + box.x1) / 2 / grid.width, (box.y0 + box.y1) / 2 / grid.height)
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TWO_LINES, "linespacing": 0.95}
        ax.text(*middle, _lines(name), transform=ax.transAxes, **style)
        if line_to:
            xs, ys = (
                [point.gib / frame.right, line_to[0] / grid.width],
                [point.ms / frame.top, line_to[1] / grid.height],
            )
            ax.plot(xs, ys, "-", color=looks[name][0], lw=0.7, zorder=1.5, transform=ax.transAxes)
