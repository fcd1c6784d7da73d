"""The figure of published numbers beside ours: every ratio whose baseline we measured too, on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D

from lorabench.report.analysis import Analysis
from lorabench.report.claim_tables import UNCLEAR, claims_frame, ours
from lorabench.report.claims import SPEEDUP
from lorabench.report.figure import Strip, legend, log_axis, rows_figure
from lorabench.report.panels import BLUE, CIRCLE, GREEN, MAX_ROWS, VERMILLION, Figured
from lorabench.report.words import number

LONGEST = 52  # letters of a stack's name
COLOURS = {"above": BLUE, "within": GREEN, "below": VERMILLION}


def compared(analysis: Analysis) -> list[dict[Any, Any]]:
    """The rows of `claims_frame` whose baseline is the claim's and that have a number of ours."""
    rows = claims_frame(analysis.matches, analysis).to_dict("records")
    return [row for row in rows if not row["baseline_differs"] and math.isfinite(row["measured"])]


def published(analysis: Analysis) -> Figured:
    """The speed-ups among them, see `forest`."""
    return forest(compared(analysis))


def forest(rows: Sequence[dict[Any, Any]]) -> Figured:
    """The speed-ups among rows of `claims_frame` that have a number of ours. Grey: what was published. A panel a
    source, in the order of the claims."""
    every = [b for b in rows if b["quantity"].endswith(f"_{SPEEDUP}")]
    if not every:
        return None
    shown = every[:MAX_ROWS]
    left_out = f"{len(shown)} of {len(every)} published numbers; the tables have them all" if every != shown else ""
    sources = list(dict.fromkeys(b["source"] for b in shown))
    blocks = [[b for b in shown if b["source"] == name] for name in sources]
    axis = "speed-up, 95 % interval of ours"
    strips = [
        Strip(name, [_label(b) for b in own], [_note(b) for b in own], axis)
        for name, own in zip(sources, blocks, strict=True)
    ]
    figure, axes = rows_figure(strips, left_out)
    values = [v for b in shown for v in _ends(b)]
    for ax, own in zip(axes, blocks, strict=True):
        ax.axvline(1, color="black", lw=0.8)
        for y, b in enumerate(own):
            colour = COLOURS.get(b["outcome"], "black")
            ax.plot(_ends(b)[2:], [y, y], "D-", color="#777777", mfc="white", ms=5, lw=3, zorder=2)
            if b["verdict"] != UNCLEAR:  # which has no centre
                ax.plot(b["measured"], y, CIRCLE, color=colour, mfc="white", ms=7, zorder=3)
            ax.plot(_ends(b)[:2], [y, y], "|-", color=colour, ms=5, lw=1.6, zorder=4)
        log_axis(ax, [v for v in values if math.isfinite(v) and v > 0])
    handles = [Line2D([], [], color="#777777", marker="D", mfc="white", lw=3, label="published")]
    handles += [
        Line2D([], [], color=c, marker=CIRCLE, mfc="white", lw=1.6, label=f"ours, {word}")
        for word, c in COLOURS.items()
    ]
    legend(figure, handles)
    return figure, left_out


def _ends(row: dict[Any, Any]) -> list[float]:
    """Of our interval, then of the published range."""
    return [row[name] for name in ("measured_low", "measured_high", "claimed_low", "claimed_high")]


def _label(row: dict[Any, Any]) -> str:
    phase = row["quantity"].removesuffix(f"_{SPEEDUP}").replace("_", " ")
    place = " @ ".join(filter(None, (row["model"], row["workload"])))
    name = row["toggles"] if len(row["toggles"]) <= LONGEST else f"{row['toggles'][: LONGEST - 1]}…"
    return f"{phase}, {place}\n{name}"


def _note(row: dict[Any, Any]) -> tuple[str, str]:
    said = "–".join(dict.fromkeys(number(value) for value in _ends(row)[2:]))
    return f"{said}; ours {ours(row)}", COLOURS.get(row["outcome"], "black")
