"""report.html: one self-contained page with all that the records say, the answers first.

It needs no network, and without scripts it is whole but for the details of a row: figures are SVG. Scripts sort and
filter the table and open its rows, whose details are kept as data. A Content-Security-Policy allows the page's own two
scripts and style sheet, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis, Row, Session
from lorabench.report.answers import answers, published_answer
from lorabench.report.cells import (
    BOUND,
    ENERGY,
    GRADIENT,
    HOST,
    MEMORY,
    PADDING,
    SESSIONS,
    THROUGHPUT,
    TIME,
    TOGGLE,
    UNEQUAL,
    VERDICT,
    WHOLE,
    TextGroup,
    times,
)
from lorabench.report.claims import load_claims, standing
from lorabench.report.details import detail, pairs
from lorabench.report.inline import inline
from lorabench.report.panels import MANY
from lorabench.report.plots import Drawn
from lorabench.report.recommendation import Recommendation
from lorabench.report.shares import columns
from lorabench.report.shown import Shown
from lorabench.report.tidy import GIB, kinds_of, phases_of
from lorabench.report.tradeoff import GID
from lorabench.report.words import number, ratio

CAPTIONS = {
    "tradeoff": "Time against memory: down and to the left is better. What lies on the dashed line no other beats in "
    "both. Vertical lines are 95 % intervals of the median. Where the references of one group took over 10 % longer in "
    "one row than in another, a grey bar spans their times and no line is drawn.",
    "published": "Published numbers beside ours, where both were measured against the same baseline.",
    "speedup": "Speed-up of the whole with its 95 % interval, in parts whose references took as long. Grey band: the "
    "noise floor. Dotted: host-bound. Dots below a line: its sessions. Hollow diamonds: published numbers for the same "
    "toggle against the same baseline.",
    "map": "Speed-up of the whole, a line a group, with half the width of its 95 % interval. An interval alone is of "
    "an unclear row, milliseconds are of one that waits for its host.",
    "memory": "Peak memory of reference and candidate, each net of what the other holds.",
    "phases": "Where the candidate's time goes: the median of its total, divided as the medians of its phases are. "
    "The black line is its own reference, measured beside it.",
    "packing": "What another way to batch buys: measured, and as the samples' lengths predict it: by the positions "
    "computed, by their FLOPs with attention's, and by costs fitted to the same model's other workloads. Beside it the "
    "shares of positions that are real tokens. ≈: approximate lengths.",
    "ladder": "The ladder: each rung keeps the ones above it.",
}
NARROW = (TOGGLE, TIME, WHOLE, VERDICT)  # the columns that a phone is wide enough for
FIRST = ("tradeoff", "published")  # of the figures, what stands above the table

GLOSSARY = {
    "ok": "both arms ran, the toggle was engaged, its gradients passed the gate, and it was timed",
    "oom": "an arm ran out of GPU memory; where only the reference did, the candidate's own times are shown",
    "timeout": "the cell took longer than it was allowed to and was stopped",
    "crash": "an arm raised an error or its process died; the end of its output is with the cell",
    "wrong_numerics": "the loss or an adapter's gradient is further from plain PEFT than allowed: no speed is given",
    "untrusted": "the times cannot be trusted, for the reason that is given: none are shown",
    "not_applied": "the toggle changed nothing here, so there is nothing to time",
    "unsupported": "this machine, these packages or this model lack something that the toggle needs",
    "conflict": "toggles that cannot be on together",
    "faster / slower": "significant after Holm's correction over the sweep (p < 0.05), and the whole 95 % interval "
    "lies beyond the noise floor",
    "same": "the whole 95 % interval lies inside the noise floor: equal as far as this machine can tell",
    "faster / slower, few trials": "the same direction, from too few trials for a figure: the interval alone",
    "unclear": "none of these, for the reason beside the word; more trials or a quieter machine might tell. The "
    "interval is shown without a ratio",
    "interval is of": "the sessions that the interval knows; one session's says nothing of what differs in the next",
    "host-bound": "the device waits for its host in a fifth of the step or more: milliseconds, and the share of them "
    "that it waits. Such a ratio is of this host",
    "range": "the reference took over 10 % longer in one session than in another: the sessions' ratios, without a mean",
    "noise floor": "how far the reference is from itself when measured twice (A/A) and paired alike, at least ±1 %",
    "detects": "the smallest true speed-up that as many trials would call faster 4 times out of 5",
    "speed-up": "reference time / candidate time: Hodges–Lehmann centre of the log ratios of paired trials, with a "
    "95 % interval of as many rounds as their autocorrelation leaves; throughput gain is the same and is not repeated",
    "J per 1000 real tokens": "what the whole GPU took while each arm stepped alone for some seconds after the trials",
    "abba": "the arms did not fit together, or a patch reaches beyond its model: separate processes, in A B B A order, "
    "and an interval of the spread between them",
    "turns": "a patch of an arm reaches beyond its model, so it sat in processes of its own: round by round between "
    "processes, and an interval of the spread between them",
    "÷": "a click on it shows the group over that row, by the rounds that both had; another click, over the reference",
    "within, between": "two arms over the rounds that they shared, within one process or between processes",
}


def page(
    analysis: Analysis,
    shown: Shown,
    plots: Mapping[str, Drawn] | None = None,
    recommendation: Recommendation | None = None,
) -> str:
    """The page as text. plots: by name. Everything shown is escaped."""
    records, sessions = analysis.records, analysis.sessions
    commands = {s["id"]: s.get("command") or [] for s in sessions}
    rows = {id(row.shown): row for row in analysis.rows}
    listed = [record for group in shown.groups for record in group.records]
    place = {id(record): n for n, record in enumerate(listed)}
    marks = {f"{GID}{r.kind}-{r.key}": (place[id(r)], _point(r, analysis.row(r))) for r in listed}
    over = _over(shown, analysis, place)
    of = CAPTIONS | ({"speedup": CAPTIONS["map"]} if len(analysis.groups) > MANY else {})
    figures = {name: _figure(name, drawn, of[name], marks) for name, drawn in (plots or {}).items()}
    layouts = _layouts(shown)
    sheet = _style(layouts)
    scripts = [_read("uplot/uPlot.iife.min.js"), _read("page.js")]
    environment = Environment(
        loader=PackageLoader("lorabench", "report/templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "allow_nan": False,  # a browser reads no NaN
    }  # fmt: skip
    environment.filters["identity"] = id
    return environment.get_template("page.html.jinja").render(
        policy=_policy(sheet, scripts),
        sheet=Markup(sheet),
        scripts=[Markup(script) for script in scripts],
        licence=_read("uplot/LICENSE"),
        sessions=[_session(s) for s in sessions],
        counts=_counts(records),
        recommendation=recommendation,
        trials=shown.trials,
        where=_where(sessions),
        answers=[(answer, place[id(answer.record)] if answer.record else None) for answer in answers(analysis)],
        published=published_answer(analysis),
        tables=[_table(columns, shown, analysis, n) for columns, (n, _) in layouts.items()],
        place=place,
        folded=any(hidden for _, hidden in layouts.values()),
        choices=_choices(records),
        tone=_tone,
        details=[
            detail(r, analysis.row(r), rows[id(r)].measured, commands.get(r.session, [])) | {"over": over.get(n, {})}
            for n, r in enumerate(listed)
        ],
        first=[figures[name] for name in FIRST if name in figures],
        figures=[figure for name, figure in figures.items() if name not in FIRST],
        predicted=shown.predicted,
        claims=shown.claims,
        sources=load_claims(),
        standing=lambda claim: standing(claim, analysis.matches),
        glossary=GLOSSARY | _glossary_of_kinds(records),
    )  # fmt: skip


# -- what the page is made of -----------------------------------------------------------------------------------------


def _read(name: str) -> str:
    return (files("lorabench.report") / "templates" / name).read_text(encoding="utf-8")


def _policy(sheet: str, scripts: Sequence[str]) -> str:
    """What a browser may run of this page, whatever stands in the records. uPlot sets sizes through the CSSOM, which
    no policy on styles concerns."""
    run = " ".join(map(_hash, scripts))
    return f"default-src 'none'; script-src {run}; style-src {_hash(sheet)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style(layouts: Mapping[tuple[str, ...], tuple[int, list[int]]]) -> str:
    """The style sheet, with the rules for the columns of each layout that stay folded, always or on a phone."""
    always, on_a_phone = [], []
    for names, (layout, hidden) in layouts.items():
        rule = f"#more:not(:checked) ~ .wide .layout{layout} tr:not(.detail):not(.group) > :nth-child({{}})".format
        always += map(rule, hidden)
        on_a_phone += [rule(n) for n, name in enumerate(names, start=1) if name not in NARROW]
    sheets = [_read("uplot/uPlot.min.css"), _read("page.css")]
    sheets += [f"{', '.join(always)} {{ display: none; }}"] if always else []
    sheets += [f"@media (max-width: 45rem) {{ {', '.join(on_a_phone)} {{ display: none; }} }}"] if on_a_phone else []
    return "\n".join([*sheets, ""])


def _figure(name: str, drawn: Drawn, caption: str, marks: Mapping[str, tuple[int, str]]) -> tuple[str, str, Markup]:
    """(name, caption, SVG)."""
    caption += f" Shown: {drawn.left_out}." if drawn.left_out else ""
    return name, caption, Markup(inline(drawn.svg, name, caption, marks))


def _point(record: Record, row: Row) -> str:
    """What a point of a figure says under the pointer."""
    took = number(row[f"{TOTAL}_candidate_ms"], 4)
    return f"{row['toggles']}, {record.model} @ {record.workload}: {took} ms, {number(row['candidate_peak_gib'])} GiB"


# -- the table --------------------------------------------------------------------------------------------------------


def _layouts(shown: Shown) -> dict[tuple[str, ...], tuple[int, list[int]]]:
    """Columns of a group → (number of this layout, the places, from 1, of those that only a click shows)."""
    folded = {PADDING, BOUND, ENERGY, GRADIENT, THROUGHPUT, UNEQUAL}
    kinds = dict.fromkeys(tuple(group.columns) for group in shown.groups)
    return {
        columns: (n, [i for i, column in enumerate(columns, start=1) if column in folded])
        for n, columns in enumerate(kinds)
    }


def _table(columns: tuple[str, ...], shown: Shown, analysis: Analysis, number: int) -> dict[str, Any]:
    """One table of all groups with these columns: each group a body of its own, within which alone it sorts."""
    groups = [group for group in shown.groups if tuple(group.columns) == columns]
    return {"columns": columns, "layout": number, "groups": [(group, _values(group, analysis)) for group in groups]}


def _values(group: TextGroup, analysis: Analysis) -> list[dict[str, float]]:
    """By column, the number that a row sorts by: what the cell shows of the candidate, '' where it shows none."""
    by = _sorted_by(analysis)
    return [
        {c: value for c in group.columns if (value := _value(row, c, texts[c], by)) is not None}
        for row, texts in zip(map(analysis.row, group.records), group.rows, strict=True)
    ]


def _value(row: Row, column: str, text: str, by: Mapping[str, str]) -> float | None:
    """None for words, and for an interval without a ratio: a row without one has no place among those that have one."""
    name = by.get(column)
    if not text or name is None or name not in row or (without_figure(row["verdict"]) and name.endswith("_speedup")):
        return None
    return float(f"{row[name]:.5g}") if row[name] is not None and math.isfinite(row[name]) else None


def _sorted_by(analysis: Analysis) -> dict[str, str]:
    """Heading → the column of the tidy table."""
    kinds = kinds_of(analysis.records)
    return {
        WHOLE: f"{TOTAL}_speedup", HOST: f"{TOTAL}_candidate_ms", SESSIONS: "sessions", TIME: f"{TOTAL}_candidate_ms",
        MEMORY: "candidate_peak_gib", THROUGHPUT: "candidate_tokens_s", PADDING: "candidate_padded_share",
        ENERGY: "candidate_j_per_ktok",
        BOUND: "candidate_of_ceiling", GRADIENT: "grad_error", UNEQUAL: "unequal",
        **{times(phase): f"{phase}_speedup" for phase in phases_of(analysis.records)},
        **{share.heading: share.column for share in columns(kinds)},
    }  # fmt: skip


def _over(shown: Shown, analysis: Analysis, place: Mapping[int, int]) -> dict[int, dict[int, str]]:
    """Row → row → how many times as fast the second is as the first, over the rounds that both had, and how they met:
    what a group shows when its first one is chosen. Of rows that were not measured together there is nothing."""
    found: dict[int, dict[int, str]] = {}
    for base, record in (pair for group in shown.groups for pair in itertools.permutations(group.records, 2)):
        if together := analysis.contrasts.shared(record, base):
            said = f"{ratio(*together.contrast.speedup)} {together.how}"
            found.setdefault(place[id(base)], {})[place[id(record)]] = said
    return found


def _choices(records: Sequence[Record]) -> dict[str, list[str]]:
    """What the table can be filtered by."""
    return {
        "model": list(dict.fromkeys(r.model for r in records)),
        "workload": list(dict.fromkeys(r.workload for r in records)),
        "status": list(dict.fromkeys(r.status for r in records)),
        "toggle": sorted({name for r in records for name in r.ablations}),
    }


def _tone(record: Record, row: Mapping[str, str]) -> str:
    """The classes of a row: its verdict's first word, or that it failed; and whether it waits for its host."""
    if record.status != "ok":
        return f"failed {record.status}"
    word = row[VERDICT].split()[0] if record.is_candidate else "least"
    return f"{word} host-bound" if row.get(HOST) else word


