"""The tables: summary.csv (everything), summary.md and summary.tex (for reading), and one for the console.

The human table is built once, as text cells grouped by model @ workload: the reference against itself first, then the
toggles from the fastest, then the rows that failed, with status and reason, then the limit. Each output only escapes
and draws it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from rich.table import Table
from rich.text import Text

from lorabench.report.attribution import groups, interactions, ladder, leave_one_out, shapley
from lorabench.report.claims import Match, Source, claims_frame, match, measured, outcome
from lorabench.report.analysis import GIB, Session, frame, toggles
from lorabench.record.stats import MIN_TRIALS_FOR_VERDICT, Speedup
from lorabench.record.schema import Record

HEADINGS = {
    "toggles": "toggle",
    "forward": "forward ×",
    "backward": "backward ×",
    "step": "step ×",
    "total": "total × [95 %]",
    "of_limit_forward": "of limit [95 %], forward",
    "of_limit": "of limit [95 %], forward + backward",
    "time": "median ms, ref → cand",
    "memory": "peak GiB, ref → cand",
    "tokens": "real tokens/s, ref → cand",
    "padded": "padding, ref → cand",
    "bound": "bound (of ceiling)",
    "numerics": "gradient error / allowed",
    "verdict": "verdict",
}
LADDER = ["rung", "cumulative × [95 %]", "increment × [95 %]", "status"]


AnyTable = tuple[str, list[str], list[list[str]]]  # caption, headings, rows


class Group(NamedTuple):
    """One model @ workload: rows of text, keyed as HEADINGS, and `tables` of (caption, headings, rows) below it."""

    title: str
    rows: list[dict[str, str]]
    tables: list[AnyTable]


def number(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits, never in scientific notation above 1e-4; '' for what is unknown."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def ratio(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """`1.31 [1.29, 1.33]`; without interval where there is none."""
    if not math.isfinite(value):
        return ""
    digits = 2 if max(value, high if math.isfinite(high) else 0) >= 10 or high - low > 0.05 else 3
    shown = f"{value:.{digits}f}"
    return f"{shown} [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) and math.isfinite(high) else shown


def arrow(before: Any, after: Any, show: Callable[[Any], str] = number) -> str:
    first, second = show(before), show(after)
    return f"{first or 'none'} → {second or 'none'}" if first or second else ""


def _percent(value: Any) -> str:
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def grouped(records: Sequence[Record], sessions: Sequence[Session] = ()) -> list[Group]:
    """The human table of all records, a group a model @ workload (and reference)."""
    found = []
    for title, part, members in parts(records, sessions):
        ordered = part.assign(_slow=-part["total_speedup"].fillna(0)).sort_values(
            ["limit", "noise_record", "_slow"], ascending=[True, False, True], kind="stable"
        )
        rows = [_cells(row) for row in ordered.to_dict("records")]
        found.append(Group(title, rows, attribution_tables(members)))
    return found


def parts(records: Sequence[Record], sessions: Sequence[Session] = ()) -> list[tuple[str, pd.DataFrame, list[Record]]]:
    """(title, rows of `frame`, records) of every group."""
    table, row = frame(records, sessions), {id(r): i for i, r in enumerate(records)}
    return [(title, table.iloc[[row[id(r)] for r in members]], members) for title, members in groups(records).items()]


def _cells(row: Mapping[Any, Any]) -> dict[str, str]:
    cells = {p: ratio(row.get(f"{p}_speedup", math.nan)) for p in ("forward", "backward", "step")}
    saved = f" ({0.0 - row['memory_saved_pct']:+.1f} %)" if math.isfinite(row["memory_saved_pct"]) else ""
    memory = arrow(row["reference_peak_gib"], row["candidate_peak_gib"])
    of_ceiling = _percent(row["candidate_of_ceiling"])
    bound = row["candidate_bound"] if isinstance(row["candidate_bound"], str) else ""  # pandas holds None as NaN
    gate = f"{number(row['grad_error'], 2)} / {number(row['grad_allowed'], 2)}"
    return cells | {
        "toggles": row["toggles"],
        "total": ratio(row["total_speedup"], row["total_low"], row["total_high"]),
        "of_limit_forward": _share(row, "of_limit_forward"),
        "of_limit": _share(row, "of_limit"),
        "time": arrow(row["total_reference_ms"], row["total_candidate_ms"]),
        "memory": memory + saved if memory else "",
        "tokens": arrow(row["reference_tokens_s"], row["candidate_tokens_s"]),
        "padded": arrow(row["reference_padded_share"], row["candidate_padded_share"], _percent),
        "bound": f"{bound}{f' ({of_ceiling})' if of_ceiling else ''}".strip(),
        "numerics": gate if gate != " / " else "",
        "verdict": judgement(row),
    }


def _share(row: Mapping[Any, Any], name: str) -> str:
    shown = ratio(row[name], row[f"{name}_low"], row[f"{name}_high"])
    return f"{shown} unpaired" if shown and not row[f"{name}_paired"] else shown


def judgement(row: Mapping[Any, Any]) -> str:
    """The last word on a row of `frame`: verdict, or status and reason; for A/A, what the noise lets us see."""
    if row["status"] == "oom" and row["arm"] == "reference" and math.isfinite(row["total_candidate_ms"]):
        return f"reference does not fit, candidate does (oom): {row['reason']}"
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if row["limit"]:
        return "limit: no way to train; its total is forward + backward, without a step"
    if row["noise_record"]:
        sees = f", detects {_percent(row['detectable'])}" if math.isfinite(row["detectable"]) else ""
        return f"noise floor ±{_percent(row['noise_floor'])}{sees}"
    disturbed = row["disturbed"] if math.isfinite(row["disturbed"]) else 0
    flags = f" ({disturbed:.0f} of {row['trials']} trials disturbed)" if disturbed else ""
    few = 0 < row["trials"] < MIN_TRIALS_FOR_VERDICT
    said = row["verdict"] if isinstance(row["verdict"], str) else "too few trials"
    needs = f" ({row['trials']} trials, a verdict needs {MIN_TRIALS_FOR_VERDICT})" if few else ""
    return said + needs + flags


def shown_columns(found: Sequence[Group]) -> list[str]:
    """The columns that hold anything in any group; the name, the total and the verdict always."""
    keep = {"toggles", "total", "verdict"}
    return [c for c in HEADINGS if c in keep or any(row[c] for g in found for row in g.rows)]


def attribution_tables(members: Sequence[Record]) -> list[AnyTable]:
    """(caption, headings, rows) for each way of attribution that these records allow."""
    made: list[AnyTable] = []
    if rungs := ladder(members):
        rows = [[r.added, _ratio(r.cumulative), _ratio(r.increment), r.record.status] for r in rungs]
        made.append(("Ladder: each rung keeps the ones above it", LADDER, rows))
    if left := leave_one_out(members):
        rows = [[x.toggle, _ratio(x.speedup), x.record.status] for x in left]
        made.append(("Leave one out: all toggles against all but one", ["toggle", "total × [95 %]", "status"], rows))
    if pairs := interactions(members):
        rows = [[p.first, p.second, _ratio(p.effect)] for p in pairs]
        made.append(("Interaction S(ab) / (S(a) S(b)): 1 is independent", ["toggle", "with", "factor [95 %]"], rows))
    if split := shapley(members):
        rows = [[p, _ratio(split.factors[p]), _gib(split.saved_bytes, p)] for p in split.players]
        gaps = "; ".join(" + ".join(s) for s in split.missing)
        part = f" over {', '.join(split.players)} only; no time for: {gaps}" if gaps else ""
        made.append((f"Shapley values{part}", ["toggle", "factor of time [95 %]", "peak GiB saved"], rows))
    return made


def _ratio(found: Speedup | None) -> str:
    return ratio(*found) if found else ""


def _gib(saved: dict[str, float] | None, player: str) -> str:
    return number(saved[player] / GIB) if saved else ""


def claim_tables(records: Sequence[Record], sources: Sequence[Source] | None = None) -> list[AnyTable]:
    """Published numbers beside ours, as (caption, headings, rows). A source whose claims several of our candidates test
    is a table of its own, in the source's order, a column a candidate; of all others each pair is a row, in words."""
    made, beside = [], set()
    found = sorted((m for m in match(records, sources) if not m.claim.over), key=lambda m: m.source.title)
    for source, own in itertools.groupby(found, lambda m: m.source):
        if table := _side_by_side(source, list(own), records):
            made.append(table)
            beside.add(source.title)
    if rows := claim_rows(records, sources, but=beside):
        made.append(("Published numbers beside ours", CLAIMS, rows))
    return made


