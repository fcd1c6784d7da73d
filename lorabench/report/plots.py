"""The plots, as PNG bytes: speed-up, memory, phases, speed against memory, ladder. Drawn without pyplot's global state.

Colours are Okabe and Ito's, which the colour-blind tell apart; a verdict also has a marker of its own. One panel a
model @ workload, stacked, so that a row stays readable at the width of a README.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from lorabench.report.attribution import Rung, groups, ladder
from lorabench.report.claims import match
from lorabench.report.analysis import Session
from lorabench.report.tables import parts, ratio
from lorabench.record.schema import Record

BLUE, ORANGE, GREEN, VERMILLION, GREY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777", "#CC79A7"
LOOK = {"faster": (BLUE, "^"), "slower": (VERMILLION, "v"), "same": (GREY, "s"), "unclear": (ORANGE, "o")}
LIMIT = (PURPLE, "*")  # of a bound on the step: it has no verdict
PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "step": GREEN}
WIDTH, ROW, FRAME = 9.5, 0.27, 0.95  # inches: figure, one row, a panel's title and axis
SMALL = 8.5
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)

NAMES = ("speedup.png", "memory.png", "phases.png", "tradeoff.png", "ladder.png")

Panel = tuple[str, pd.DataFrame]


def plots(records: Sequence[Record], sessions: Sequence[Session] = ()) -> dict[str, bytes]:
    """File name → PNG for every plot that these records have data for; {} where nothing was measured."""
    panels = [(title, part) for title, part, _ in parts(records, sessions)]
    made = (_speedup(panels, records), _memory(panels), _phases(panels), _tradeoff(panels), _ladder(records))
    return {name: _png(figure) for name, figure in zip(NAMES, made, strict=True) if figure is not None}


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})  # the same bytes from the same records
    return buffer.getvalue()


def _stack(rows: Sequence[int], legend: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with one panel under the other, each as high as its number of rows, and room for a legend on top."""
    heights = [max(n, 2) * ROW + FRAME for n in rows]
    top = 0.4 if legend else 0.05
    figure = Figure(figsize=(WIDTH, sum(heights) + top), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - top / (sum(heights) + top)))  # type: ignore[union-attr]
    axes = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=list(handles), loc="upper center", ncols=len(handles), frameon=False, fontsize=SMALL)


def _rows(ax: Axes, title: str, labels: Sequence[str]) -> None:
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ticks = ax.set_yticks(range(len(labels)), [short(x) for x in labels], fontsize=SMALL)
    for tick in ticks:  # two lines have to fit a row
        if "\n" in tick.label1.get_text():
            tick.label1.set(fontsize=0.8 * SMALL, linespacing=0.95)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="x", labelsize=SMALL)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)


def short(label: str, longest: int = 40) -> str:
    """A row's name that fits beside the axis, on two lines if need be; of many toggles the last one, which tells a
    ladder's rungs apart."""
    names = label.split(" + ")
    for i in range(len(names), 0, -1):  # as many as fit on the first line
        first, second = " + ".join(names[:i]), " + ".join(names[i:])
        if max(len(first) + 2, len(second)) <= longest:
            return f"{first} +\n{second}" if second else first
    if len(names) > 1:
        label = f"{len(names) - 1} more + {names[-1]}"
    return label if len(label) <= longest else label[: longest - 1] + "…"