def _glossary_of_kinds(records: Sequence[Record]) -> dict[str, str]:
    """What was measured, in the kinds' own words."""
    found: dict[str, str] = {}
    for kind in kinds_of(records):
        found[kind.name] = f"{kind.summary}; its total is {kind.total}"
        if not kind.candidate:
            found[kind.name] += "; no candidate, so it has neither a gate nor a verdict"
            found[f"of {kind.name}"] = (
                f"the {kind.name}'s time / the row's, over the phases named: 1 would be all else for nothing. A ratio "
                "of two ratios, each measured in pairs against the same reference; unpaired: of the two times"
            )
    return found


def _counts(records: Sequence[Record]) -> str:
    statuses = [r.status for r in records]
    return ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)) or "no records"


def _where(sessions: Sequence[Session]) -> str:
    """Machines, torch and commits of all sessions in one line; '' if nothing is known."""
    machines = [s.get("machine") or {} for s in sessions]
    names = dict.fromkeys(str(m["name"]) for m in machines if m.get("name"))
    versions = dict.fromkeys(v for m in machines if (v := (m.get("packages") or {}).get("torch")))
    commits = dict.fromkeys(s["commit"][:7] for s in sessions if s.get("commit"))
    torch = f"torch {' and '.join(versions)}" if versions else ""
    commit = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}" if commits else ""
    if len(commits) > 3:
        commit = f"{len(commits)} commits"
    return ", ".join(filter(None, (" and ".join(names), torch, commit)))