def _side_by_side(source: Source, found: Sequence[Match], records: Sequence[Record]) -> AnyTable | None:
    """A row a claim and cell, a column a candidate (and reference); None where no claim meets two candidates."""
    titles = {id(r): title for title, members in groups(records).items() for r in members}
    order, claims = {id(r): i for i, r in enumerate(records)}, {id(c): i for i, c in enumerate(source.claims)}
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for m in sorted(found, key=lambda m: (claims[id(m.claim)], order[id(m.record)])):
        place = f"{m.record.model} @ {m.record.workload}"
        column = toggles(m.record) + titles[id(m.record)].removeprefix(place)
        head = {"model @ workload": place, "quantity": _quantity(m.claim.quantity)}
        head["published"] = _range(m.claim.low, m.claim.high)
        rows.setdefault((claims[id(m.claim)], place), head)[column] = _beside(m)
    headings = list(dict.fromkeys(itertools.chain(*rows.values())))
    if any(m.inverted for m in found) or max(map(len, rows.values())) < 5:  # the three headings and two candidates
        return None
    caption = f"{source.title} ({source.publisher}; {source.hardware}): published beside measured"
    return caption, headings, [[row.get(c, "") for c in headings] for row in rows.values()]


def _beside(m: Match) -> str:
    value, low, high = measured(m.record, m.claim.quantity)
    missing = "not measured here" if m.record.status == "ok" else m.record.status
    said = " ".join(x for x in (outcome(m), "" if m.same_baseline else "(other reference)") if x)
    return f"{ratio(value, low, high)} {said}".strip() if math.isfinite(value) else missing


