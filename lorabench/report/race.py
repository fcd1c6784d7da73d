"""The race: a bar of milliseconds an arm, the fastest first, its phases stacked, with the 95 % interval of their sum.

The same figure as the page's, for a paper or a README. What failed stands below in grey with its status, and the least
work that there is is a line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lorabench.record.schema import ARMS, TOTAL
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Row
from lorabench.report.figure import Strip, legend, rows_figure
from lorabench.report.panels import BLUE, GREEN, GREY, LEAST, ORANGE, PURPLE, VERMILLION, Figured, Mark, Panel, with_any
from lorabench.report.words import number

PHASE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)  # by a phase's place in its kind


class Bar(NamedTuple):
    """`phases`: ms of each, stretched to the median of their sum, which medians need not add up to: in
    results/h200/peers they miss it by up to 15 %. `low`, `high`: of the sum. No phases: it has no time."""

    label: str
    note: str
    phases: list[float]
    low: float = math.nan
    high: float = math.nan


def race(panels: Sequence[Panel]) -> Figured:
    shown, left_out = with_any(panels, lambda mark: any(mark.has(f"{TOTAL}_{arm}_ms") for arm in ARMS))
    if not shown:
        return None
    lined = [bars(panel) for panel in shown]
    strips = [
        Strip(p.title, [b.label for b in own], [(b.note, "black" if b.phases else GREY) for b in own],
              f"ms, {p.kind.total} (left is better)")
        for p, own in zip(shown, lined, strict=True)
    ]  # fmt: skip
    figure, axes = rows_figure(strips, left_out)
    limits = [_draw(ax, panel, own) for ax, panel, own in zip(axes, shown, lined, strict=True)]
    phases = dict.fromkeys(phase for panel in shown for phase in panel.kind.phases)
    handles = [Patch(color=c, label=p) for p, c in zip(phases, itertools.cycle(PHASE_COLOURS), strict=False)]
    handles += [Line2D([], [], color="black", lw=0.9, marker="|", ms=5, label="95 % interval")]
    handles += [Line2D([], [], color=LEAST[0], lw=1.6, label="least work")] if any(limits) else []
    legend(figure, handles)
    return figure, left_out


def bars(panel: Panel) -> list[Bar]:
    """The reference once, each candidate, and what has no time, in that order of speed."""
    tried = [mark for mark in panel.marks if mark.record.is_candidate and not mark.record.is_noise_floor]
    itself = [mark for mark in panel.marks if mark.record.is_noise_floor] + tried
    base = next((mark for mark in itself if mark.has(f"{TOTAL}_reference_ms")), None)
    made = [_bar(mark, "candidate", panel) for mark in tried]
    made += [_bar(base, "reference", panel)] if base else []
    return sorted(made, key=lambda bar: sum(bar.phases) if bar.phases else math.inf)


def _bar(mark: Mark, arm: str, panel: Panel) -> Bar:
    row = mark.row
    label = "reference" if arm == "reference" else row["toggles"]
    whole = row[f"{TOTAL}_{arm}_ms"]
    if not math.isfinite(whole):
        return Bar(label, row["status"].replace("_", " ") if row["status"] != "ok" else "too few trials", [])
    own = [ms if math.isfinite(ms := row[f"{phase}_{arm}_ms"]) else 0.0 for phase in panel.kind.phases]
    widths = [ms * whole / max(sum(own), 1e-9) for ms in own]
    times = f", {_times(row)}" if arm == "candidate" else ""
    return Bar(label, f"{number(whole)} ms{times}", widths, row[f"{TOTAL}_{arm}_ms_low"], row[f"{TOTAL}_{arm}_ms_high"])


def _times(row: Row) -> str:
    """The ratio; without a figure its interval, and of what only fits alone that."""
    centre, low, high = (row[f"{TOTAL}_{c}"] for c in ("speedup", "low", "high"))
    if not math.isfinite(centre):
        return "only this fits" if row["status"] == "oom" else "no ratio"
    return f"{number(low)} to {number(high)} ×" if without_figure(row["verdict"]) else f"{number(centre)} ×"


def _draw(ax: Axes, panel: Panel, own: Sequence[Bar]) -> bool:
    """Whether the panel has a line of the least work."""
    for y, bar in enumerate(own):
        left = 0.0
        for width, colour in zip(bar.phases, itertools.cycle(PHASE_COLOURS), strict=False):
            ax.barh(y, width, left=left, color=colour, height=0.62)
            left += width
    timed = [(y, bar) for y, bar in enumerate(own) if bar.phases]
    ys, lows, highs = [y for y, _ in timed], [bar.low for _, bar in timed], [bar.high for _, bar in timed]
    ax.hlines(ys, lows, highs, color="black", lw=0.9)
    ax.plot([*lows, *highs], [*ys, *ys], "|", color="black", ms=5, mew=0.9)
    least = next((m.row[f"{TOTAL}_candidate_ms"] for m in panel.marks if not m.record.is_candidate), math.nan)
    shown = math.isfinite(least) and least < 3 * max(highs)
    if shown:
        ax.axvline(least, color=LEAST[0], lw=1.6)
    ax.set_xlim(left=0)
    return shown
