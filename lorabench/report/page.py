"""report.html: one self-contained page, the answer first, then what can be seen, then the table.

It needs no network. Its drawings and its table are made in the browser of the data that page_data.py takes from the
records; without scripts the tables stand there as text. A Content-Security-Policy allows the page's own scripts and
style sheets, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lorabench.record.schema import Record
from lorabench.report.analysis import Analysis, Session
from lorabench.report.answers import published_answer
from lorabench.report.claims import load_claims, whether_measured
from lorabench.report.details import pairs
from lorabench.report.glossary import GLOSSARY
from lorabench.report.page_data import families, work
from lorabench.report.recommendation import Recommendation
from lorabench.report.shown import Shown
from lorabench.report.tidy import GIB
from lorabench.report.words import number

# In this order: each uses what stands in those before it.
SCRIPTS = ("state", "words", "drawing", "race", "tradeoff", "ladder", "trials", "table", "page")
# What Plot puts into each of its drawings (src/plot.js of 0.6.17). A browser test fails where it differs.
STYLE_OF_PLOT = """:where(.plot-d6a7b5) {
  --plot-background: white;
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
}
:where(.plot-d6a7b5 text),
:where(.plot-d6a7b5 tspan) {
  white-space: pre;
}"""


def page(analysis: Analysis, shown: Shown, recommendation: Recommendation | None = None) -> str:
    """The page as text. Everything shown is escaped."""
    records, sessions = analysis.records, analysis.sessions
    sheet = _read("page.css")
    script = "\n".join(["(() => {", '"use strict";', *(_read(f"{name}.js") for name in SCRIPTS), "})();"])
    scripts = [_read("plot/plot.min.js"), script]
    environment = Environment(
        loader=PackageLoader("lorabench", "report/templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False, "separators": (",", ":"), "allow_nan": False,  # a browser reads no NaN
    }  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        policy=_policy([sheet, STYLE_OF_PLOT], scripts),
        sheet=Markup(sheet),
        scripts=[Markup(script) for script in scripts],
        licence=_read("plot/LICENSE"),
        families=families(analysis),
        shown=shown,
        counts=_counts(records),
        where=_where(sessions),
        recommendation=recommendation,
        published=published_answer(analysis),
        sessions=[_session(s) for s in sessions],
        sources=load_claims(),
        standing=lambda claim: whether_measured(claim, analysis.matches),
        glossary=GLOSSARY | work(records),
    )  # fmt: skip


def _read(name: str) -> str:
    return (files("lorabench.report") / "templates" / name).read_text(encoding="utf-8")


def _policy(sheets: Sequence[str], scripts: Sequence[str]) -> str:
    """What a browser may run of this page, whatever stands in the records. What scripts set of an element's style goes
    through the CSSOM, which no policy concerns."""
    run, style = (" ".join(map(_hash, texts)) for texts in (scripts, sheets))
    return f"default-src 'none'; script-src {run}; style-src {style}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- what was run, and where ------------------------------------------------------------------------------------------


def _counts(records: Sequence[Record]) -> str:
    statuses = [r.status for r in records]
    return ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)) or "no records"


def _where(sessions: Sequence[Session]) -> str:
    """Machines, torch and commits of all sessions in one line; '' if nothing is known."""
    machines = [s.get("machine") or {} for s in sessions]
    names = dict.fromkeys(str(m["name"]) for m in machines if m.get("name"))
    versions = dict.fromkeys(v for m in machines if (v := (m.get("packages") or {}).get("torch")))
    commits = dict.fromkeys(s["commit"][:7] for s in sessions if s.get("commit"))
    dates = sorted({str(s["started"])[:10] for s in sessions if s.get("started")})
    torch = f"torch {' and '.join(versions)}" if versions else ""
    commit = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}" if commits else ""
    if len(commits) > 3:
        commit = f"{len(commits)} commits"
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return ", ".join(filter(None, (" and ".join(names), when, torch, commit)))


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
