"""Everything about one cell, as the page shows it when its row is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lorabench.record.schema import ARMS, ArmJob, ArmName, Energy, Numerics, RankSpread, Record, Telemetry
from lorabench.report.analysis import Row
from lorabench.report.rerun import rerun
from lorabench.report.tidy import GIB, gate_of
from lorabench.report.words import number, percent, ratio

Fact = str | list[list[str]]  # text, or a table: headings, then rows


def detail(record: Record, row: Row, command: Sequence[object]) -> dict[str, Any]:
    """All of one row: `facts` (name → text or table) and `log`.

    row: that of the tidy table. command: that of the record's session."""
    facts: dict[str, Fact | None] = {
        "status": f"{record.status}: {record.reason}" if record.reason else record.status,
        "kind": record.kind,
        "reference": " + ".join(record.reference) or "plain",
        "candidate": " + ".join(record.candidate) or "plain",
        "pairing": record.pairing,
        "processes": row["processes"] if isinstance(row["processes"], str) else None,  # pandas holds None as NaN
        "sessions": row["session_ratios"],
        "what was patched": _patched(record),
        **{name: _phase(name, times, row) for name, times in record.phases.items()},
        "tokens": _tokens(record),
        "jobs": _jobs(record),
        **{f"ranks, {arm}": _ranks(spread) for arm, spread in record.ranks.items()},
        **{f"memory, {arm}": _memory(held.model_dump()) for arm, held in record.memory.items()},
        "numerics": _numerics(record.numerics) if record.numerics else None,
        "numerics, of what": _compared(record.numerics) if record.numerics else None,
        **_roofline(record),
        "telemetry": _telemetry(record.telemetry) if record.telemetry else None,
        **{f"energy, {arm}": _energy(block) for arm, block in record.energy.items()},
        "notes": pairs({n: said for n, said in record.notes.items() if n not in (*(record.applied or {}), *ARMS)}),
        **{f"notes, {arm}": _of_arm(record.notes[arm]) for arm in ARMS if arm in record.notes},
        "cost, s": pairs(_rounded(record.cost.model_dump())) if record.cost else None,
        "design": record.design,
        "key": f"{record.key}, session {record.session}",
        "measure it again": rerun(record, command),
    }  # fmt: skip
    return {"facts": {name: fact for name, fact in facts.items() if fact}, "log": record.log or ""}


def _patched(record: Record) -> list[list[str]] | None:
    """A row a toggle of the candidate: how many sites it changed, and what it says of itself."""
    if not record.applied:
        return None
    rows = [[name, str(sites), said(record.notes.get(name))] for name, sites in record.applied.items()]
    return [["toggle", "sites", "says"], *rows]


def said(note: Any) -> str:
    return pairs(note) if isinstance(note, Mapping) else "" if note is None else str(note)


def _of_arm(note: Any) -> Fact:
    """What the kind says of an arm; a row a value, where that is a table."""
    if not isinstance(note, Mapping):
        return str(note)
    return [["what", "is"], *([name, value] for name, value in _flat("", note))]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for inner, of in value.items():
            yield from _flat(f"{name}, {inner}" if name else str(inner), of)
    else:
        yield name, number(value) if isinstance(value, float) else str(value)


def _numerics(found: Numerics) -> list[list[str]]:
    """A row a comparison. `checks` are those of the full arms and of the timed trials; what stands before them is of
    the gate, and in older records also of the first round."""
    worst = f"{found.worst}, of {found.tensors}" if found.worst else f"of {found.tensors}"
    named = [
        ("training loss", found.loss_error, found.loss_allowed, ""),
        ("adapter gradient", found.grad_error, found.grad_allowed, worst),
        ("adapter gradient of plain PEFT", found.plain_grad_error, None, found.plain_worst or ""),
        ("gradient's scale", found.scale_error, found.scale_allowed, found.scale_worst),
        ("first update", found.update_error, None, ""),
        ("tensors that differ", found.unequal, 0, worst),
        ("full arms, loss", found.full_loss_error, found.full_loss_allowed, ""),
        ("full arms, gradient norm", found.full_grad_norm_error, found.full_grad_norm_allowed, ""),
        *((check.name, check.found, check.allowed, check.where) for check in found.checks),
    ]
    rows = [
        [name, number(value), "" if allowed is None else number(allowed), where,
         "" if allowed is None else "passed" if value <= allowed else "failed"]
        for name, value, allowed, where in named if value is not None
    ]  # fmt: skip
    return [["what", "found", "allowed", "where", "outcome"], *rows]


