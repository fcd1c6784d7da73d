"""report.html: one self-contained page with all that the records say. It needs no network; scripts only sort the tables
and open a cell's details, which are kept as data and become elements when they are asked for."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lorabench.record.schema import Record
from lorabench.report.analysis import Analysis, Session
from lorabench.report.cells import BOUND, GRADIENT, HOST, PADDING, THROUGHPUT, UNEQUAL, VERDICT
from lorabench.report.claims import load_claims, standing
from lorabench.report.details import detail, pairs
from lorabench.report.plots import Drawn
from lorabench.report.shown import Shown
from lorabench.report.tidy import GIB, kinds_of, overhead_share
from lorabench.report.words import number

CAPTIONS = {
    "speedup.png": "Speed-up of the whole with its 95 % interval. Grey band: the noise floor. Hollow diamonds: "
    "published numbers for the same toggle against the same baseline.",
    "memory.png": "Peak memory of reference and candidate, each net of what the other holds.",
    "phases.png": "Where the candidate's time goes: the median of its total, divided as the medians of its phases are. "
    "The black line is its own reference, measured beside it.",
    "tradeoff.png": "Speed against memory.",
    "ladder.png": "The ladder: each rung keeps the ones above it.",
}

GLOSSARY = {
    "ok": "both arms ran, the toggle was engaged, its gradients passed the gate, and it was timed",
    "oom": "an arm ran out of GPU memory; where only the reference did, the candidate's own times are shown",
    "timeout": "the cell took longer than it was allowed to and was stopped",
    "crash": "an arm raised an error or its process died; the end of its output is with the cell",
    "wrong_numerics": "the loss or an adapter's gradient is further from plain PEFT than allowed: no speed is given",
    "not_applied": "the toggle changed nothing here, so there is nothing to time",
    "unsupported": "this machine, these packages or this model lack something that the toggle needs",
    "conflict": "toggles that cannot be on together",
    "faster / slower": "significant after Holm's correction over the sweep (p < 0.05), and the whole 95 % interval "
    "lies beyond the noise floor",
    "same": "the whole 95 % interval lies inside the noise floor: equal as far as this machine can tell",
    "unclear": "none of these; more trials or a quieter machine might tell. The interval is shown without a ratio",
    "interval is of": "the sessions that the interval knows; one session's says nothing of what differs in the next",
    "host-bound": "the device waits for its host in a fifth of the step or more: milliseconds, and the share of them "
    "that it waits. Such a ratio is of this host",
    "range": "the reference took over 10 % longer in one session than in another: the sessions' ratios, without a mean",
    "noise floor": "how far the reference is from itself when measured twice (A/A) and paired alike, at least ±1 %",
    "detects": "the smallest true speed-up that as many trials would call faster 4 times out of 5",
    "speed-up": "reference time / candidate time: Hodges–Lehmann centre of the log ratios of paired trials, with a "
    "95 % interval of as many rounds as their autocorrelation leaves; throughput gain is the same and is not repeated",
    "abba": "the arms did not fit together, or a patch reaches beyond its model: separate processes, in A B B A order, "
    "and an interval of the spread between them",
}


def page(analysis: Analysis, shown: Shown, plots: Mapping[str, Drawn] | None = None) -> str:
    """The page as text. plots: by file name. Everything shown is escaped."""
    records, sessions = analysis.records, analysis.sessions
    share = overhead_share(records)
    layouts = _layouts(shown)
    environment = Environment(
        loader=PackageLoader("lorabench", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}  # facts in our order
    return environment.get_template("page.html.jinja").render(
        sessions=[_session(s) for s in sessions],
        counts=_counts(records),
        overhead=f"{100 * share:.0f} %" if math.isfinite(share) else "",
        wall=number(sum(r.cost.wall for r in records if r.cost) / 60),
        where=_where(sessions),
        groups=shown.groups,
        layouts=layouts,
        layout_of=lambda group: layouts[tuple(group.columns)],
        tone=_tone,
        details=[detail(r, analysis.row(r)) for group in shown.groups for r in group.records],
        plots=[(_caption(name, drawn), base64.b64encode(drawn.png).decode()) for name, drawn in (plots or {}).items()],
        claims=shown.claims,
        sources=load_claims(),
        standing=lambda claim: standing(claim, analysis.matches),
        glossary=GLOSSARY | _glossary_of_kinds(records),
    )


def _layouts(shown: Shown) -> dict[tuple[str, ...], tuple[int, list[int]]]:
    """Columns of a group → (number of this layout, the places, from 1, of those that only a click shows)."""
    folded = {PADDING, BOUND, GRADIENT, THROUGHPUT, UNEQUAL}
    kinds = dict.fromkeys(tuple(group.columns) for group in shown.groups)
    return {
        columns: (n, [i for i, column in enumerate(columns, start=1) if column in folded])
        for n, columns in enumerate(kinds)
    }


def _tone(row: Mapping[str, str]) -> str:
    """The classes of a row: its verdict's first word, or that it failed; and whether it waits for its host."""
    word = row[VERDICT].split()[0]
    if word not in ("faster", "slower", "same", "unclear", "noise", "too") and not word.endswith(":"):
        return "failed"
    return f"{word} host-bound" if row.get(HOST) else word


def _caption(name: str, drawn: Drawn) -> str:
    return CAPTIONS[name] + (f" Shown: {drawn.left_out}." if drawn.left_out else "")


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