def _quantity(name: str) -> str:
    return name.replace("_", " ").replace(" pct", " %")


def _range(low: float, high: float) -> str:
    return number(low) if low == high else f"{number(low)}–{number(high)}"


def claim_rows(
    records: Sequence[Record], sources: Sequence[Source] | None = None, but: Collection[str] = ()
) -> list[list[str]]:
    """Rows under CLAIMS: published numbers beside ours, in words and with what differs; not of the sources `but`."""
    rows = []
    for c in claims_frame(records, sources).to_dict("records"):
        if c["source"] in but:
            continue
        remarks = ["inverted: the source switches it off"] * c["inverted"] + ["other reference"] * (
            not c["same_baseline"]
        )
        found = ratio(c["measured"], c["measured_low"], c["measured_high"]) if math.isfinite(c["measured"]) else ""
        missing = "not measured here" if c["status"] == "ok" else c["status"]
        rows.append([
            f"{c['toggles']}, {' @ '.join(filter(None, (c['model'], c['workload'])))}", _quantity(c["quantity"]),
            _range(c["claimed_low"], c["claimed_high"]), found or missing,
            " ".join([c["outcome"], *(f"({r})" for r in remarks)]).strip(),
            f"{c['baseline']}; {c['hardware']}", c["source"],
        ])  # fmt: skip
    return rows


CLAIMS = ["toggle", "quantity", "claimed", "measured", "measured is", "their baseline and hardware", "source"]


