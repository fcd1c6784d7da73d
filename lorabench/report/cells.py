"""The human table as text, made once: groups of rows, a text a column. Each output only escapes and draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lorabench.contract.kind import kind
from lorabench.record.schema import ARMS, INTERRUPTED, TOTAL, UNCHECKED, Record
from lorabench.record.stats import direction, without_figure
from lorabench.report.analysis import Analysis
from lorabench.report.attribution_tables import AnyTable, attribution_tables
from lorabench.report.groups import Group
from lorabench.report.shares import ShareOf, columns
from lorabench.report.tidy import kinds_of, phases_of
from lorabench.report.words import arrow, bounds, doubt, interval, noise, number, percent, ratio, span

# The columns, by their headings. Beside these there is one a phase, one a share and one for each kind's throughput.
TOGGLE = "toggle"
WHOLE = f"{TOTAL} × [95 %]"
HOST = "host-bound: ms (host's share), ref → cand"
SESSIONS = "interval is of"
TIME = "median ms, ref → cand"
MEMORY = "peak GiB, ref → cand"
THROUGHPUT = "real tokens/s, ref → cand"
ENERGY = "J per 1000 real tokens, ref → cand"
PADDING = "padding, ref → cand"
SENDING = "communication ms (exposed), ref → cand"
BOUND = "bound (of ceiling)"
GRADIENT = "gradient error / allowed"
UNEQUAL = "differs from the reference's"
VERDICT = "verdict"
ALWAYS = (TOGGLE, WHOLE, VERDICT)

HOST_BOUND = 0.2  # the share of a step in which the device waits, as in the label of a phase
MOVED = 0.10  # of the reference between two sessions: a mean of such ratios would be of no machine


class TextGroup(NamedTuple):
    """One group: rows of text by heading, with the record of each, and `tables` of (caption, headings, rows) below."""

    title: str
    columns: list[str]
    rows: list[dict[str, str]]
    records: list[Record]
    tables: list[AnyTable]

    def table(self, captioned: str = "") -> AnyTable:
        return captioned, self.columns, [[row[c] for c in self.columns] for row in self.rows]


def text_groups(analysis: Analysis) -> list[TextGroup]:
    """The human table of all records, a group a model @ workload (and kind, and reference)."""
    made: list[TextGroup] = []
    holds: dict[str, set[str]] = {}  # by kind, the columns that hold anything: they are the same in all such groups
    shares = columns(kinds_of(analysis.records))
    for group in analysis.groups:
        records = analysis.ordered(group)
        rows = [_cells(analysis.row(r), r, group, shares) for r in records]
        filled = holds.setdefault(group.kind.name, set(ALWAYS))
        filled |= {c for row in rows for c, text in row.items() if text}
        own = _headings([group.kind], shares)
        made.append(TextGroup(group.title, own, rows, records, attribution_tables(group.records, analysis)))
    kinds = [group.kind.name for group in analysis.groups]
    return [g._replace(columns=[c for c in g.columns if c in holds[k]]) for g, k in zip(made, kinds, strict=True)]


def all_columns(found: Sequence[TextGroup], records: Sequence[Record]) -> list[str]:
    """The columns of all groups in one order, for one table of them all."""
    there = {c for group in found for c in group.columns} or set(ALWAYS)
    kinds = kinds_of(records)
    return [c for c in _headings(kinds, columns(kinds)) if c in there]


def giving_way(records: Sequence[Record]) -> list[str]:
    """The columns that give way on a narrow terminal, least important first. Milliseconds, total, memory and
    verdict never do."""
    kinds = kinds_of(records)
    shares = [s.heading for s in reversed(columns(kinds))]
    return [PADDING, ENERGY, GRADIENT, UNEQUAL, BOUND, THROUGHPUT, SESSIONS, *map(times, phases_of(records)), *shares]


def _headings(kinds: Sequence[Any], shares: Sequence[ShareOf]) -> list[str]:
    """All that rows of these kinds can have, from left to right."""
    phases = dict.fromkeys(p for k in kinds for p in k.phases)
    bounded = [s.heading for s in reversed(shares) if set(s.kind.phases) <= set(phases)]
    return [
        TOGGLE, *map(times, phases), WHOLE, HOST, SESSIONS, *bounded, TIME, MEMORY, THROUGHPUT, ENERGY,
        PADDING, SENDING, BOUND, GRADIENT, UNEQUAL, VERDICT,
    ]  # fmt: skip


def times(phase: str) -> str:
    """The heading of a phase's speed-up."""
    return f"{phase} ×"