def _session(session: Session) -> dict[str, str]:
    """What was run, where, in words; what is unknown is left out."""
    machine, ceilings = session.get("machine") or {}, session.get("ceilings") or {}
    dirty = {True: " with uncommitted changes", False: "", None: ""}[session.get("dirty")]
    gemm = ceilings.get("gemm_tflops") or {}
    memory = machine.get("memory_bytes")
    shown: dict[str, Any] = {
        "session": session["id"],
        "started": session.get("started"),
        "command": " ".join(map(str, session.get("command") or [])),
        "lorabench": session.get("lorabench"),
        "commit": f"{session['commit']}{dirty}" if session.get("commit") else None,
        "device": machine.get("device"),
        "name": machine.get("name"),
        "CPU": machine.get("cpu"),
        "GPUs": machine.get("gpus"),
        "GPU": pairs(machine.get("gpu") or {}),
        "driver": machine.get("driver"),
        "cores": machine.get("cores"),
        "memory": f"{memory / GIB:.1f} GiB" if memory else None,
        "measured ceiling, GEMM": ", ".join(f"{k} {number(v)} TFLOP/s" for k, v in gemm.items()),
        "measured ceiling, copy": f"{number(ceilings['copy_gbs'])} GB/s" if ceilings.get("copy_gbs") else None,
        "workers": session.get("workers"),
        "allocator": session.get("allocator"),
        "packages": pairs(machine.get("packages") or {}),
    }
    return {k: str(v) for k, v in shown.items() if v not in (None, "")}
