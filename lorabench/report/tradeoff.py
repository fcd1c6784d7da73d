"""The figure of time against memory: a panel a group, each stack with a look of its own, and the Pareto front.

A key names each stack: names in the panel would lie over one another, and over the front. The page, where there is room
to point at one, names the points themselves.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Row
from lorabench.report.cells import HOST_BOUND
from lorabench.report.comparable import references, spans
from lorabench.report.figure import SMALL, WIDTH, extent, scales, short, size_of
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
    that_fit,
)
from lorabench.report.words import number

LEFT, RIGHT, GAP = 0.62, 0.2, 0.62  # inches beside a panel, and between two that lie one under the other
FOOT = 0.25  # inches below the last panels
LETTERS = 12.5  # of a title on an inch
COLUMNS, HANDLE = 3, 0.5  # of the key at most; inches of a column beside its text
MS, GIB = f"{TOTAL}_candidate_ms", "candidate_peak_gib"
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, "#56B4E9", GREY)
ITSELF, BLACK = "reference", "#000000"
LETTERS_OF_NAME = 48  # on a line of the key
FEW = 3  # points: where there are MANY panels, one of so few says nothing that its table does not


class Look(NamedTuple):
    """A stack's colour and marker."""

    colour: str
    marker: str


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
    took: tuple[float, float] | None  # by the references, where they took more than a tenth longer in one row
    remarks: list[str]

    @classmethod
    def of(cls, panel: Panel) -> Frame:
        marks = [m for m in panel.marks if _has_place(m)]
        points = [Point(m.row[MS], m.row[GIB], m.row) for m in marks]
        right = 1.12 * max(p.gib for p in points)
        highest = max(max(p.ms, p.row[f"{MS}_high"]) for p in points)
        edge, took, remarks = [], None, []
        if compare([point.row for point in points]):
            top = 1.12 * highest
            kept = front(points)
            edge = [(right, kept[0].ms), *((p.gib, p.ms) for p in kept), (kept[-1].gib, top)]
        else:
            ms = references([point.row for point in points])
            took = min(ms), max(ms)
            top = 1.12 * max(highest, took[1])
            remarks.append(f"the reference took {number(took[0])} to {number(took[1])} ms: no front")
        if missing := sum(m.record.is_candidate for m in panel.marks) - len(marks):
            remarks.append(f"{missing} failed or without a peak: in the table")
        return cls(panel.title, marks, points, right, top, edge, took, remarks)


class Grid(NamedTuple):
    """Panels beside one another: how many, and the height of each in inches."""

    across: int
    height: float

    @classmethod
    def of(cls, panels: int) -> Grid:
        return cls(*((1, 3.6), (2, 3.0), (3, 2.3))[min(math.ceil(math.sqrt(panels)), 3) - 1])

    @property
    def width(self) -> float:
        """Of what one draws into, inches."""
        return WIDTH / self.across - LEFT - RIGHT


def tradeoff(panels: Sequence[Panel]) -> Figured:
    """Down and to the left is better. A front is drawn through rows that compare: whose references took as long. Each
    stack has a look of its own, which a key above the panels explains."""
    shown, left_out = _worth_drawing(panels)
    if not shown:
        return None
    frames = [Frame.of(panel) for panel in shown]
    looks = looks_of([_name(mark) for frame in frames for mark in frame.marks])
    handles = [_handle(name, look) for name, look in looks.items()]
    handles += [Line2D([], [], color=GREY, lw=1, ls="--", label="Pareto front")]
    if any(frame.took for frame in frames):
        handles += [Line2D([], [], color=BLACK, alpha=0.3, lw=4, label="the reference's shortest to longest time")]
    handles += [Line2D([], [], color=GREY, marker=CIRCLE, mfc="white", lw=0, label="hollow: host-bound, reference")]
    grid = Grid.of(len(frames))
    figure, axes = _laid_out(frames, grid, handles, left_out)
    for ax, frame in zip(axes, frames, strict=True):
        _draw(ax, frame, looks)
    return figure, left_out


def _worth_drawing(panels: Sequence[Panel]) -> tuple[list[Panel], str]:
    """Those with points; of MANY only those with more than a FEW. And in words what is left out."""
    found = [panel for panel in panels if any(map(_has_place, panel.marks))]
    many = [panel for panel in found if sum(map(_has_place, panel.marks)) > FEW]
    kept = many if len(found) > MANY else found
    shown, left_out = that_fit(kept)
    if len(kept) < len(found) and not left_out:
        left_out = f"{len(kept)} of {len(found)} groups: the others have {FEW} points or fewer, and their tables all"
    return shown, left_out


def _has_place(mark: Mark) -> bool:
    return mark.has(MS, GIB) and mark.record.is_candidate