def _cells(row: Mapping[Any, Any], record: Record, group: Group, shares: Sequence[ShareOf]) -> dict[str, str]:
    cells = dict.fromkeys(_headings([group.kind], shares), "")
    cells |= {times(p): _phase(row, p) for p in group.kind.phases}
    cells |= {s.heading: _share(row, s.column) for s in shares if s.heading in cells}
    saved = f" ({0.0 - row['memory_saved_pct']:+.1f} %)" if math.isfinite(row["memory_saved_pct"]) else ""
    memory = arrow(*_both(row, "{}_peak_gib"))
    return cells | {
        TOGGLE: row["toggles"],
        WHOLE: whole(row),
        HOST: host(row),
        SESSIONS: _sessions(row),
        TIME: arrow(*_both(row, f"{TOTAL}_{{}}_ms")),
        MEMORY: memory + saved if memory else "",
        THROUGHPUT: arrow(*_both(row, "{}_tokens_s")),
        ENERGY: arrow(row.get("reference_j_per_ktok"), row.get("candidate_j_per_ktok")),
        PADDING: arrow(*_both(row, "{}_padded_share"), percent),
        SENDING: _sending(row),
        BOUND: _roofline(row),
        **_gate(record),
        VERDICT: judgement(row, record, group),
    }


def whole(row: Mapping[Any, Any]) -> str:
    """The ratio with its interval. Of a row without a figure the interval with its word; of one whose reference was not
    equally fast in its sessions the range of their ratios. '' where there is none."""
    if not math.isfinite(row[f"{TOTAL}_speedup"]):
        return ""
    bare = without_figure(row["verdict"])
    if moved(row):
        word = f"{direction(row['verdict'])}, " if bare else ""
        return f"{word}{span(row['session_low'], row['session_high'])} (range)"
    ends = row[f"{TOTAL}_low"], row[f"{TOTAL}_high"]
    return interval(*ends, row["verdict"]) if bare else ratio(row[f"{TOTAL}_speedup"], *ends)


def moved(row: Mapping[Any, Any]) -> bool:
    """Whether the reference was more than a tenth slower in one session than in another."""
    return bool(row["reference_moved"] > MOVED)


def host_share(row: Mapping[Any, Any]) -> float:
    """The larger share of the step in which the device of an arm waits for its host, of the arms of which it is known;
    0 of none."""
    return max((one for arm in ARMS if math.isfinite(one := row[f"{arm}_host_share"])), default=0.0)


def host_bound(row: Mapping[Any, Any]) -> bool:
    """Whether the device of either arm waits for its host in a fifth of the step or more: a ratio of hosts."""
    return host_share(row) >= HOST_BOUND


def _phase(row: Mapping[Any, Any], phase: str) -> str:
    """A phase has no verdict of its own: where the whole has no figure, its interval alone. One that a single arm
    does has its time."""
    took = {arm: row[f"{phase}_{arm}_ms"] for arm in ARMS}
    alone = [arm for arm, ms in took.items() if math.isfinite(ms)]
    if row["status"] == "ok" and len(alone) == 1:
        return f"{alone[0]} only, {number(took[alone[0]])} ms"
    found = row[f"{phase}_speedup"], row[f"{phase}_low"], row[f"{phase}_high"]
    if without_figure(row["verdict"]) and math.isfinite(found[0]):
        return bounds(*found[1:])
    return ratio(found[0])


def host(row: Mapping[Any, Any]) -> str:
    """Of a ratio of hosts each arm's milliseconds, and in brackets its share of them in which the device waits."""
    if not host_bound(row) or not math.isfinite(row[f"{TOTAL}_speedup"]):
        return ""
    return " → ".join(number(row[f"{TOTAL}_{arm}_ms"]) + _of_host(row[f"{arm}_host_share"]) for arm in ARMS)


def _of_host(share: float) -> str:
    """Nothing where nobody knows: the waits of several processes on one device are not one wait."""
    return f" ({100 * share:.0f} %)" if math.isfinite(share) else ""


def _sending(row: Mapping[Any, Any]) -> str:
    """Of each arm, and of it in brackets what nothing hid; '' where no arm communicates."""
    spent = {arm: row.get(f"{arm}_communication_ms", math.nan) for arm in ARMS}
    if not any(map(math.isfinite, spent.values())):
        return ""
    said = {a: f"{number(ms)} ({number(row[f'{a}_exposed_ms'])})" for a, ms in spent.items() if math.isfinite(ms)}
    return " → ".join(said.get(arm, "none") for arm in ARMS)


