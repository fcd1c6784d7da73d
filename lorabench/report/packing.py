"""What another way to batch was predicted to buy, from the samples' lengths alone, beside what it was measured to buy.

A record whose toggle notes its `layout` (its micro-batches, and those that padding would have made) gets three
predictions of plan/packing_gain: by the positions computed; by their FLOPs with attention's; and by costs fitted to the
gains of the same model and reference on all other workloads, which know nothing of the row that they predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pydantic import ValidationError

from lorabench.plan.packing_gain import Batching, Costs, Layout, fitted, gain
from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis
from lorabench.report.cells import AnyTable
from lorabench.report.contrasts import toggles
from lorabench.report.figure import Strip, legend, log_axis, rows_figure
from lorabench.report.panels import BLUE, CIRCLE, GREEN, GREY, MAX_ROWS, ORANGE, Figured
from lorabench.report.words import arrow, interval, number, percent, ratio

NOTE = "layout"
COLUMNS = (
    "model", "workload", "lengths", "toggles", "reference", "reference_efficiency", "candidate_efficiency",
    "reference_micro_batches", "candidate_micro_batches", "by_tokens", "by_flops", "fitted", "measured",
    "measured_low", "measured_high", "verdict", "claimed_low", "claimed_high", "baseline_differs",
)  # fmt: skip
HEADINGS = [
    "model @ workload", "toggle", "efficiency, ref → cand", "micro-batches, ref → cand", "by tokens ×", "by FLOPs ×",
    "fitted elsewhere ×", "measured × [95 %]", "published ×",
]  # fmt: skip
CAPTION = "What the lengths predict, beside what was measured"
# Column → (its name in the figure, colour, marker).
PREDICTIONS = {"by_tokens": ("by tokens", GREY, "|"), "by_flops": ("by FLOPs", ORANGE, "x"),
               "fitted": ("fitted to the other workloads", GREEN, "D")}  # fmt: skip

Place = tuple[tuple[str, frozenset[str]], str]  # (model, reference), workload


class Case(NamedTuple):
    """One record with what its layout says of both of its arms."""

    record: Record
    layout: Layout
    padded: Batching
    own: Batching


def cases(analysis: Analysis) -> list[Case]:
    """The records that tested one toggle, which has noted its layout, and whose reference was padded as that says. A
    note of this name that is none belongs to somebody else's toggle."""
    found = []
    for record in analysis.records:
        if record.status != "ok" or len(record.ablations) != 1 or NOTE not in record.notes:
            continue
        try:
            layout = Layout.model_validate(record.notes[NOTE])
        except ValidationError:
            continue
        padded, own = layout.both
        added = sum(b.positions - b.real for b in padded.batches)
        if record.tokens and added == record.padding("reference"):
            found.append(Case(record, layout, padded, own))
    return found


def packing_frame(analysis: Analysis) -> pd.DataFrame:
    """A row a record, in the order of their groups. reference_efficiency, candidate_efficiency: real tokens / positions
    computed. by_tokens, by_flops, fitted: the predicted speed-up, NaN where too little is known; measured, with its
    interval. lengths: "measured" or "approximate", None of real text. claimed_low, claimed_high: what was published for
    the toggle; baseline_differs: how its baseline was another, '' where it was not."""
    every = cases(analysis)
    elsewhere = _elsewhere(every, analysis)
    claims = {id(m.record): m for m in analysis.matches if m.claim.quantity == f"{TOTAL}_speedup"}
    rows = []
    for case in every:
        record, row, claim = case.record, analysis.row(case.record), claims.get(id(case.record))
        rows.append([
            record.model, record.workload, case.layout.lengths, toggles(record), " + ".join(record.reference),
            case.padded.efficiency, case.own.efficiency, len(case.padded.batches), len(case.own.batches),
            *_predicted(case, elsewhere[_place(record)]),
            *(row[f"{TOTAL}_{name}"] for name in ("speedup", "low", "high")), row["verdict"],
            claim.low if claim else math.nan, claim.high if claim else math.nan, claim.differs if claim else "",
        ])  # fmt: skip
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))


def _elsewhere(every: Sequence[Case], analysis: Analysis) -> dict[Place, Costs | None]:
    """By stack and workload, the costs fitted to the same stack on every other workload."""
    gains = [
        (_place(c.record), (c.padded, c.own, found.centre)) for c in every if (found := analysis.speedup(c.record))
    ]
    return {
        (stack, name): fitted([pair for (own, other), pair in gains if own == stack and other != name])
        for stack, name in {_place(c.record) for c in every}
    }


def _place(record: Record) -> Place:
    return (record.model, frozenset(record.reference)), record.workload


def _predicted(case: Case, elsewhere: Costs | None) -> list[float]:
    both = case.padded, case.own
    return [gain(*both), gain(*both, case.layout.flops), gain(*both, elsewhere) if elsewhere else math.nan]