def _name(mark: Mark) -> str:
    return ITSELF if mark.record.is_noise_floor else mark.row["toggles"]


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Of each name its look, the same in every panel; the reference's own first."""
    found = {ITSELF: Look(BLACK, CIRCLE)} if ITSELF in names else {}
    for n, name in enumerate(dict.fromkeys(name for name in names if name != ITSELF)):
        found[name] = Look(COLOURS[n % len(COLOURS)], MARKERS[n // len(COLOURS) % len(MARKERS)])
    return found


def _handle(name: str, look: Look) -> Line2D:
    fill = "white" if name == ITSELF else look.colour
    label = short(name, LETTERS_OF_NAME)
    return Line2D([], [], color=look.colour, marker=look.marker, lw=0, ms=6, mfc=fill, label=label)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both: from the fastest to the smallest."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.ms, p.gib)):
        if not kept or point.gib < kept[-1].gib:
            kept.append(point)
    return kept


def compare(rows: Sequence[Row]) -> bool:
    """Whether these rows' references took as long, within a tenth: only then may their milliseconds be ranked."""
    return len(spans(references(rows))) < 2


def _laid_out(
    frames: Sequence[Frame], grid: Grid, handles: Sequence[Line2D], left_out: str
) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel a frame and the key above them; what it leaves out, at its foot."""
    titles = [textwrap.fill(frame.title, round(LETTERS * (grid.width + RIGHT))) for frame in frames]
    labels = [str(handle.get_label()) for handle in handles]
    above = 0.16 * max(title.count("\n") + 1 for title in titles)
    size = min(map(size_of, labels))
    columns = min(COLUMNS, int(WIDTH / (HANDLE + max(extent(label, size)[0] for label in labels))))
    key = _height_of_key(labels, size, columns)
    deep = grid.height + GAP + above
    foot = FOOT + (0.2 if left_out else 0.0)
    height = math.ceil(len(frames) / grid.across) * deep + key + foot
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    axes = []
    for n, text in enumerate(titles):
        row, column = divmod(n, grid.across)
        left, bottom = column * WIDTH / grid.across + LEFT, height - key - row * deep - grid.height - above - 0.1
        axes.append(figure.add_axes((left / WIDTH, bottom / height, grid.width / WIDTH, grid.height / height)))
        axes[-1].set_title(text, fontsize=SMALL, fontweight="bold", loc="left")
        if not column:
            axes[-1].set_ylabel("ms", fontsize=SMALL - 1, labelpad=1)
    figure.legend(
        handles=list(handles), loc="upper center", ncols=columns, frameon=False, fontsize=size, borderaxespad=0.2
    )
    figure.text(0.5, (foot - 0.22) / height, "peak GiB", ha="center", va="bottom", fontsize=SMALL)
    if left_out:
        figure.text(0.5, 0.06 / height, left_out, ha="center", va="bottom", fontsize=SMALL, color=VERMILLION)
    return figure, axes


def _height_of_key(labels: Sequence[str], size: float, columns: int) -> float:
    """Inches, with room below: of the highest of its columns, which are filled one after the other."""
    tall = [(1.25 * (label.count("\n") + 1) + 0.5) * size / 72 for label in labels]
    rows, longer = divmod(len(tall), columns)
    ends = list(itertools.accumulate(rows + (n < longer) for n in range(columns)))
    return max(sum(tall[start:end]) for start, end in pairwise([0, *ends])) + 0.2


def _draw(ax: Axes, frame: Frame, looks: dict[str, Look]) -> None:
    for mark, point in zip(frame.marks, frame.points, strict=True):
        row, look = mark.row, looks[_name(mark)]
        if mark.record.is_noise_floor and frame.took:
            ax.plot([point.gib] * 2, frame.took, "-", color=BLACK, alpha=0.3, lw=4, solid_capstyle="butt", zorder=1)
        ax.plot([point.gib] * 2, [row[f"{MS}_low"], row[f"{MS}_high"]], "-", color=look.colour, lw=1.2)
        waits = row["candidate_host_share"] >= HOST_BOUND  # the arm's own: a captured one has no host
        fill = "white" if waits or mark.record.is_noise_floor else look.colour
        ax.plot(point.gib, point.ms, look.marker, color=look.colour, mfc=fill, ms=6)
    if frame.edge:
        ax.step(*zip(*frame.edge, strict=True), "--", where="post", color=GREY, lw=1, zorder=1)
    ax.set(xlim=(0, frame.right), ylim=(0, frame.top))
    ax.set_xlabel("\n".join(frame.remarks), fontsize=SMALL - 1, labelpad=1)
    scales(ax)