def _sessions(row: Mapping[Any, Any]) -> str:
    """Of how many sessions the interval knows, and how far apart their ratios were."""
    count = row["sessions"]
    if not count or not math.isfinite(row[f"{TOTAL}_speedup"]):
        return ""
    if count == 1:
        return "one session"
    return f"{count} sessions, {span(row['session_low'], row['session_high'])}"


def _both(row: Mapping[Any, Any], column: str) -> tuple[Any, Any]:
    """Reference's and candidate's; the column's name has {} for the arm."""
    reference, candidate = (row[column.format(arm)] for arm in ARMS)
    return reference, candidate


def _share(row: Mapping[Any, Any], name: str) -> str:
    shown = ratio(row[name], row[f"{name}_low"], row[f"{name}_high"])
    return f"{shown} unpaired" if shown and not row[f"{name}_paired"] else shown


def _roofline(row: Mapping[Any, Any]) -> str:
    of_ceiling = percent(row["candidate_of_ceiling"])
    label = row["candidate_bound"] if isinstance(row["candidate_bound"], str) else ""  # pandas holds None as NaN
    return f"{label}{f' ({of_ceiling})' if of_ceiling else ''}".strip()


def _gate(record: Record) -> dict[str, str]:
    gate = record.numerics
    if gate is None:
        return {}
    shown = f"{number(gate.grad_error, 2)} / {number(gate.grad_allowed, 2)}"
    found = {} if shown == " / " else {GRADIENT: shown}
    return found if gate.unequal is None else {**found, UNEQUAL: f"{gate.unequal} of {gate.tensors}"}


def judgement(row: Mapping[Any, Any], record: Record, group: Group) -> str:
    """The last word on a row: verdict, or status and reason; for A/A, what the noise lets us see."""
    if fits_alone(row):
        return "{} does not fit, {} does (oom): ".format(*ARMS) + row["reason"]
    if record.status != "ok":
        return f"{row['status']}: {row['reason']}{_provenance(row)}"
    if not record.is_candidate:
        return _least(kind(record.kind), group.kind) + _provenance(row)
    if record.is_noise_floor:
        sees = f", detects {percent(row['detectable'])}" if math.isfinite(row["detectable"]) else ""
        return f"noise floor {noise(row['noise_floor'])}{sees}{_provenance(row)}"
    disturbed = row["disturbed"] if math.isfinite(row["disturbed"]) else 0
    flags = f" ({disturbed:.0f} of {row['trials']} trials disturbed)" if disturbed else ""
    said = row["verdict"] if isinstance(row["verdict"], str) else "too few trials"
    if UNCHECKED in record.notes:
        flags += f" (ended from outside after {record.notes[INTERRUPTED]} rounds, before its last checks)"
    return said + _doubt(row) + flags + _other_floor(row) + _provenance(row)


def _doubt(row: Mapping[Any, Any]) -> str:
    low, high = row[f"{TOTAL}_low"], row[f"{TOTAL}_high"]
    return doubt(row["verdict"], low, high, row["noise_floor"], row["p_holm"], row["trials"])


def _other_floor(row: Mapping[Any, Any]) -> str:
    """Said where no A/A record is paired as this row is."""
    known = isinstance(row["noise_pairing"], str) and row["noise_pairing"] != row["pairing"]
    return f" (noise floor of {'paired' if row['noise_pairing'] == 'paired' else 'separate'} A/A)" if known else ""


def _provenance(row: Mapping[Any, Any]) -> str:
    """What a reader has to know of the code and the sessions behind a row."""
    said = ["uncommitted changes"] if row["dirty"] else []
    if row["sessions_tried"] > max(row["sessions"], 1):
        said.append(f"{row['sessions']} of {row['sessions_tried']} sessions ok")
    if moved(row):
        said.append(f"reference moved {100 * row['reference_moved']:.0f} % between sessions")
    if row["other_code"]:
        said.append(f"{row['other_code']} of other code left out")
    return f" ({'; '.join(said)})" if said else ""


def fits_alone(row: Mapping[Any, Any]) -> bool:
    """Whether only the reference ran out of memory, and the candidate was timed alone."""
    return row["status"] == "oom" and row["arm"] == "reference" and math.isfinite(row[f"{TOTAL}_candidate_ms"])


def _least(own: Any, bounded: Any) -> str:
    lacks = " and ".join(p for p in bounded.phases if p not in own.phases)
    return f"{own.name}: no candidate; its total is {own.total}" + (f", without {lacks}" if lacks else "")