def markdown(records: Sequence[Record], sessions: Sequence[Session] = ()) -> str:
    """summary.md as text."""
    found = grouped(records, sessions)
    columns = shown_columns(found)
    parts = [] if found else ["No records."]
    for group in found:
        rows = [[row[c] for c in columns] for row in group.rows]
        parts += [f"## {md(group.title)}", _md_table([HEADINGS[c] for c in columns], rows)]
        for caption, headings, more in group.tables:
            parts += [f"### {md(caption)}", _md_table(headings, more)]
    for caption, headings, rows in claim_tables(records):
        parts += [f"## {md(caption)}", _md_table(headings, rows)]
    return "\n\n".join(parts) + "\n"


def md(text: str) -> str:
    """Text for one cell of a Markdown table: nothing in it is read as markup, and it stays on one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text).replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(escaped.replace(">", "&gt;").split())


def _md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([md(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "→": r"$\to$", "×": r"$\times$", "±": r"$\pm$", "·": r"$\cdot$", "–": "--", "[": "{[}", "]": "{]}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Text for one LaTeX cell. [ and ] are braced: after a line's `\\\\` a bracket would be read as its argument."""
    return " ".join("".join(_TEX.get(c, c) for c in text).split())


def latex(records: Sequence[Record], sessions: Sequence[Session] = ()) -> str:
    """summary.tex: one booktabs table a group, to be put into a document that loads booktabs and graphicx."""
    found = grouped(records, sessions)
    columns = shown_columns(found)
    parts = ["% needs \\usepackage{booktabs,graphicx}", *([] if found else ["% no records"])]
    for group in found:
        main = ("", [HEADINGS[c] for c in columns], [[row[c] for c in columns] for row in group.rows])
        for caption, headings, rows in [main, *group.tables]:
            title = f"{group.title}: {caption}" if caption else group.title
            parts.append(_tex_table(title, headings, rows))
    parts += [_tex_table(*table) for table in claim_tables(records)]
    return "\n\n".join(parts) + "\n"


def _tex_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = lambda cells: " & ".join(map(tex, cells)) + r" \\"  # noqa: E731
    return "\n".join([
        r"\begin{table}", rf"\caption{{{tex(caption)}}}", r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{'l' * len(headings)}}}", r"\toprule", line(headings), r"\midrule",
        *map(line, rows), r"\bottomrule", r"\end{tabular}}", r"\end{table}",
    ])  # fmt: skip


def csv(table: pd.DataFrame) -> str:
    """summary.csv: every column of `frame`, full precision."""
    return table.to_csv(index=False, lineterminator="\n")


# Least important first: what gives way on a narrow terminal. Total, memory and verdict never do.
_GIVE_WAY = ["padded", "numerics", "bound", "tokens", "step", "time", "forward", "backward"]
_GIVE_WAY += ["of_limit_forward", "of_limit"]
_STYLE = {"faster": "green", "slower": "red", "same": "dim", "unclear": "yellow", "noise": "dim", "limit:": "cyan"}


def console_table(records: Sequence[Record], sessions: Sequence[Session] = (), width: int = 120) -> Table:
    """The table for a terminal `width` columns wide: less important columns give way, long reasons are shortened."""
    found = grouped(records, sessions)
    columns = shown_columns(found)
    reason = max(36, width // 3)
    cells = [
        (group, [{c: row[c] if c == "toggles" else _short(row[c], reason) for c in columns} for row in group.rows])
        for group in found
    ]
    wants = {c: max([len(HEADINGS[c]) // 2, *(len(r[c]) for _, rows in cells for r in rows)]) for c in columns}
    wants["toggles"] = min(wants["toggles"], 32)
    for column in _GIVE_WAY:
        if sum(wants[c] + 3 for c in columns) + 1 > width and column in columns:
            columns.remove(column)
    table = Table(show_lines=False)
    for column in columns:
        table.add_column(Text(HEADINGS[column]), overflow="fold", no_wrap=column == "total")
    for group, rows in cells:
        table.add_section()
        table.add_row(Text(group.title, style="bold"), *[""] * (len(columns) - 1))
        for row in rows:
            style = _STYLE.get(row["verdict"].split()[0], "red")
            table.add_row(*(Text(row[c], style=style if c == "verdict" else "") for c in columns))
    return table


def _short(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