def _compared(found: Numerics) -> str:
    """What the numbers of the table are of."""
    return pairs({
        "passed": "yes" if found.passed else "no",
        "tensors": found.tensors,
        "longest shallow sample, tokens": found.shallow_tokens,
        "tolerance": found.tolerance,
    })  # fmt: skip


def _telemetry(found: Telemetry) -> list[list[str]]:
    measured = {"SM clock, MHz": found.sm_clock_mhz, "power, W": found.power_w, "temperature, °C": found.temperature_c}
    rows = [[name, *map(number, three)] for name, three in measured.items() if three]
    listed = {
        "throttled by": found.throttle,
        "other processes": found.foreign_processes,
        "disturbed trials": found.disturbed_trials,
    }
    rows += [[name, ", ".join(map(str, values)), "", ""] for name, values in listed.items() if values]
    rows += [] if found.load_average is None else [["load average at the end", "", "", number(found.load_average)]]
    return [["while the trials ran", "least", "median", "most"], *rows]


def _energy(found: Energy) -> str:
    watts = number(found.joules / found.seconds)
    return f"{number(found.joules)} J in {found.steps} steps alone, {number(found.seconds)} s, {watts} W"


def pairs(values: Mapping[Any, Any]) -> str:
    """`name value, name value` of what is known."""
    return ", ".join(f"{k} {v}" for k, v in values.items() if v is not None and v != "" and v != [] and v != {})


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: number(v) if isinstance(v, float) else v for k, v in values.items()}


def _phase(name: str, times: Mapping[ArmName, Sequence[float]], row: Row) -> str:
    """Both medians with their intervals, and the ratio."""
    parts = []
    for arm, ms in times.items():
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
        for arm, phases in record.roofline.items() for phase, found in phases.items()
    }  # fmt: skip


def _tokens(record: Record) -> str | None:
    if not record.tokens:
        return None
    last = [*record.tokens.values()][-1]
    padding = {f"{arm}_padded": record.padding(arm) for arm in ARMS}
    return pairs({"real": last.real, "trained": last.trained} | padding)


def _jobs(record: Record) -> list[list[str]] | None:
    """A row a job."""
    if not (jobs := record.jobs.get("candidate")):
        return None
    headings = ["job", "r", "real tokens", "trained", "padding, ref → cand", "gate", "gradient error / allowed"]
    before = record.jobs.get("reference", {})
    return [headings, *([name, *_job(before.get(name), job)] for name, job in jobs.items())]


def _job(before: ArmJob | None, job: ArmJob) -> list[str]:
    tokens, gate = job.tokens, job.numerics
    errors = f"{number(gate.grad_error, 2)} / {number(gate.grad_allowed, 2)}" if gate else ""
    padding = f"{before.tokens.padded if before else 0} → {tokens.padded}"
    return [str(job.r), str(tokens.real), str(tokens.trained), padding, gate_of(job), errors]


def _ranks(found: RankSpread) -> str:
    """How far the slowest is behind, and how often each was the slowest."""
    slowest = ", ".join(f"rank {r} in {found.slowest.count(r)}" for r in sorted(set(found.slowest)))
    behind = f"slowest behind the fastest by {percent(found.spread)} (median)"
    return f"{found.size} ranks, {behind}; slowest: {slowest} of {len(found.slowest)} trials"