def _log_axis(ax: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic axis of ratios, its ticks round numbers with room between them; 1 always."""
    low, high = min([*values, 0.95]), max([*values, 1.05])
    margin = (high / low) ** 0.06
    span = math.log(high / low)
    kept: list[float] = []
    inside = [t for t in TICKS if low / margin <= t <= high * margin]
    for tick in sorted(inside, key=lambda t: (t != 1, t not in (0.5, 2, 5, 10), t)):
        if all(abs(math.log(tick / k)) > span / 14 for k in kept):
            kept.append(tick)
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low / margin, high * margin)})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(sorted(kept)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:g}×")


# -- speed-up -------------------------------------------------------------------------------------------------------


def _speedup(panels: Sequence[Panel], records: Sequence[Record]) -> Figure | None:
    """Forest: total speed-up with its interval; failed rows as text; published totals as hollow diamonds."""
    if not panels:
        return None
    claims: dict[str, list[tuple[float, float]]] = {}
    for m in match(records):
        if m.claim.quantity == "total_speedup":
            claims.setdefault(m.record.key, []).append((m.low, m.high))
    ordered = [(title, _by_speed(part)) for title, part in panels]
    figure, axes = _stack([len(part) for _, part in ordered])
    for ax, (title, part) in zip(axes, ordered, strict=True):
        _forest(ax, title, part, claims)
    handles = [Line2D([], [], color=c, marker=m, lw=1.5, label=v) for v, (c, m) in LOOK.items()]
    handles += [Patch(color="#dddddd", label="noise floor")]
    if any(part["limit"].any() for _, part in ordered):
        handles += [Line2D([], [], color=LIMIT[0], marker=LIMIT[1], lw=1.5, label="limit")]
    if claims:
        handles += [Line2D([], [], color="black", marker="D", mfc="white", lw=0.8, label="published")]
    _legend(figure, handles)
    return figure


def _by_speed(part: pd.DataFrame) -> pd.DataFrame:
    """The noise record on top, then from fast to slow, failed rows, the limit last."""
    return part.sort_values(["limit", "noise_record", "total_speedup"], ascending=[True, False, False], kind="stable")


def _forest(ax: Axes, title: str, part: pd.DataFrame, claims: dict[str, list[tuple[float, float]]]) -> None:
    floor = float(part["noise_floor"].max())
    ax.axvspan(1 / (1 + floor), 1 + floor, color="#dddddd", lw=0)
    ax.axvline(1, color="black", lw=0.8)
    values = [1 + floor, 1 / (1 + floor)]
    for y, row in enumerate(part.to_dict("records")):
        for low, high in claims.get(row["key"], []):
            values += [low, high]
            ax.plot([low, high], [y, y], color="black", lw=0.8, zorder=2)
            ax.plot([low, high], [y, y], "D", color="black", mfc="white", ms=4.5, lw=0, zorder=2)
        if math.isfinite(row["total_speedup"]):
            values += [row["total_low"], row["total_high"]]
            colour, marker = LIMIT if row["limit"] else LOOK.get(row["verdict"] or "", (GREY, "o"))
            ax.plot([row["total_low"], row["total_high"]], [y, y], color=colour, lw=2, zorder=3)
            ax.plot([row["total_speedup"]], [y], marker, color=colour, ms=5.5, zorder=4)
        _note(ax, y, *_says(row))
    _rows(ax, title, list(part["toggles"]))
    _log_axis(ax, "x", values)
    ax.set_xlabel("speed-up of forward + backward + step, 95 % interval (right is faster)", fontsize=SMALL)


def _says(row: Mapping[Any, Any]) -> tuple[str, str]:
    """(text in the right margin, its colour): the number, or why there is none."""
    if math.isfinite(row["total_speedup"]):
        return ratio(row["total_speedup"], row["total_low"], row["total_high"]), "black"
    if row["status"] == "oom" and row["arm"] == "reference" and math.isfinite(row["total_candidate_ms"]):
        return f"only this fits: {row['total_candidate_ms']:.4g} ms", BLUE
    return (row["status"] if row["status"] != "ok" else "too few trials"), VERMILLION


def _note(ax: Axes, y: float, text: str, colour: str) -> None:
    ax.text(1.01, y, text, transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL, color=colour)


# -- memory, phases, tradeoff ---------------------------------------------------------------------------------------


def _measured(panels: Sequence[Panel], keep: Callable[[pd.DataFrame], pd.Series]) -> list[Panel]:
    kept = [(title, _by_speed(part[keep(part)])) for title, part in panels]
    return [(title, part) for title, part in kept if len(part)]


def _memory(panels: Sequence[Panel]) -> Figure | None:
    shown = _measured(panels, lambda t: t["candidate_peak_gib"].notna() | t["reference_peak_gib"].notna())
    if not shown:
        return None
    figure, axes = _stack([len(part) for _, part in shown])
    for ax, (title, part) in zip(axes, shown, strict=True):
        for y, row in enumerate(part.to_dict("records")):
            before, after, saved = row["reference_peak_gib"], row["candidate_peak_gib"], row["memory_saved_pct"]
            colour = GREY if abs(saved) < 1 else BLUE if not saved < 0 else VERMILLION
            ax.plot([before, after], [y, y], color=colour, lw=2, alpha=0.6)
            ax.plot([before], [y], "o", color="black", mfc="white", ms=6)
            ax.plot([after], [y], "o", color=colour, ms=6)
            only = "candidate" if math.isnan(before) else "reference"
            _note(ax, y, f"{0.0 - saved:+.1f} %" if math.isfinite(saved) else f"only the {only}", "black")
        _rows(ax, title, list(part["toggles"]))
        ax.set_xlim(left=0)
        ax.set_xlabel("peak allocated, GiB (left is better)", fontsize=SMALL)
    _legend(figure, [
        Line2D([], [], marker="o", color="black", mfc="white", lw=0, label="reference"),
        Line2D([], [], marker="o", color=BLUE, lw=0, label="candidate, less"),
        Line2D([], [], marker="o", color=VERMILLION, lw=0, label="candidate, more"),
    ])  # fmt: skip
    return figure


def _phases(panels: Sequence[Panel]) -> Figure | None:
    shown = _measured(panels, lambda t: t["total_candidate_ms"].notna())
    if not shown:
        return None
    figure, axes = _stack([len(part) for _, part in shown])
    for ax, (title, part) in zip(axes, shown, strict=True):
        for y, row in enumerate(part.to_dict("records")):
            left = 0.0
            for phase, colour in PHASE_COLOURS.items():
                width = row.get(f"{phase}_candidate_ms", math.nan)
                ax.barh(y, width, left=left, color=colour, height=0.68)
                left += width if math.isfinite(width) else 0.0
            if math.isfinite(row["total_reference_ms"]):
                ax.plot([row["total_reference_ms"]] * 2, [y - 0.42, y + 0.42], color="black", lw=1.6)
            _note(ax, y, f"{row['total_candidate_ms']:.4g} ms", "black")
        _rows(ax, title, list(part["toggles"]))
        ax.set_xlabel("median of the candidate, ms", fontsize=SMALL)
    handles: list[Any] = [Patch(color=c, label=p) for p, c in PHASE_COLOURS.items()]
    _legend(figure, [*handles, Line2D([], [], color="black", lw=1.6, label="its reference, total")])
    return figure


def _tradeoff(panels: Sequence[Panel]) -> Figure | None:
    """Speed against memory: above the line is faster, to the right smaller. Names stand in the margin, with leaders."""
    shown = _measured(
        panels, lambda t: t["total_speedup"].notna() & t["memory_saved_pct"].notna() & ~t["noise_record"].astype(bool)
    )
    if not shown:
        return None
    figure, axes = _stack([max(len(part), 10) for _, part in shown])
    for ax, (title, part) in zip(axes, shown, strict=True):
        rows = part.to_dict("records")
        ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        ax.axhline(1, color="black", lw=0.8)
        ax.axvline(0, color="black", lw=0.8)
        for row in rows:
            colour, marker = LOOK.get(row["verdict"] or "", (GREY, "o"))
            x = row["memory_saved_pct"]
            ax.plot([x, x], [row["total_low"], row["total_high"]], color=colour, lw=1.5)
            ax.plot([x], [row["total_speedup"]], marker, color=colour, ms=6, zorder=3)
        _log_axis(ax, "y", [v for row in rows for v in (row["total_low"], row["total_high"])])
        _margin_names(ax, rows)
        ax.set_ylabel("speed-up, total", fontsize=SMALL)
        ax.set_xlabel("peak memory saved, %", fontsize=SMALL)
        ax.tick_params(labelsize=SMALL)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.06)
    _legend(figure, [Line2D([], [], color=c, marker=m, lw=1.5, label=v) for v, (c, m) in LOOK.items()])
    return figure


def _margin_names(ax: Axes, rows: Sequence[Mapping[Any, Any]]) -> None:
    """Names right of the axes, each as near to its point's height as the ones above allow; rows from the fastest."""
    low, high = (math.log(y) for y in ax.get_ylim())
    gap = 1 / max(len(rows), 10)
    heights: list[float] = []
    for row in rows:
        at = (math.log(row["total_speedup"]) - low) / (high - low)
        heights.append(min(at, heights[-1] - gap) if heights else at)
    for i in range(len(heights) - 1, -1, -1):  # what was pushed below the axes pushes back
        heights[i] = max(heights[i], gap / 2 + gap * (len(heights) - 1 - i))
    for row, height in zip(rows, heights, strict=True):
        ax.annotate(
            short(row["toggles"]), (row["memory_saved_pct"], row["total_speedup"]), (1.04, height),
            textcoords="axes fraction", fontsize=SMALL, va="center",
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "lw": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


# -- ladder ---------------------------------------------------------------------------------------------------------


def _ladder(records: Sequence[Record]) -> Figure | None:
    """Waterfall of a step's time in per cent of the reference; only where a ladder was measured."""
    found = [(title, ladder(members)) for title, members in groups(records).items()]
    shown = [(title, rungs) for title, rungs in found if any(r.cumulative for r in rungs)]
    if not shown:
        return None
    figure, axes = _stack([len(rungs) + 1 for _, rungs in shown])
    for ax, (title, rungs) in zip(axes, shown, strict=True):
        _waterfall(ax, rungs)
        _rows(ax, title, ["reference", *(f"+ {r.added}" for r in rungs)])
        ax.set_xlabel("time of a step, % of the reference; with the increment of each rung", fontsize=SMALL)
    _legend(figure, [Patch(color=BLUE, label="gains"), Patch(color=VERMILLION, label="costs")])
    return figure


def _waterfall(ax: Axes, rungs: Sequence[Rung]) -> None:
    ax.barh(0, 100, color=GREY, height=0.6)
    level = 100.0
    for y, rung in enumerate(rungs, start=1):
        if rung.cumulative is None:
            _note(ax, y, rung.record.status, VERMILLION)
            continue
        now = 100 / rung.cumulative.centre
        ax.barh(y, now - level, left=level, color=BLUE if now < level else VERMILLION, height=0.6)
        ax.plot([level, level], [y - 1, y], color="#999999", lw=0.7)
        ax.plot([100 / rung.cumulative.high, 100 / rung.cumulative.low], [y, y], color="black", lw=1.2)
        step = f"×{rung.increment.centre:.2f}, " if rung.increment else ""
        _note(ax, y, f"{step}in all ×{rung.cumulative.centre:.2f}", "black")
        level = now
    ax.set_xlim(left=0)
