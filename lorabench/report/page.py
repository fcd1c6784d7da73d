"""report.html: one self-contained page with all that the records say. It needs neither network nor scripts."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lorabench.record import stats
from lorabench.report.attribution import groups
from lorabench.report.claims import load_claims
from lorabench.report.analysis import GIB, Session, overhead_share, toggles
from lorabench.report.tables import HEADINGS, claim_tables, grouped, number, ratio, shown_columns
from lorabench.record.schema import Record

CAPTIONS = {
    "speedup.png": "Speed-up of the whole step with its 95 % interval. Grey band: the noise floor. Hollow diamonds: "
    "published numbers for the same toggle.",
    "memory.png": "Peak memory of reference and candidate, each net of what the other holds.",
    "phases.png": "Where the candidate's step goes. The black line is its own reference, measured beside it.",
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
    "unclear": "none of these; more trials or a quieter machine might tell",
    "limit": "bare frozen GEMMs plus the fastest attention, forward and backward, on the same shapes (of a single "
    "linear: that linear without its adapter): no way to train, so it has neither a gate nor a verdict, and its total "
    "is forward + backward",
    "of limit": "the limit's time / the row's, both of forward, or of forward + backward: 1 would be LoRA, norms, loss "
    "and all else for nothing. A ratio of two ratios, each measured in pairs against the same reference",
    "noise floor": "how far the reference is from itself when measured twice (A/A), at least ±1 %",
    "detects": "the smallest true speed-up that as many trials would call faster 4 times out of 5",
    "speed-up": "reference time / candidate time: Hodges–Lehmann centre of the log ratios of paired trials, with a "
    "95 % bootstrap interval; throughput gain is the same number and is not repeated",
    "abba": "the arms did not fit together, or a patch reaches beyond its model: separate processes, in A B B A order",
}


# What a row says at a glance, from left to right; the other columns are folded away below it.
GLANCE = ("toggles", "total", "forward", "backward", "step", "of_limit", "time", "memory", "verdict")


def page(records: Sequence[Record], sessions: Sequence[Session] = (), plots: dict[str, bytes] | None = None) -> str:
    """The page as text. plots: file name → PNG. Everything shown is escaped."""
    found = grouped(records, sessions)
    columns = shown_columns(found)
    details = [[detail(r) for r in members] for members in groups(records).values()]
    share = overhead_share(records)
    environment = Environment(
        loader=PackageLoader("lorabench", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        sessions=[_session(s) for s in sessions],
        counts=_counts(records),
        overhead=f"{100 * share:.0f} %" if math.isfinite(share) else "",
        wall=number(sum(r.cost.wall for r in records if r.cost) / 60),
        headings=HEADINGS,
        columns=[c for c in GLANCE if c in columns],
        more=["toggles", *(c for c in columns if c not in GLANCE)],
        where=_where(sessions),
        groups=list(zip(found, details, strict=True)),
        plots=[(name, CAPTIONS[name], base64.b64encode(png).decode()) for name, png in (plots or {}).items()],
        claims=claim_tables(records),
        sources=load_claims(),
        glossary=GLOSSARY,
    )


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
    shown = {
        "session": session["id"],
        "started": session.get("started"),
        "command": " ".join(map(str, session.get("command") or [])),
        "lorabench": session.get("lorabench"),
        "commit": f"{session['commit']}{dirty}" if session.get("commit") else None,
        "device": machine.get("device"),
        "name": machine.get("name"),
        "CPU": machine.get("cpu"),
        "GPUs": machine.get("gpus"),
        "GPU": _pairs(machine.get("gpu") or {}),
        "driver": machine.get("driver"),
        "cores": machine.get("cores"),
        "memory": f"{memory / GIB:.1f} GiB" if memory else None,
        "measured ceiling, GEMM": ", ".join(f"{k} {number(v)} TFLOP/s" for k, v in gemm.items()),
        "measured ceiling, copy": f"{number(ceilings['copy_gbs'])} GB/s" if ceilings.get("copy_gbs") else None,
        "workers": session.get("workers"),
        "allocator": session.get("allocator"),
        "packages": _pairs(machine.get("packages") or {}),
    }
    return {k: str(v) for k, v in shown.items() if v not in (None, "")}


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v not in (None, "", [], {}))


def detail(record: Record) -> dict[str, Any]:
    """Everything about one cell: `title`, `facts` (name → text), `log`."""
    facts = {
        "status": f"{record.status}: {record.reason}" if record.reason else record.status,
        "reference": " + ".join(record.reference) or "plain",
        "candidate": " + ".join(record.candidate) or "plain",
        "pairing": record.pairing,
        "applied sites": _pairs(record.applied or {}),
        **{phase: _phase(record, phase) for phase in record.phases or {}},
        "tokens": _pairs(record.tokens.model_dump()) if record.tokens else None,
        **{f"memory, {arm}": _memory({**m.model_dump(exclude={'peaks'}), **(m.peaks or {})}) for arm, m in (record.memory or {}).items()},
        "numerics": _numerics(record),
        **{f"bound, {arm} {p}": _pairs(_rounded(b.model_dump())) for arm, ps in (record.roofline or {}).items()
           for p, b in ps.items()},
        "telemetry": _pairs(record.telemetry.model_dump()) if record.telemetry else None,
        "notes": _pairs(record.notes),
        "cost, s": _pairs(_rounded(record.cost.model_dump())) if record.cost else None,
        "design": record.design,
        "key": f"{record.key}, session {record.session}",
    }  # fmt: skip
    return {"title": toggles(record), "status": record.status, "log": record.log,
            "facts": {k: v for k, v in facts.items() if v}}  # fmt: skip


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: number(v) if isinstance(v, float) else v for k, v in values.items()}


def _memory(sizes: dict[str, int | None]) -> str:
    shown = {k: v if k == "retries" else f"{number(v / GIB)} GiB" for k, v in sizes.items() if v is not None}
    return _pairs(shown)


def _phase(record: Record, phase: str) -> str:
    """Both medians with their intervals, and the ratio."""
    times = (record.phases or {}).get(phase)  # type: ignore[call-overload]
    if times is None:
        return ""
    parts = []
    for name, ms in (("reference", times.reference_ms), ("candidate", times.candidate_ms)):
        if ms:
            centre, low, high = stats.median_interval(ms) or (math.nan,) * 3
            parts.append(f"{name} {number(centre, 4)} ms [{number(low, 4)}, {number(high, 4)}] of {len(ms)}")
    if times.speedup is not None:
        parts.append(f"× {ratio(times.speedup, *(math.nan if x is None else x for x in (times.low, times.high)))}")
    return "; ".join(parts)


def _numerics(record: Record) -> str:
    gate = record.numerics
    return _pairs(_rounded(gate.model_dump())) if gate else ""
