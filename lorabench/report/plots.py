"""The plots, as PNG bytes: speed-up, memory, phases, speed against memory, ladder. Drawn without pyplot's global state.

Colours are Okabe and Ito's, which the colour-blind tell apart; a verdict also has a marker of its own. One panel a
group, stacked, so that a row stays readable at the width of a README. A figure has at most MAX_ROWS rows
and MAX_PANELS panels: what it leaves out it says, and the tables have it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from lorabench.record.schema import ARMS, TOTAL, Record
from lorabench.report.analysis import Analysis, Row
from lorabench.report.attribution import Rung, ladder
from lorabench.report.cells import fits_alone, whole
from lorabench.report.figure import (
    SMALL,
    WIDTH,
    Strip,
    legend,
    log_axis,
    png,
    rows_figure,
    short,
    size_of,
    stack,
    title,
    widest,
)  # fmt: skip

BLUE, ORANGE, GREEN, VERMILLION, GREY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777", "#CC79A7"
LOOK = {"faster": (BLUE, "^"), "slower": (VERMILLION, "v"), "same": (GREY, "s"), "unclear": (ORANGE, "o")}
LEAST = (PURPLE, "*")  # of what is no candidate: it has no verdict
PHASE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)  # by a phase's place in its kind
MAX_ROWS, MAX_PANELS = 150, 40  # of a figure: more take minutes to draw, and nobody reads them in a picture
LEADER = 0.3  # inches from a panel to the names beside it
NAMES = ("speedup.png", "memory.png", "phases.png", "tradeoff.png", "ladder.png")


class Mark(NamedTuple):
    """One row of a panel: the record and its row of the tidy table."""

    record: Record
    row: Row


class Panel(NamedTuple):
    """One group, as it is drawn."""

    title: str
    kind: Any
    marks: list[Mark]


class Drawn(NamedTuple):
    """A plot: PNG bytes, and in words what it leaves out ('' for nothing)."""

    png: bytes
    left_out: str


Figured = tuple[Figure, str] | None  # with what it leaves out; None where there is nothing to draw


def plots(analysis: Analysis) -> dict[str, Drawn]:
    """File name → plot, for every plot that these records have data for; {} where nothing was measured."""
    panels = [Panel(g.title, g.kind, [Mark(r, analysis.row(r)) for r in analysis.ordered(g)]) for g in analysis.groups]
    made = (_speedup(panels, analysis), _memory(panels), _phases(panels), _tradeoff(panels), _ladder(analysis))
    return {name: Drawn(png(found[0]), found[1]) for name, found in zip(NAMES, made, strict=True) if found}


def _that_fit(panels: Sequence[Panel]) -> tuple[list[Panel], str]:
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


def _measured(panels: Sequence[Panel], keep: Callable[[Mark], bool]) -> tuple[list[Panel], str]:
    """Of each panel the rows to keep, of those panels that have any; and what a figure of them leaves out."""
    kept = [panel._replace(marks=[mark for mark in panel.marks if keep(mark)]) for panel in panels]
    return _that_fit([panel for panel in kept if panel.marks])


def _has(mark: Mark, *columns: str) -> bool:
    return all(math.isfinite(mark.row[column]) for column in columns)


def _strip(panel: Panel, notes: Callable[[Row], tuple[str, str]], axis: str) -> Strip:
    rows = [mark.row for mark in panel.marks]
    return Strip(panel.title, [row["toggles"] for row in rows], [notes(row) for row in rows], axis)


def _total(row: Row) -> tuple[float, float, float]:
    """Speed-up of the whole, with its interval."""
    return row[f"{TOTAL}_speedup"], row[f"{TOTAL}_low"], row[f"{TOTAL}_high"]


def _look(mark: Mark) -> tuple[str, str]:
    """(colour, marker) of a verdict, or of what has none."""
    return LOOK.get(mark.row["verdict"] or "", (GREY, "o")) if mark.record.is_candidate else LEAST


# -- speed-up -------------------------------------------------------------------------------------------------------


def _speedup(panels: Sequence[Panel], analysis: Analysis) -> Figured:
    """Forest: total speed-up with its interval; failed rows as text; published totals as hollow diamonds."""
    if not panels:
        return None
    claims: dict[str, list[tuple[float, float]]] = {}
    for m in analysis.matches:
        if m.claim.quantity == f"{TOTAL}_speedup" and not m.differs:
            claims.setdefault(m.record.key, []).append((m.low, m.high))
    shown, left_out = _that_fit(panels)
    strips = [_strip(p, _says, f"speed-up of {p.kind.total}, 95 % interval (right is faster)") for p in shown]
    figure, axes = rows_figure(strips, left_out)
    for ax, panel in zip(axes, shown, strict=True):
        _forest(ax, panel, claims)
    handles = [Line2D([], [], color=c, marker=m, lw=1.5, label=v) for v, (c, m) in LOOK.items()]
    handles += [Patch(color="#dddddd", label="noise floor")]
    least = dict.fromkeys(m.record.kind for panel in shown for m in panel.marks if not m.record.is_candidate)
    handles += [Line2D([], [], color=LEAST[0], marker=LEAST[1], lw=1.5, label=name) for name in least]
    if claims:
        handles += [Line2D([], [], color="black", marker="D", mfc="white", lw=0.8, label="published")]
    legend(figure, handles)
    return figure, left_out


def _says(row: Row) -> tuple[str, str]:
    """(text in the right margin, its colour): the number, or why there is none."""
    if math.isfinite(row[f"{TOTAL}_speedup"]):
        return whole(row), "black"
    if fits_alone(row):
        return f"only this fits: {row[f'{TOTAL}_candidate_ms']:.4g} ms", BLUE
    return (row["status"] if row["status"] != "ok" else "too few trials"), VERMILLION


def _forest(ax: Axes, panel: Panel, claims: dict[str, list[tuple[float, float]]]) -> None:
    floor = max(mark.row["noise_floor"] for mark in panel.marks)
    ax.axvspan(1 / (1 + floor), 1 + floor, color="#dddddd", lw=0)
    ax.axvline(1, color="black", lw=0.8)
    values = [1 + floor, 1 / (1 + floor)]
    for y, (record, _) in enumerate(panel.marks):
        for claimed in claims.get(record.key, []):
            values += claimed
            ax.plot(claimed, [y, y], "D-", color="black", mfc="white", ms=4.5, lw=0.8, zorder=2)
    timed = [(y, mark) for y, mark in enumerate(panel.marks) if _has(mark, f"{TOTAL}_speedup")]
    for (colour, marker), found in _by(_look, timed).items():
        centres, lows, highs = zip(*(_total(mark.row) for _, mark in found), strict=True)
        values += [*lows, *highs]
        ys = [y for y, _ in found]
        ax.hlines(ys, lows, highs, color=colour, lw=2, zorder=3)
        ax.plot(centres, ys, marker, color=colour, ms=5.5, zorder=4)
    log_axis(ax, "x", values)


def _by(key: Callable[[Mark], Any], marks: Iterable[tuple[Any, Mark]]) -> dict[Any, list[tuple[Any, Mark]]]:
    """Marks of one look together: one artist for all of them draws several times as fast as one for each."""
    found: dict[Any, list[tuple[Any, Mark]]] = {}
    for at, mark in marks:
        found.setdefault(key(mark), []).append((at, mark))
    return found


# -- memory, phases, tradeoff ---------------------------------------------------------------------------------------


def _memory(panels: Sequence[Panel]) -> Figured:
    shown, left_out = _measured(
        panels, lambda mark: _has(mark, "candidate_peak_gib") or _has(mark, "reference_peak_gib")
    )
    if not shown:
        return None
    figure, axes = rows_figure([_strip(p, _saves, "peak allocated, GiB (left is better)") for p in shown], left_out)
    for ax, panel in zip(axes, shown, strict=True):
        ax.plot([m.row["reference_peak_gib"] for m in panel.marks], range(len(panel.marks)), "o", color="black",
                mfc="white", ms=6, zorder=3)  # fmt: skip
        for colour, found in _by(lambda mark: _peak_colour(mark.row), enumerate(panel.marks)).items():
            before, after = ([m.row[f"{arm}_peak_gib"] for _, m in found] for arm in ARMS)
            ys = [y for y, _ in found]
            ax.hlines(ys, before, after, color=colour, lw=2, alpha=0.6)
            ax.plot(after, ys, "o", color=colour, ms=6, zorder=3)
        ax.set_xlim(left=0)
    legend(figure, [
        Line2D([], [], marker="o", color="black", mfc="white", lw=0, label="reference"),
        Line2D([], [], marker="o", color=BLUE, lw=0, label="candidate, less"),
        Line2D([], [], marker="o", color=VERMILLION, lw=0, label="candidate, more"),
    ])  # fmt: skip
    return figure, left_out


def _saves(row: Row) -> tuple[str, str]:
    saved, only = row["memory_saved_pct"], "candidate" if math.isnan(row["reference_peak_gib"]) else "reference"
    return (f"{0.0 - saved:+.1f} %" if math.isfinite(saved) else f"only the {only}"), "black"


def _peak_colour(row: Row) -> str:
    saved = row["memory_saved_pct"]
    return GREY if abs(saved) < 1 else BLUE if not saved < 0 else VERMILLION


def _phases(panels: Sequence[Panel]) -> Figured:
    shown, left_out = _measured(panels, lambda mark: _has(mark, f"{TOTAL}_candidate_ms"))
    if not shown:
        return None
    took = lambda row: (f"{row[f'{TOTAL}_candidate_ms']:.4g} ms", "black")  # noqa: E731
    axis = "median of the candidate's total, ms, divided as the medians of its phases are"
    figure, axes = rows_figure([_strip(p, took, axis) for p in shown], left_out)
    for ax, panel in zip(axes, shown, strict=True):
        _bars(ax, panel)
    handles: list[Any] = [Patch(color=c, label=names) for c, names in _phase_colours(p.kind for p in shown).items()]
    legend(figure, [*handles, Line2D([], [], color="black", lw=1.6, label="its reference, total")])
    return figure, left_out


def _bars(ax: Axes, panel: Panel) -> None:
    ys, left = np.arange(len(panel.marks)), np.zeros(len(panel.marks))
    for widths, colour in zip(phase_widths(panel), itertools.cycle(PHASE_COLOURS), strict=False):
        ax.barh(ys, widths, left=left, color=colour, height=0.68)
        left += widths
    before = [mark.row[f"{TOTAL}_reference_ms"] for mark in panel.marks]
    ax.vlines(before, ys - 0.42, ys + 0.42, color="black", lw=1.6)


def phase_widths(panel: Panel) -> NDArray[np.float64]:
    """ms, shape (phases, rows): the candidate's total, divided as the medians of its phases are. Those medians need not
    add up to the total's, which is the median of the trials' sums: in results/h200/peers they miss it by up to 15 %."""
    medians = np.array([[mark.row[f"{p}_candidate_ms"] for mark in panel.marks] for p in panel.kind.phases])
    total = np.array([mark.row[f"{TOTAL}_candidate_ms"] for mark in panel.marks])
    medians = np.nan_to_num(medians)
    return medians * total / medians.sum(axis=0)


def _phase_colours(kinds: Iterable[Any]) -> dict[str, str]:
    """Colour → the phases that have it."""
    found: dict[str, dict[str, None]] = {}
    for of_kind in kinds:
        for phase, colour in zip(of_kind.phases, itertools.cycle(PHASE_COLOURS), strict=False):
            found.setdefault(colour, {})[phase] = None
    return {colour: " / ".join(names) for colour, names in found.items()}


def _tradeoff(panels: Sequence[Panel]) -> Figured:
    """Speed against memory: above the line is faster, to the right smaller. Names stand in the margin, with leaders."""
    shown, left_out = _measured(
        panels, lambda mark: _has(mark, f"{TOTAL}_speedup", "memory_saved_pct") and not mark.record.is_noise_floor
    )
    if not shown:
        return None
    right = widest(short(mark.row["toggles"]) for panel in shown for mark in panel.marks) + LEADER
    figure, axes = stack([max(len(panel.marks), 10) for panel in shown], 0.75, right, left_out)
    for ax, panel in zip(axes, shown, strict=True):
        _against(ax, panel)
    legend(figure, [Line2D([], [], color=c, marker=m, lw=1.5, label=v) for v, (c, m) in LOOK.items()])
    return figure, left_out


def _against(ax: Axes, panel: Panel) -> None:
    title(ax, panel.title)
    ax.axhline(1, color="black", lw=0.8)
    ax.axvline(0, color="black", lw=0.8)
    values: list[float] = []
    for (colour, marker), found in _by(_look, enumerate(panel.marks)).items():
        saved = [mark.row["memory_saved_pct"] for _, mark in found]
        centres, lows, highs = zip(*(_total(mark.row) for _, mark in found), strict=True)
        ax.vlines(saved, lows, highs, color=colour, lw=1.5)
        ax.plot(saved, centres, marker, color=colour, ms=6, zorder=3)
        values += [*lows, *highs]
    log_axis(ax, "y", values)
    ax.set_ylabel("speed-up, total", fontsize=SMALL)
    ax.set_xlabel("peak memory saved, %", fontsize=SMALL)
    ax.tick_params(labelsize=SMALL)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.06)
    _margin_names(ax, [mark.row for mark in panel.marks])


def _margin_names(ax: Axes, rows: Sequence[Row]) -> None:
    """Names right of the axes, each as near to its point's height as the ones above allow; rows from the fastest."""
    (left, right), (low, high) = ax.get_xlim(), map(math.log, ax.get_ylim())
    gap = 1 / max(len(rows), 10)
    points = [
        ((row["memory_saved_pct"] - left) / (right - left), (math.log(row[f"{TOTAL}_speedup"]) - low) / (high - low))
        for row in rows
    ]
    heights: list[float] = []
    for _, at in points:
        heights.append(min(at, heights[-1] - gap) if heights else at)
    for i in range(len(heights) - 1, -1, -1):  # what was pushed below the axes pushes back
        heights[i] = max(heights[i], gap / 2 + gap * (len(heights) - 1 - i))
    x = 1 + LEADER / (ax.get_position().width * WIDTH)
    leaders = [(point, (x, height)) for point, height in zip(points, heights, strict=True)]
    ax.add_collection(
        LineCollection(leaders, color="#bbbbbb", lw=0.6, transform=ax.transAxes, clip_on=False, zorder=1),
        autolim=False,
    )
    for row, height in zip(rows, heights, strict=True):
        name = short(row["toggles"])
        ax.text(x + 0.01, height, name, transform=ax.transAxes, fontsize=size_of(name), va="center")


