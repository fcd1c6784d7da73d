"""Everything about one cell, as the page shows it when its row is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorabench.record.schema import ARMS, JobRecord, Phase, RankSpread, Record
from lorabench.report.analysis import Row
from lorabench.report.contrasts import toggles
from lorabench.report.tidy import GIB, gate_of
from lorabench.report.words import number, percent, ratio

Fact = str | list[list[str]]  # text, or a table: headings, then rows


def detail(record: Record, row: Row) -> dict[str, Any]:
    """`title`, `status`, `facts` (name → text or table) and `log` of a cell. row: its row of the tidy table."""
    facts: dict[str, Fact | None] = {
        "status": f"{record.status}: {record.reason}" if record.reason else record.status,
        "kind": record.kind,
        "reference": " + ".join(record.reference) or "plain",
        "candidate": " + ".join(record.candidate) or "plain",
        "pairing": record.pairing,
        "processes": row["processes"],
        "sessions": row["session_ratios"],
        "applied sites": pairs(record.applied or {}),
        **{name: _phase(name, phase, row) for name, phase in (record.phases or {}).items()},
        "tokens": pairs(record.tokens.model_dump()) if record.tokens else None,
        "jobs": _jobs(record.jobs or {}),
        **{f"ranks, {arm}": _ranks(spread) for arm, spread in (record.ranks or {}).items()},
        **{f"memory, {arm}": _memory(held.model_dump()) for arm, held in (record.memory or {}).items()},
        "numerics": pairs(_rounded(record.numerics.model_dump())) if record.numerics else None,
        **_roofline(record),
        "telemetry": pairs(record.telemetry.model_dump()) if record.telemetry else None,
        "notes": pairs(record.notes),
        "cost, s": pairs(_rounded(record.cost.model_dump())) if record.cost else None,
        "design": record.design,
        "key": f"{record.key}, session {record.session}",
    }  # fmt: skip
    shown = {name: fact for name, fact in facts.items() if fact}
    return {"title": toggles(record), "status": record.status, "facts": shown, "log": record.log or ""}


def pairs(values: Mapping[Any, Any]) -> str:
    """`name value, name value` of what is known."""
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None and v != "" and v != [] and v != {})


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: number(v) if isinstance(v, float) else v for k, v in values.items()}


def _phase(name: str, phase: Phase, row: Row) -> str:
    """Both medians with their intervals, and the ratio."""
    parts = []
    for arm in ARMS:
        if ms := getattr(phase, f"{arm}_ms"):
            centre, low, high = (number(row[f"{name}_{arm}_{c}"], 4) for c in ("ms", "ms_low", "ms_high"))
            parts.append(f"{arm} {centre} ms [{low}, {high}] of {len(ms)}")
    if shown := ratio(*(row[f"{name}_{c}"] for c in ("speedup", "low", "high"))):
        parts.append(f"× {shown}")
    return "; ".join(parts)


def _memory(sizes: dict[str, Any]) -> str:
    """In GiB, but for what is no size; each phase's peak beside the others."""
    sizes = {k: v for k, v in sizes.items() if k != "peaks"} | (sizes["peaks"] or {})
    return pairs({k: v if k == "retries" or v is None else f"{number(v / GIB)} GiB" for k, v in sizes.items()})


def _roofline(record: Record) -> dict[str, str]:
    return {
        f"roofline, {arm} {phase}": pairs(_rounded(found.model_dump()))
        for arm, phases in (record.roofline or {}).items() for phase, found in phases.items()
    }  # fmt: skip


def _jobs(jobs: Mapping[str, JobRecord]) -> list[list[str]] | None:
    """A row a job."""
    if not jobs:
        return None
    headings = ["job", "r", "real tokens", "trained", "padding, ref → cand", "gate", "gradient error / allowed"]
    return [headings, *([name, *_job(job)] for name, job in jobs.items())]


def _job(job: JobRecord) -> list[str]:
    tokens, gate = job.tokens, job.numerics
    errors = f"{number(gate.grad_error, 2)} / {number(gate.grad_allowed, 2)}" if gate else ""
    padding = f"{tokens.reference_padded} → {tokens.candidate_padded}"
    return [str(job.r), str(tokens.real), str(tokens.trained), padding, gate_of(job), errors]


def _ranks(found: RankSpread) -> str:
    """How far the slowest is behind, and how often each was the slowest."""
    slowest = ", ".join(f"rank {r} in {found.slowest.count(r)}" for r in sorted(set(found.slowest)))
    behind = f"slowest behind the fastest by {percent(found.spread)} (median)"
    return f"{found.size} ranks, {behind}; slowest: {slowest} of {len(found.slowest)} trials"