def packing_tables(analysis: Analysis) -> list[AnyTable]:
    """(caption, headings, rows); [] where no record has a layout."""
    frame = packing_frame(analysis)
    if frame.empty:
        return []
    said = CAPTION
    if (known := frame.dropna(subset=["fitted", "measured"])).shape[0]:
        off = (known["fitted"] / known["measured"] - 1).abs().median()
        said += f"; fitted elsewhere is off by {percent(float(off))} in the median of {len(known)} rows"
    return [(said, HEADINGS, [_texts(row) for row in frame.to_dict("records")])]


def _texts(row: Mapping[Any, Any]) -> list[str]:
    place = f"{row['model']} @ {row['workload']}"
    claimed = _claimed(row)
    other = " (of another baseline)" if row["baseline_differs"] else ""
    return [
        f"{place} ({row['lengths']} lengths)" if row["lengths"] else place,
        row["toggles"],
        arrow(row["reference_efficiency"], row["candidate_efficiency"], percent),
        arrow(row["reference_micro_batches"], row["candidate_micro_batches"], str),
        *(ratio(row[name]) for name in PREDICTIONS),
        _measured(row),
        claimed and claimed + other,
    ]


def _measured(row: Mapping[Any, Any]) -> str:
    """With its interval; of a row without a figure the interval alone, as everywhere."""
    bounds = row["measured_low"], row["measured_high"]
    return interval(*bounds, row["verdict"]) if without_figure(row["verdict"]) else ratio(row["measured"], *bounds)


def _claimed(row: Mapping[Any, Any]) -> str:
    return "–".join(dict.fromkeys(number(row[f"claimed_{end}"]) for end in ("low", "high")))


def packing(analysis: Analysis) -> Figured:
    """The gain of each length distribution and way to batch: measured, and as the lengths predict it; with what was
    published. A panel a model and reference."""
    frame = packing_frame(analysis)
    if frame.empty:
        return None
    shown = frame.head(MAX_ROWS)
    left_out = f"{len(shown)} of {len(frame)} rows; the tables have them all" if len(shown) < len(frame) else ""
    panels = [(stack, own.to_dict("records")) for stack, own in shown.groupby(["model", "reference"], sort=False)]
    alone = shown["reference"].nunique() == 1
    strips = [
        Strip(
            str(model) if alone else f"{model}, over {reference}",
            [_name(row) for row in own], [_note(row) for row in own],
            "speed-up over padded batches, 95 % interval of the measured",
        )
        for (model, reference), own in panels
    ]  # fmt: skip
    figure, axes = rows_figure(strips, left_out)
    for ax, (_, own) in zip(axes, panels, strict=True):
        _draw(ax, own)
    handles = [Line2D([], [], color=BLUE, marker=CIRCLE, mfc="white", lw=1.6, label="measured")]
    handles += [Line2D([], [], color=c, marker=m, mfc="white", lw=0, label=name) for name, c, m in PREDICTIONS.values()]
    if (claimed := shown[shown["claimed_low"].notna()]).shape[0]:
        other = ", another baseline" if (claimed["baseline_differs"] != "").all() else ""
        handles += [Line2D([], [], color="#bbbbbb", lw=4, label=f"published{other}")]
    legend(figure, handles)
    return figure, left_out


def _name(row: Mapping[Any, Any]) -> str:
    about = "≈ " if row["lengths"] == "approximate" else ""
    return f"{about}{row['workload']}\n{row['toggles']}"


def _note(row: Mapping[Any, Any]) -> tuple[str, str]:
    used = arrow(row["reference_efficiency"], row["candidate_efficiency"], lambda x: f"{100 * x:.0f} %")
    return f"{_measured(row)}; {used} real", "black"


def _draw(ax: Axes, rows: Sequence[Mapping[Any, Any]]) -> None:
    values = [row[name] for row in rows for name in (*PREDICTIONS, "measured_low", "measured_high")]
    ax.axvline(1, color="black", lw=0.8)
    for y, row in enumerate(rows):
        claimed = [row["claimed_low"], row["claimed_high"]]
        values += claimed
        ax.plot(claimed, [y, y], color="#bbbbbb", lw=4, solid_capstyle="butt", zorder=1)
        ax.plot([row["measured_low"], row["measured_high"]], [y, y], "|-", color=BLUE, lw=1.6, ms=5, zorder=4)
        if not without_figure(row["verdict"]):
            ax.plot(row["measured"], y, CIRCLE, color=BLUE, mfc="white", ms=7, zorder=3)
        for column, (_, colour, marker) in PREDICTIONS.items():
            ax.plot(row[column], y, marker, color=colour, mfc="white", ms=6, mew=1.4, zorder=5)
    log_axis(ax, [value for value in values if math.isfinite(value) and value > 0])
