"""Published numbers beside ours, as tables of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from lorabench.record.schema import TOTAL
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis
from lorabench.report.cells import AnyTable
from lorabench.report.claims import UNKNOWN, Match, Source, against, measured, said
from lorabench.report.contrasts import toggles
from lorabench.report.words import interval, number, ratio

CLAIMS = ["toggle", "quantity", "claimed", "measured", "measured is", "their baseline and hardware", "source"]
# Of `claims_frame`.
COLUMNS = [
    "source", "claim", "model", "workload", "toggles", "quantity", "claimed_low", "claimed_high", "statistic",
    "measured", "measured_low", "measured_high", "verdict", "outcome", "status", "how", "baseline_differs",
    "stands_for", "inverted", "hardware", "baseline", "wording", "note", "caveat",
]  # fmt: skip
UNCLEAR = "unclear"


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
        name = analysis.row(m.record)["toggles"]
        column = (name, *m.record.reference)
        against = f", {_other_baseline(m.differs)}" if m.differs else titles[id(m.record)].removeprefix(place)
        columns.setdefault(column, name + against)
        head = [place, quantity(m.claim.compared), _range(m.claim.low, m.claim.high)]
        rows.setdefault((claims[id(m.claim)], place), (head, {}))[1][column] = _beside(m, analysis)
    if any(m.inverted for m in found) or max(len(cells) for _, cells in rows.values()) < 2:
        return None
    caption = f"{source.title} ({source.publisher}; {source.hardware}): published beside measured"
    headings = ["model @ workload", "quantity", "published", *columns.values()]
    return caption, headings, [[*head, *(cells.get(c, "") for c in columns)] for head, cells in rows.values()]


def _beside(m: Match, analysis: Analysis) -> str:
    row = _row(m, analysis)
    missing = "not measured here" if row["status"] == "ok" else row["status"]
    parts = ours(row), row["outcome"], row["how"] and f"({row['how']})"
    return " ".join(filter(None, parts)) if math.isfinite(row["measured"]) else missing


def judged(m: Match, found: tuple[float, float, float], analysis: Analysis) -> str | None:
    """The verdict of our row. A phase has none of its own: in an unclear row it is unclear where its interval holds
    1."""
    verdict = analysis.row(m.record)["verdict"]
    beyond = m.claim.of_phase != TOTAL and not found[1] <= 1 <= found[2]
    return None if verdict == UNCLEAR and beyond else verdict


def ours(row: Mapping[Any, Any]) -> str:
    """Our number in a row of `claims_frame`, with its interval; where the verdict has no figure the interval alone."""
    found = row["measured"], row["measured_low"], row["measured_high"]
    bare = without_figure(row["verdict"]) and math.isfinite(found[1])
    return interval(*found[1:], row["verdict"]) if bare else ratio(*found)


def _other_baseline(differs: str) -> str:
    return f"against another baseline: {differs}"


def quantity(name: str) -> str:
    """A quantity's name in words."""
    return name.replace("_", " ").replace(" pct", " %")


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)}–{number(high)}"


def claim_rows(analysis: Analysis, but: Collection[str] = ()) -> list[list[str]]:
    """Rows under CLAIMS: published numbers beside ours, in words and with what differs; not of the sources `but`."""
    rows = []
    for c in claims_frame(analysis.matches, analysis).to_dict("records"):
        if c["source"] in but:
            continue
        remarks = ["inverted: the source goes the other way"] if c["inverted"] else []
        remarks += [f"in place of {c['stands_for']}"] if c["stands_for"] else []
        remarks += [c["how"]] if c["how"] else []
        verdict = _other_baseline(c["baseline_differs"]) if c["baseline_differs"] else c["outcome"]
        missing = "not measured here" if c["status"] == "ok" else c["status"]
        rows.append([
            f"{c['toggles']}, {' @ '.join(filter(None, (c['model'], c['workload'])))}", quantity(c["quantity"]),
            _range(c["claimed_low"], c["claimed_high"]), ours(c) or missing,
            " ".join([verdict, *(f"({r})" for r in remarks)]).strip(),
            f"{c['baseline']}; {c['hardware']}", c["source"],
        ])  # fmt: skip
    return rows


def claims_frame(matches: Sequence[Match], analysis: Analysis) -> pd.DataFrame:
    """Claims beside our numbers, a row a pair (or a row a claim and candidate, where it is over several cells); empty
    where none applies. verdict: see `judged`; an average of several cells is
    unclear where its interval holds 1."""
    groups: dict[Any, list[Match]] = {}
    for n, m in enumerate(matches):
        key = (id(m.claim), toggles(m.record), frozenset(m.record.reference)) if m.claim.over else n
        groups.setdefault(key, []).append(m)
    rows = [_row(m[0], analysis) | (_over(m, analysis) if m[0].claim.over else {}) for m in groups.values()]
    return pd.DataFrame(rows, columns=pd.Index(COLUMNS))


def _over(matches: Sequence[Match], analysis: Analysis) -> dict[str, Any]:
    """What differs from the row of the first one: the geometric mean of these cells, or the best of them."""
    claim, done = matches[0].claim, [m for m in matches if m.record.status == "ok"]
    found, verdict = UNKNOWN, None
    if done and claim.statistic == "average":
        together = analysis.contrasts.mean([m.record for m in done], (claim.of_phase,))
        found = together.speedup if together else UNKNOWN
        verdict = UNCLEAR if found[1] <= 1 <= found[2] else None
    elif done:
        numbers = [measured(m.record, claim, analysis.contrasts) for m in done]
        found = max(numbers)
        verdict = judged(done[numbers.index(found)], found, analysis)
    return {
        "model": f"{claim.statistic} of {len(done)} cells",
        "workload": "",
        **dict(zip(("measured", "measured_low", "measured_high"), found, strict=True)),
        "outcome": against(matches[0], *found),
        "verdict": verdict,
        "status": "ok" if done else matches[0].record.status,
    }


def _row(m: Match, analysis: Analysis) -> dict[str, Any]:
    value, low, high = measured(m.record, m.claim, analysis.contrasts)
    return {
        "source": m.source.title,
        "claim": m.claim.id,
        "model": m.record.model,
        "workload": m.record.workload,
        "toggles": analysis.row(m.record)["toggles"],
        "quantity": m.claim.compared,
        "claimed_low": m.low,
        "claimed_high": m.high,
        "statistic": m.claim.statistic,
        "measured": value,
        "measured_low": low,
        "measured_high": high,
        "outcome": against(m, value, low, high),
        "verdict": judged(m, (value, low, high), analysis),
        "status": m.record.status,
        "how": said(m.record, m.claim).get("how", ""),
        "baseline_differs": m.differs,
        "stands_for": m.stands_for,
        "inverted": m.inverted,
        "hardware": m.source.hardware,
        "baseline": m.claim.baseline,
        "wording": m.claim.wording,
        "note": m.claim.note,
        "caveat": m.claim.caveat,
    }
