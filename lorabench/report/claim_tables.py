"""Published numbers beside ours, as tables of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from lorabench.report.analysis import Analysis
from lorabench.report.cells import AnyTable
from lorabench.report.claims import Match, Source, claims_frame, measured, outcome, said
from lorabench.report.contrasts import Contrasts, toggles
from lorabench.report.words import number, ratio

CLAIMS = ["toggle", "quantity", "claimed", "measured", "measured is", "their baseline and hardware", "source"]


def claim_tables(analysis: Analysis) -> list[AnyTable]:
    """Published numbers beside ours, as (caption, headings, rows). A source whose claims several of our candidates test
    is a table of its own, in the source's order, a column a candidate; of all others each pair is a row, in words."""
    made, beside = [], set()
    found = sorted((m for m in analysis.matches if not m.claim.over), key=lambda m: m.source.title)
    for source, own in itertools.groupby(found, lambda m: m.source):
        if table := _side_by_side(source, list(own), analysis):
            made.append(table)
            beside.add(source.title)
    if rows := claim_rows(analysis, but=beside):
        made.append(("Published numbers beside ours", CLAIMS, rows))
    return made


def _side_by_side(source: Source, found: Sequence[Match], analysis: Analysis) -> AnyTable | None:
    """A row a claim and cell, a column a candidate and reference; None where no claim meets two of these."""
    titles = {id(r): group.title for group in analysis.groups for r in group.records}
    order, claims = {id(r): i for i, r in enumerate(analysis.records)}, {id(c): i for i, c in enumerate(source.claims)}
    columns: dict[tuple[str, ...], str] = {}
    rows: dict[tuple[int, str], tuple[list[str], dict[tuple[str, ...], str]]] = {}
    for m in sorted(found, key=lambda m: (claims[id(m.claim)], order[id(m.record)])):
        place = f"{m.record.model} @ {m.record.workload}"
        column = (toggles(m.record), *m.record.reference)
        against = f", {_other_baseline(m.differs)}" if m.differs else titles[id(m.record)].removeprefix(place)
        columns.setdefault(column, toggles(m.record) + against)
        head = [place, _quantity(m.claim.quantity), _range(m.claim.low, m.claim.high)]
        rows.setdefault((claims[id(m.claim)], place), (head, {}))[1][column] = _beside(m, analysis.contrasts)
    if any(m.inverted for m in found) or max(len(cells) for _, cells in rows.values()) < 2:
        return None
    caption = f"{source.title} ({source.publisher}; {source.hardware}): published beside measured"
    headings = ["model @ workload", "quantity", "published", *columns.values()]
    return caption, headings, [[*head, *(cells.get(c, "") for c in columns)] for head, cells in rows.values()]


def _beside(m: Match, contrasts: Contrasts) -> str:
    value, low, high = measured(m.record, m.claim, contrasts)
    missing = "not measured here" if m.record.status == "ok" else m.record.status
    how = said(m.record, m.claim).get("how")
    parts = ratio(value, low, high), outcome(m, contrasts), how and f"({how})"
    return " ".join(filter(None, parts)) if math.isfinite(value) else missing


def _other_baseline(differs: str) -> str:
    return f"against another baseline: {differs}"


def _quantity(name: str) -> str:
    return name.replace("_", " ").replace(" pct", " %")


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)}–{number(high)}"


def claim_rows(analysis: Analysis, but: Collection[str] = ()) -> list[list[str]]:
    """Rows under CLAIMS: published numbers beside ours, in words and with what differs; not of the sources `but`."""
    rows = []
    for c in claims_frame(analysis.matches, analysis.contrasts).to_dict("records"):
        if c["source"] in but:
            continue
        remarks = ["inverted: the source goes the other way"] if c["inverted"] else []
        remarks += [f"in place of {c['stands_for']}"] if c["stands_for"] else []
        remarks += [c["how"]] if c["how"] else []
        verdict = _other_baseline(c["baseline_differs"]) if c["baseline_differs"] else c["outcome"]
        found = ratio(c["measured"], c["measured_low"], c["measured_high"]) if math.isfinite(c["measured"]) else ""
        missing = "not measured here" if c["status"] == "ok" else c["status"]
        rows.append([
            f"{c['toggles']}, {' @ '.join(filter(None, (c['model'], c['workload'])))}", _quantity(c["quantity"]),
            _range(c["claimed_low"], c["claimed_high"]), found or missing,
            " ".join([verdict, *(f"({r})" for r in remarks)]).strip(),
            f"{c['baseline']}; {c['hardware']}", c["source"],
        ])  # fmt: skip
    return rows
