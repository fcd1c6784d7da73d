"""The figure to decide by how many jobs share a base: jobs against real tokens a second and against peak memory.

A pair of panels a model, a line a way to train them, over workloads that differ by nothing but the number of their jobs
(alpaca_jobs_1, alpaca_jobs_2, …). Drawn from two such workloads on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from lorabench.report.figure import SMALL, WIDTH, legend, legend_rows, scales, short
from lorabench.report.panels import Figured, Mark, Panel, that_fit
from lorabench.report.tradeoff import ITSELF, Look, looks_of

HEIGHT, LEFT, RIGHT, GAP, FOOT = 2.6, 0.75, 0.2, 0.5, 0.5  # inches: of a panel, beside it, above and below it
AXES = {"tokens_s": "real tokens a second", "peak_gib": "peak, GiB"}


class Point(NamedTuple):
    """What one way to train so many jobs reached."""

    jobs: int
    tokens_s: float
    peak_gib: float


Lines = dict[str, list[Point]]  # by way: the reference, and each candidate by its toggles


def series(panels: Sequence[Panel]) -> dict[str, Lines]:
    """By what the workloads have in common, the lines of each way, by jobs; only of two numbers of jobs or more."""
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for panel in panels:
        for mark in panel.marks:
            if not mark.record.is_candidate:
                continue
            lines = found.setdefault(_family(panel.title, mark), {})
            arm, name = ("reference", ITSELF) if mark.record.is_noise_floor else ("candidate", mark.row["toggles"])
            point = Point(_jobs(mark), *(float(mark.row.get(f"{arm}_{column}", math.nan)) for column in AXES))
            if math.isfinite(point.tokens_s):
                lines.setdefault(name, {})[point.jobs] = point
    ordered = {
        family: {name: [of[n] for n in sorted(of)] for name, of in lines.items()} for family, lines in found.items()
    }
    several = {family: len({p.jobs for own in lines.values() for p in own}) > 1 for family, lines in ordered.items()}
    return {family: lines for family, lines in ordered.items() if several[family]}


def by_jobs(panels: Sequence[Panel]) -> Figured:
    shown, left_out = that_fit(panels)
    found = series(shown)
    if not found:
        return None
    looks = looks_of([name for lines in found.values() for name in lines])
    points = [p for lines in found.values() for own in lines.values() for p in own]
    columns = [c for c in AXES if any(math.isfinite(getattr(p, c)) for p in points)]  # a CPU has no peaks
    labels = [short(name, 48) for name in looks]
    figure, axes = _laid_out(list(found), len(columns), _height_of_key(labels), left_out)
    for pair, lines in zip(axes, found.values(), strict=True):
        for ax, column in zip(pair, columns, strict=True):
            _draw(ax, lines, column, looks)
    legend(figure, [
        Line2D([], [], color=c, marker=m, ms=5, lw=1.2, label=label)
        for label, (c, m) in zip(labels, looks.values(), strict=True)
    ])  # fmt: skip
    return figure, left_out


def _family(title: str, mark: Mark) -> str:
    """The panel's title without the number of jobs."""
    workload = mark.record.workload
    return title.replace(workload, re.sub(r"\d+", "n", workload))


def _jobs(mark: Mark) -> int:
    return max(map(len, mark.record.jobs.values()), default=1)


def _height_of_key(labels: Sequence[str]) -> float:
    """Inches of the legend, in which the longest of its labels says how high a row is."""
    return 0.12 + 0.19 * legend_rows(labels, WIDTH) * max(label.count("\n") + 1 for label in labels)


def _laid_out(titles: Sequence[str], wide: int, above: float, left_out: str) -> tuple[Figure, list[list[Axes]]]:
    """A figure with so many panels beside each other for each title, and inches `above` them for a legend."""
    deep, foot = GAP + HEIGHT + FOOT, 0.25 if left_out else 0.0
    height = len(titles) * deep + above + foot
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    across = WIDTH / wide
    made = []
    for row, title in enumerate(titles):
        bottom = height - above - row * deep - GAP - HEIGHT
        pair = []
        for place in range(wide):
            at = place * across + LEFT
            size = (across - LEFT - RIGHT) / WIDTH, HEIGHT / height
            pair.append(figure.add_axes((at / WIDTH, bottom / height, *size)))
        figure.text(LEFT / WIDTH, (bottom + HEIGHT + 0.12) / height, title, fontsize=SMALL, fontweight="bold")
        made.append(pair)
    if left_out:
        figure.text(0.5, 0.06 / height, left_out, ha="center", va="bottom", fontsize=SMALL)
    return figure, made


def _draw(ax: Axes, lines: Lines, column: str, looks: dict[str, Look]) -> None:
    for name, points in lines.items():
        look = looks[name]
        fill = "white" if name == ITSELF else look.colour
        xs, ys = [p.jobs for p in points], [getattr(p, column) for p in points]
        ax.plot(xs, ys, color=look.colour, marker=look.marker, mfc=fill, ms=5, lw=1.2)
    jobs = sorted({p.jobs for points in lines.values() for p in points})
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(jobs))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([str(n) for n in jobs])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("jobs", fontsize=SMALL)
    ax.set_ylabel(AXES[column], fontsize=SMALL)
    scales(ax)
