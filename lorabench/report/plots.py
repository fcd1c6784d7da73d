"""The plots: race, speed-up, memory, time against memory, jobs, published numbers, packing, ladder; as PNG and as SVG.

Drawn without pyplot's global state. One panel a group, stacked, so that a row stays readable at the width of a README;
panels that belong together share their axis. Of many groups the speed-up is a heat map. What a figure leaves out it
says, and the tables have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lorabench.record.schema import ARMS, TOTAL
from lorabench.report.analysis import Analysis, Row
from lorabench.report.by_jobs import by_jobs
from lorabench.report.cells import fits_alone, host, whole
from lorabench.report.figure import Strip, legend, log_axis, png, rows_figure, svg
from lorabench.report.heatmap import heat_map
from lorabench.report.packing import packing
from lorabench.report.panels import (
    BLUE,
    GREY,
    LEAST,
    LOOK,
    MANY,
    VERMILLION,
    Figured,
    Panel,
    by,
    look,
    panels_of,
    that_fit,
    with_any,
)
from lorabench.report.published import published
from lorabench.report.race import race
from lorabench.report.tradeoff import tradeoff
from lorabench.report.waterfall import waterfall

NAMES = ("race", "speedup", "memory", "tradeoff", "jobs", "published", "packing", "ladder")
SUFFIXES = (".png", ".svg")


class Drawn(NamedTuple):
    """A plot."""

    png: bytes
    svg: bytes


def plots(analysis: Analysis) -> dict[str, Drawn]:
    """Name → plot, for every plot that these records have data for; {} where nothing was measured."""
    return {name: Drawn(png(figure), svg(figure, name)) for name, (figure, _) in figures(analysis).items()}


def figures(analysis: Analysis, panels: Sequence[Panel] | None = None) -> dict[str, tuple[Figure, str]]:
    """The same as figures, with what each leaves out. `panels`: those of the analysis to draw, all unless given; what
    has no panels (published, packing, ladder) is then of the whole analysis as before."""
    panels = panels_of(analysis) if panels is None else panels
    with rc_context({"text.parse_math": False}):  # a name is a name, whatever dollars it has
        speed = heat_map(panels) if len(panels) > MANY else _speedup(panels, analysis)
        made = (
            race(panels), speed, _memory(panels), tradeoff(panels), by_jobs(panels), published(analysis),
            packing(analysis), waterfall(analysis),
        )  # fmt: skip
    return {name: figured for name, figured in zip(NAMES, made, strict=True) if figured}


def _strip(panel: Panel, notes: Callable[[Row], tuple[str, str]], axis: str) -> Strip:
    rows = [mark.row for mark in panel.marks]
    return Strip(panel.title, [row["toggles"] for row in rows], [notes(row) for row in rows], axis, panel.headings)


def _failure(row: Row) -> tuple[str, str]:
    """What stands in place of a number, and its colour."""
    return (row["status"] if row["status"] != "ok" else "too few trials"), VERMILLION


# -- speed-up -------------------------------------------------------------------------------------------------------


def _speedup(panels: Sequence[Panel], analysis: Analysis) -> Figured:
    """Forest: total speed-up with its interval and the sessions' own ratios; failed rows as text; published totals as
    hollow diamonds. All panels of a kind have one axis."""
    if not panels:
        return None
    claims: dict[str, list[tuple[float, float]]] = {}
    for m in analysis.matches:
        if m.claim.quantity == f"{TOTAL}_speedup" and not m.differs:
            claims.setdefault(m.record.key, []).append((m.low, m.high))
    shown, left_out = that_fit(panels)
    strips = [_strip(p, _says, f"speed-up of {p.kind.total}, 95 % interval (right is faster)") for p in shown]
    figure, axes = rows_figure(strips, left_out)
    values: dict[str, list[float]] = {}
    for ax, panel in zip(axes, shown, strict=True):
        values.setdefault(panel.kind.name, []).extend(_forest(ax, panel, claims, analysis))
    for ax, panel in zip(axes, shown, strict=True):
        log_axis(ax, values[panel.kind.name])
    marks = [mark for panel in shown for mark in panel.marks]
    there = {mark.row["verdict"] for mark in marks}
    handles: list[Any] = [
        Line2D([], [], color=c, marker=m or "|", mfc="white", lw=1.5, label=v)
        for v, (c, m) in LOOK.items()
        if v in there
    ]
    handles += [Patch(color="#dddddd", label="noise floor")]
    least = dict.fromkeys(mark.record.kind for mark in marks if not mark.record.is_candidate)
    handles += [Line2D([], [], color=LEAST[0], marker=LEAST[1], lw=1.5, label=name) for name in least]
    if any(mark.host_bound for mark in marks):
        handles += [Line2D([], [], color="black", lw=1.5, ls=":", label="host-bound")]
    if any(mark.row["sessions"] > 1 for mark in marks):
        handles += [Line2D([], [], color="black", marker=".", lw=0, label="one session")]
    if claims:
        handles += [Line2D([], [], color="black", marker="D", mfc="white", lw=0.8, label="published")]
    legend(figure, handles)
    return figure, left_out


def _says(row: Row) -> tuple[str, str]:
    """(text in the right margin, its colour): the number, milliseconds where it would be one of hosts, or why there is
    none."""
    if math.isfinite(row[f"{TOTAL}_speedup"]):
        hosts = host(row)
        return (f"ms (host): {hosts}" if hosts else whole(row)), "black"
    if fits_alone(row):
        return f"only this fits: {row[f'{TOTAL}_candidate_ms']:.4g} ms", BLUE
    return _failure(row)


def _forest(ax: Axes, panel: Panel, claims: dict[str, list[tuple[float, float]]], analysis: Analysis) -> list[float]:
    """Draws the rows; returns all that the axis has to hold. The interval lies on a hollow marker, or a narrow one
    would hide behind it."""
    floor = max((f for mark in panel.marks if math.isfinite(f := mark.row["noise_floor"])), default=0.0)
    ax.axvspan(1 / (1 + floor), 1 + floor, color="#dddddd", lw=0)
    ax.axvline(1, color="black", lw=0.8)
    values = [1 + floor, 1 / (1 + floor)]
    for y, mark in zip(panel.ys, panel.marks, strict=True):
        for claimed in claims.get(mark.record.key, []):
            ends = [end for end in claimed if 0 < end < math.inf]  # of "at least" there is but one
            values += ends
            ax.plot(ends, [y] * len(ends), "D-", color="black", mfc="white", ms=4.5, lw=0.8, zorder=2)
        if mark.row["sessions"] > 1:
            own = [c.centre for c in analysis.contrasts.sessions(mark.record)]
            values += own
            ax.plot(own, [y + 0.32] * len(own), ".", color="black", ms=3, zorder=5)
    timed = [(y, mark) for y, mark in zip(panel.ys, panel.marks, strict=True) if mark.has(f"{TOTAL}_speedup")]
    for (colour, marker, waits), found in by(lambda mark: (*look(mark), mark.host_bound), timed).items():
        centres, lows, highs = (
            [mark.row[f"{TOTAL}_{column}"] for _, mark in found] for column in ("speedup", "low", "high")
        )
        values += [*lows, *highs]
        ys = [y for y, _ in found]
        ax.plot(centres, ys, marker=marker or "none", ls="none", color=colour, mfc="white", ms=7, zorder=3)
        ax.hlines(ys, lows, highs, color=colour, lw=1.6, ls=":" if waits else "-", zorder=4)
        ax.plot([*lows, *highs], [*ys, *ys], "|", color=colour, ms=5, mew=1.2, zorder=4)
    return values


# -- memory and phases ----------------------------------------------------------------------------------------------


def _one_scale(axes: Sequence[Axes], models: Sequence[str]) -> None:
    """From 0 to the same end in all panels of a model."""
    ends: dict[str, float] = {}
    for ax, model in zip(axes, models, strict=True):
        ends[model] = max(ax.get_xlim()[1], ends.get(model, 0.0))
    for ax, model in zip(axes, models, strict=True):
        ax.set_xlim(0, ends[model])


def _memory(panels: Sequence[Panel]) -> Figured:
    peaks = [f"{arm}_peak_gib" for arm in ARMS]
    shown, left_out = with_any(panels, lambda mark: any(mark.has(peak) for peak in peaks))
    if not shown:
        return None
    figure, axes = rows_figure([_strip(p, _saves, "peak allocated, GiB (left is better)") for p in shown], left_out)
    for ax, panel in zip(axes, shown, strict=True):
        rows = [mark.row for mark in panel.marks]
        ax.plot([row[peaks[0]] for row in rows], panel.ys, "o", color="black", mfc="white", ms=6, zorder=3)
        for colour, found in by(lambda mark: _peak_colour(mark.row), zip(panel.ys, panel.marks, strict=True)).items():
            before, after = ([m.row[peak] for _, m in found] for peak in peaks)
            ys = [y for y, _ in found]
            ax.hlines(ys, before, after, color=colour, lw=2, alpha=0.6)
            ax.plot(after, ys, "o", color=colour, ms=6, zorder=3)
    _one_scale(axes, [panel.marks[0].record.model for panel in shown])
    legend(figure, [
        Line2D([], [], marker="o", color="black", mfc="white", lw=0, label="reference"),
        Line2D([], [], marker="o", color=BLUE, lw=0, label="candidate, less"),
        Line2D([], [], marker="o", color=GREY, lw=0, label="within 1 %"),
        Line2D([], [], marker="o", color=VERMILLION, lw=0, label="candidate, more"),
    ])  # fmt: skip
    return figure, left_out


def _saves(row: Row) -> tuple[str, str]:
    saved, known = row["memory_saved_pct"], [arm for arm in ARMS if math.isfinite(row[f"{arm}_peak_gib"])]
    if math.isfinite(saved):
        return f"{0.0 - saved:+.1f} %", "black"
    return (f"only the {known[0]}", "black") if known else _failure(row) if row["status"] != "ok" else ("", "black")


def _peak_colour(row: Row) -> str:
    saved = row["memory_saved_pct"]
    return GREY if abs(saved) < 1 else BLUE if not saved < 0 else VERMILLION
