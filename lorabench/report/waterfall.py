"""The ladder as a waterfall in milliseconds: from the start, rung by rung, to the end. Its bars add up as labelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lorabench.record.schema import DID_NOT_APPLY
from lorabench.report.analysis import Analysis
from lorabench.report.attribution import Rung, ladder
from lorabench.report.attribution_tables import cumulative, increment, increment_is_clear
from lorabench.report.figure import Strip, legend, rows_figure
from lorabench.report.panels import BLUE, GREY, VERMILLION, Figured, Mark, Panel, that_fit

UNCLEAR = "#bbbbbb"  # of a rung whose interval has 1 in it
PAIRED = "ms: the start's beside the end, divided by each rung's paired ratio; its 95 % interval"
UNPAIRED = "ms: medians of each rung's own cell; 95 % interval of its ratio to the one below it"


def waterfall(analysis: Analysis) -> Figured:
    """A panel a ladder with a time; None where there is none."""
    rungs = {g.title: ladder(g.records, analysis.contrasts) for g in analysis.groups}
    panels = [
        Panel(g.title, g.kind, [Mark(r.record, analysis.row(r.record)) for r in rungs[g.title]])
        for g in analysis.groups if any(r.cumulative for r in rungs[g.title])
    ]  # fmt: skip
    if not panels:
        return None
    shown, left_out = that_fit(panels)
    drawn = [rungs[panel.title][: len(panel.marks)] for panel in shown]
    figure, axes = rows_figure([_strip(p.title, own, analysis) for p, own in zip(shown, drawn, strict=True)], left_out)
    for ax, own in zip(axes, drawn, strict=True):
        _draw(ax, own, analysis)
    handles: list[Any] = [Patch(color=GREY, label="start, end"), Patch(color=BLUE, label="gains")]
    handles += [Patch(color=VERMILLION, label="costs"), Patch(color=UNCLEAR, label="unclear")]
    legend(figure, [*handles, Line2D([], [], color="black", lw=1.2, label="95 % interval")])
    return figure, left_out


def _timed(rungs: Sequence[Rung]) -> list[Rung]:
    return [rung for rung in rungs if rung.cumulative]


def _strip(title: str, rungs: Sequence[Rung], analysis: Analysis) -> Strip:
    last = _timed(rungs)[-1]
    decimals = _decimals(last.start)
    labels = ["start", *(f"{'' if r.record.status in DID_NOT_APPLY else '+ '}{r.added}" for r in rungs), "end"]
    first, end = (
        f"{last.start:.{decimals}f} ms",
        f"{last.after:.{decimals}f} ms, in all {_times(cumulative(last, analysis))}",
    )
    return Strip(
        title, labels, [(first, "black"), *(_brings(r, decimals, analysis) for r in rungs), (end, "black")],
        UNPAIRED if any(r.unpaired for r in rungs) else PAIRED,
    )  # fmt: skip


def _decimals(start: float) -> int:
    """Of all milliseconds in a panel, so that what is printed adds up as well: four digits of the start."""
    return max(3 - math.floor(math.log10(start)), 0)


def _brings(rung: Rung, decimals: int, analysis: Analysis) -> tuple[str, str]:
    """(what a rung adds to those below it, or why it has no time; its colour)."""
    if rung.cumulative is None:
        return rung.record.status.replace("_", " "), VERMILLION
    if rung.increment is None:
        return f"{rung.after:.{decimals}f} ms, in all {_times(cumulative(rung, analysis))}", "black"
    change = rung.after - rung.before
    return f"{'−' if change < 0 else '+'}{abs(change):.{decimals}f} ms, {_times(increment(rung, analysis))}", "black"


def _times(said: str) -> str:
    return said if said[0].isalpha() else f"×{said}"


def _draw(ax: Axes, rungs: Sequence[Rung], analysis: Analysis) -> None:
    timed = _timed(rungs)
    start = level = timed[0].start
    unpaired = any(rung.unpaired for rung in rungs)
    ax.barh([0, len(rungs) + 1], [start, timed[-1].after], color=GREY, height=0.6)
    at = 0
    for y, rung in enumerate(rungs, start=1):
        if rung.cumulative is None:
            continue
        ax.barh(y, rung.after - level, left=level, color=_colour(rung, level, analysis), height=0.6)
        ax.plot([level, level], [at + 0.3, y + 0.3], color="#999999", lw=0.7)
        base, ratio = (rung.before, rung.increment) if unpaired and rung.increment else (start, rung.cumulative)
        ax.plot([base / ratio.high, base / ratio.low], [y, y], color="black", lw=1.2)
        level, at = rung.after, y
    ax.plot([level, level], [at + 0.3, len(rungs) + 0.7], color="#999999", lw=0.7)
    ax.set_xlim(left=0)


def _colour(rung: Rung, level: float, analysis: Analysis) -> str:
    if rung.increment and not increment_is_clear(rung, analysis):
        return UNCLEAR
    return BLUE if rung.after < level else VERMILLION