# -- ladder ---------------------------------------------------------------------------------------------------------


def _ladder(analysis: Analysis) -> Figured:
    """Waterfall of the time in per cent of the reference; only where a ladder was measured."""
    rungs = {g.title: ladder(g.records, analysis.contrasts) for g in analysis.groups}
    panels = [
        Panel(g.title, g.kind, [Mark(r.record, analysis.row(r.record)) for r in rungs[g.title]])
        for g in analysis.groups if any(r.cumulative for r in rungs[g.title])
    ]  # fmt: skip
    if not panels:
        return None
    shown, left_out = _that_fit(panels)
    drawn = [rungs[panel.title][: len(panel.marks)] for panel in shown]
    axis = "time, % of the reference; with the increment of each rung"
    strips = [
        Strip(p.title, ["reference", *(f"+ {r.added}" for r in own)], [("", "black"), *map(_brings, own)], axis)
        for p, own in zip(shown, drawn, strict=True)
    ]
    figure, axes = rows_figure(strips, left_out)
    for ax, own in zip(axes, drawn, strict=True):
        _waterfall(ax, own)
    legend(figure, [Patch(color=BLUE, label="gains"), Patch(color=VERMILLION, label="costs")])
    return figure, left_out


def _brings(rung: Rung) -> tuple[str, str]:
    """(note, its colour): what a rung adds and what all have brought so far."""
    if rung.cumulative is None:
        return rung.record.status, VERMILLION
    step = f"×{rung.increment.centre:.2f}, " if rung.increment else ""
    return f"{step}in all ×{rung.cumulative.centre:.2f}", "black"


def _waterfall(ax: Axes, rungs: Sequence[Rung]) -> None:
    ax.barh(0, 100, color=GREY, height=0.6)
    level = 100.0
    for y, rung in enumerate(rungs, start=1):
        if rung.cumulative is None:
            continue
        now = 100 / rung.cumulative.centre
        ax.barh(y, now - level, left=level, color=BLUE if now < level else VERMILLION, height=0.6)
        ax.plot([level, level], [y - 1, y], color="#999999", lw=0.7)
        ax.plot([100 / rung.cumulative.high, 100 / rung.cumulative.low], [y, y], color="black", lw=1.2)
        level = now
    ax.set_xlim(left=0)
