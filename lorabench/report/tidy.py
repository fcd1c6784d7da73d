"""Records as one tidy table: a row a cell, a column a quantity, units in the column's name. What every output reads.

A cell that failed keeps its row, with status and reason; what was not measured is NaN or None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lorabench.contract.kind import registered
from lorabench.record import stats
from lorabench.record.schema import ARMS, TOTAL, UNCHECKED, ArmJob, Cost, PhaseRoofline, Record
from lorabench.report.contrasts import Contrasts
from lorabench.report.labels import labels
from lorabench.report.noise import NoiseFloors
from lorabench.report.replicates import Row
from lorabench.report.shares import Shares, columns

GIB = 2**30
UNKNOWN = (math.nan, math.nan, math.nan)
SHARE_FIELDS = ("", "_low", "_high", "_paired")


def tidy(
    rows: Sequence[Row],
    sessions: Sequence[Mapping[str, Any]],
    devices: Sequence[str],
    contrasts: Contrasts,
    floors: NoiseFloors,
) -> pd.DataFrame:
    """One row a cell, in their order. Columns, apart from the fields of the record that it shows:

    {phase}_{arm}_ms, _ms_low, _ms_high: median with its 95 % interval; {phase}_speedup, _low, _high likewise; of each
    phase of the kinds that are there and of the total.
    Of several sessions the speed-up is their mean, with the spread between them in its interval, and the medians those
    of the sessions' medians. sessions: how many were measured, sessions_tried: with those that failed; session_low,
    session_high, session_ratios: their ratios of the total; reference_moved: between the fastest and the slowest, as a
    share; other_code: records of another commit, which the row leaves out; dirty: measured with uncommitted changes.
    toggles: see `labels`.
    p, p_holm: of the total, raw and corrected over all these records. noise_floor, detectable: shares, from the A/A
    record of the same model, workload and (where there is one) reference and pairing; noise_pairing: which that had.
    processes: how many each arm had, where they were separate. verdict: see stats.verdict; None for A/A.
    {arm}_peak_gib, memory_saved_pct; {arm}_tokens_s: real tokens; {arm}_j_per_ktok: joules for a thousand of them, only
    where a GPU counted them; {arm}_padded_share; {arm}_bound, {arm}_of_ceiling: of the phase that takes longest, and
    averaged by time (of phases that only move bytes: the longest at the measured rate, over their sum);
    {arm}_host_share: of the time in which the device waited; {arm}_communication_ms, {arm}_exposed_ms: only where ranks
    send, in which a collective ran and in which nothing else did. {arm}_fits_tokens, {arm}_fits_jobs: of an arm that
    ran out of memory, the longest samples or the most jobs with which it did not. unchecked: True where the sweep was
    ended from outside, before its last checks; only where a row is.
    of_limit, _low, _high, _paired: limit's time / candidate's time, both of the limit's phases, and of_limit_forward of
    forward alone (see `shares`). limit: least work, no candidate. jobs, job_*, {arm}_ranks, {arm}_rank_spread: only
    where a record has several jobs or ranks. family: of both arms.
    device: from environment.json.
    """
    records = [row.shown for row in rows]
    found = _times(rows, contrasts)
    medians = {name: found[name].tolist() for name in found if name.endswith("_ms")}
    found |= _columns([
        _row(record, label, device, {name: of[i] for name, of in medians.items()})
        for i, (record, label, device) in enumerate(zip(records, labels(records, sessions), devices, strict=True))
    ])  # fmt: skip
    found |= _sessions(rows, sessions, contrasts)
    found |= _shares(records, devices, contrasts)
    found |= _judged(records, contrasts, floors, found)
    names = [c for c in _order(records) if c in found or c not in _WHERE_PRESENT]
    return pd.DataFrame({c: found.get(c, [math.nan] * len(records)) for c in names}, columns=pd.Index(names))


def kinds_of(records: Iterable[Record]) -> list[Any]:
    """The kinds that are there, in the order in which they are registered."""
    there = {r.kind for r in records}
    return [k for name, k in registered().items() if name in there]


def phases_of(records: Iterable[Record]) -> list[str]:
    """The phases of the kinds that are there, in the kinds' order."""
    return list(dict.fromkeys(p for k in kinds_of(records) for p in k.phases))


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _row(record: Record, label: str, device: str, took: dict[str, float]) -> dict[str, Any]:
    """What a record says by itself. took: median ms by `{phase}_{arm}_ms`."""
    row: dict[str, Any] = {
        "key": record.key,
        "session": record.session,
        "family": record.family,
        "device": device,
        "kind": record.kind,
        "model": record.model,
        "workload": record.workload,
        "design": record.design,
        "toggles": label,
        "reference": " + ".join(record.reference),
        "candidate": " + ".join(record.candidate),
        "noise_record": record.is_noise_floor,
        **{name: record.kind == name for name in _least_kinds()},
        "status": record.status,
        "reason": record.reason,
        "arm": record.arm,
        "pairing": record.pairing,
        "processes": _processes(record),
        "applied": ", ".join(f"{name} {sites}" for name, sites in (record.applied or {}).items()),
    }
    # Not of the least work: what it holds says nothing, and its FLOPs are those of what it leaves out.
    own: dict[str, Any] = {}
    if record.is_candidate:
        own = _memory(record) | _throughput(record, took) | _energy(record) | _roofline(record, took)
    return row | own | _checks(record) | _jobs(record) | _ranks(record)


def _processes(record: Record) -> str | None:
    """How many the reference and the candidate had, where they were separate."""
    found = record.trials_by_process
    return " and ".join(str(len(sizes)) for sizes in found) if found else None


def _least_kinds() -> list[str]:
    return [name for name, k in registered().items() if not k.candidate]


def _times(rows: Sequence[Row], contrasts: Contrasts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    records = [row.shown for row in rows]
    every = [r for row in rows for r in row.measured]
    begins = np.cumsum([0, *(len(row.measured) for row in rows)])[:-1]
    for phase in (*phases_of(records), TOTAL):
        for arm in ARMS:
            medians = _over_sessions(stats.median_intervals([r.ms(arm, (phase,)) for r in every]), begins)
            found |= {f"{phase}_{arm}_{c}": medians[:, i] for i, c in enumerate(("ms", "ms_low", "ms_high"))}
        ratios = np.array([contrasts.speedup(r, (phase,)) or UNKNOWN for r in records]).reshape(-1, 3)
        found |= {f"{phase}_{c}": ratios[:, i] for i, c in enumerate(("speedup", "low", "high"))}
    whole = [contrasts.of(r) for r in records]
    found["trials"] = [_trials(r) for r in records]
    found["p"] = [c.p_value() if c else math.nan for c in whole]
    return found


def _over_sessions(medians: NDArray[np.float64], begins: NDArray[np.intp]) -> NDArray[np.float64]:
    """Of each row the median of its sessions' medians, the lowest of their lower bounds and the highest upper one."""
    if len(begins) == len(medians):
        return medians
    ends = [*begins[1:], len(medians)]
    centres = [np.median(medians[a:b, 0]) for a, b in zip(begins, ends, strict=True)]
    return np.stack(
        [centres, np.minimum.reduceat(medians[:, 1], begins), np.maximum.reduceat(medians[:, 2], begins)], 1
    )


def _sessions(rows: Sequence[Row], sessions: Sequence[Mapping[str, Any]], contrasts: Contrasts) -> dict[str, Any]:
    """What a row says of the sessions that it is of."""
    dirty = {s["id"] for s in sessions if s.get("dirty")}
    found: list[dict[str, Any]] = []
    for row in rows:
        ratios = [c.centre for c in contrasts.sessions(row.shown)]
        found.append({
            "sessions": len(row.measured) if row.shown.status == "ok" else 0,
            "sessions_tried": row.tried,
            "session_low": min(ratios, default=math.nan),
            "session_high": max(ratios, default=math.nan),
            "session_ratios": ", ".join(f"{ratio:.4g}" for ratio in ratios) if len(ratios) > 1 else "",
            "reference_moved": _reference_moved(row.measured),
            "other_code": row.other_code,
            "dirty": any(r.session in dirty for r in row.measured),
        })  # fmt: skip
    return _columns(found)


def _reference_moved(records: Sequence[Record]) -> float:
    """How much longer the reference took in the slowest session than in the fastest, as a share; NaN of one session."""
    medians = [float(np.median(ms)) for r in records if (ms := r.ms("reference"))]
    return max(medians) / min(medians) - 1 if len(medians) > 1 else math.nan


def _trials(record: Record) -> int:
    """Of the smaller arm; 0 where one was not measured."""
    return min(len(record.ms(arm)) for arm in ARMS)


def _shares(records: Sequence[Record], devices: Sequence[str], contrasts: Contrasts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    shares = Shares(records, devices, contrasts)
    for column in columns(kinds_of(records)):
        values = [(*s.contrast.speedup, s.paired) if (s := shares.of(r, column)) else (*UNKNOWN, None) for r in records]
        found |= {f"{column.column}{field}": [v[i] for v in values] for i, field in enumerate(SHARE_FIELDS)}
    return found


def _memory(record: Record) -> dict[str, Any]:
    arms = {arm: record.held(arm) for arm in ARMS}
    # A CPU has only the process's resident set; the two are never compared with each other.
    measure = "peak" if any(m.peak is not None for m in arms.values()) else "process"
    used = {arm: getattr(m, measure) for arm, m in arms.items()}
    found: dict[str, Any] = {
        f"{arm}_peak_gib": b / GIB if b is not None and measure == "peak" else math.nan for arm, b in used.items()
    }
    found |= {f"{arm}_process_gib": m.process / GIB if m.process is not None else math.nan for arm, m in arms.items()}
    reference, candidate = used["reference"], used["candidate"]
    saved = measure == "peak" and reference and candidate is not None
    edges = {arm: record.notes.get(arm, {}).get("edge") for arm in ARMS}
    found |= {f"{arm}_fits_{edge['of']}": edge["fits"] for arm, edge in edges.items() if edge}
    found["memory_saved_pct"] = 100 * (1 - candidate / reference) if saved else math.nan
    return found


def _throughput(record: Record, took: dict[str, float]) -> dict[str, Any]:
    if (real := record.real_tokens) is None:
        return {}
    found: dict[str, Any] = {}
    for arm in ARMS:
        padded = record.padding(arm)
        found[f"{arm}_tokens_s"] = 1000 * real / took[f"{TOTAL}_{arm}_ms"]
        found[f"{arm}_padded_share"] = padded / max(real + padded, 1)
    return found


def _energy(record: Record) -> dict[str, float]:
    """Joules for a thousand real tokens, by arm."""
    if not (real := record.real_tokens):
        return {}
    per_step = {arm: block.joules / block.steps for arm, block in record.energy.items()}
    return {f"{arm}_j_per_ktok": 1000 * joules / real for arm, joules in per_step.items()}


def _roofline(record: Record, took: dict[str, float]) -> dict[str, Any]:
    """Columns {arm}_bound and {arm}_of_ceiling, as they have always been called: the label and the share reached; and
    {arm}_host_share, of the phases' time in which the device waited for its host; and what ranks send."""
    found: dict[str, Any] = {}
    for arm, profiled in record.roofline.items():
        timed = [(ms, x) for p, x in profiled.items() if (ms := took.get(f"{p}_{arm}_ms", math.nan)) > 0]
        labels = [(ms, x.label) for ms, x in timed if x.label]
        reached = [(ms, x.of_ceiling) for ms, x in timed if x.of_ceiling is not None]
        found[f"{arm}_bound"] = max(labels)[1] if labels else None
        busy = [(ms, x.device_busy_ms) for ms, x in timed if x.device_busy_ms]
        found[f"{arm}_host_share"] = (
            max(0.0, 1 - sum(b for _, b in busy) / sum(t for t, _ in busy)) if busy else math.nan
        )
        for what in ("communication_ms", "exposed_ms"):
            spent = [ms for _, x in timed if (ms := getattr(x, what)) is not None]
            found |= {f"{arm}_{what}": sum(spent)} if spent else {}
        whole = sum(t for t, _ in reached)
        found[f"{arm}_of_ceiling"] = sum(t * x for t, x in reached) / whole if reached else _of_rates(timed)
    return found


def _of_rates(timed: Sequence[tuple[float, PhaseRoofline]]) -> float:
    """Of phases that move bytes, and may do so at once: the longest of them at the rate that was measured, as a share
    of the time that all of them took. NaN where a rate is not known."""
    moving = [x for _, x in timed if x.gbytes]
    if not moving or any(not x.ceiling_gbs for x in moving):
        return math.nan
    least_ms = max(1000 * x.gbytes / x.ceiling_gbs for x in moving if x.gbytes and x.ceiling_gbs)
    return least_ms / sum(ms for ms, _ in timed)


def _checks(record: Record) -> dict[str, Any]:
    gate, cost, telemetry = record.numerics, record.cost, record.telemetry
    found: dict[str, Any] = {"disturbed": len(telemetry.disturbed_trials)} if telemetry else {}
    if UNCHECKED in record.notes:
        found["unchecked"] = True  # status ok, but what is judged behind the rounds was not
    if gate:
        found |= {
            "grad_error": gate.grad_error,
            "grad_allowed": gate.grad_allowed,
            "loss_error": gate.loss_error,
            "loss_allowed": gate.loss_allowed,
            "worst_tensor": gate.worst,
            "tolerance": gate.tolerance,
        }
        found |= {} if gate.unequal is None else {"unequal": gate.unequal}
    if cost:
        found |= {"wall_s": cost.wall, "overhead_share": _overhead_share(cost)}
    return found


def _jobs(record: Record) -> dict[str, Any]:
    """Several jobs of one cell, each column in their order."""
    if not (jobs := record.jobs.get("candidate")):
        return {}
    said = lambda show: ", ".join(f"{name} {show(job)}" for name, job in jobs.items())  # noqa: E731
    return {
        "jobs": len(jobs),
        "job_tokens": said(lambda job: job.tokens.real),
        "job_r": said(lambda job: job.r),
        "job_gate": said(gate_of),
    }


def gate_of(job: ArmJob) -> str:
    """passed, failed, or none where it was not judged."""
    return "none" if job.numerics is None else "passed" if job.numerics.passed else "failed"


def _ranks(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm, spread in record.ranks.items():
        found |= {f"{arm}_ranks": spread.size, f"{arm}_rank_spread": spread.spread}
    return found


def _overhead_share(cost: Cost) -> float:
    """Share of the wall time that is neither warm-up nor trials; NaN where that took no time."""
    return max(0.0, 1 - (cost.warmup + cost.trials) / cost.wall) if cost.wall > 0 else math.nan


_ARMS_OF = lambda *names: [f"{arm}_{name}" for name in names for arm in ARMS]  # noqa: E731
_WHERE_PRESENT = {
    *("unchecked", "unequal", "jobs", "job_tokens", "job_r", "job_gate"),
    *_ARMS_OF("ranks", "rank_spread", "j_per_ktok", "fits_tokens", "fits_jobs", "communication_ms", "exposed_ms"),
}  # fmt: skip


def _order(records: Sequence[Record]) -> list[str]:
    times = [f"{arm}_{c}" for arm in ARMS for c in ("ms", "ms_low", "ms_high")]
    phases = [TOTAL, *reversed(phases_of(records))]
    return [
        *("model", "workload", "toggles", "status", "verdict", "reason"),
        *(f"{p}_{c}" for p in phases for c in (*times, "speedup", "low", "high")),
        *(f"{share.column}{field}" for share in columns(kinds_of(records)) for field in SHARE_FIELDS),
        *("sessions", "sessions_tried", "session_low", "session_high", "session_ratios", "reference_moved"),
        *("other_code", "dirty", "trials", "disturbed", "unchecked", "p", "p_holm"),
        *("noise_floor", "noise_pairing", "detectable"),
        *_ARMS_OF(
            "peak_gib",
            "process_gib",
            "tokens_s",
            "j_per_ktok",
            "padded_share",
            "bound",
            "of_ceiling",
            "host_share",
            "communication_ms",
            "exposed_ms",
            "fits_tokens",
        ),
        "memory_saved_pct",
        *("grad_error", "grad_allowed", "loss_error", "loss_allowed", "unequal", "worst_tensor", "tolerance"),
        *("applied", "jobs", "job_tokens", "job_r", "job_gate", *_ARMS_OF("ranks", "rank_spread")),
        *("reference", "candidate", "design", "pairing", "processes", "arm", "noise_record", *_least_kinds()),
        *("wall_s", "overhead_share", "device", "session", "family", "key", "kind"),
    ]


def _judged(
    records: Sequence[Record], contrasts: Contrasts, floors: NoiseFloors, found: dict[str, Any]
) -> dict[str, Any]:
    """What takes more than one record: Holm's correction, noise floor, verdict."""
    p, floor_of = found["p"], [floors.of(r) for r in records]
    same = [f and f.same for f in floor_of]
    tested = [r.status == "ok" and not r.is_noise_floor and r.is_candidate for r in records]
    judged = [i for i, is_tested in enumerate(tested) if is_tested and p[i] >= 0]
    adjusted = dict(zip(judged, stats.holm([p[i] for i in judged]), strict=True))
    floor = [stats.noise_floor(s) for s in same]
    detectable = [stats.detectable(s) for s in same]
    verdicts = {
        i: stats.verdict(contrasts.speedup(records[i]), corrected, floor[i], found["trials"][i])
        for i, corrected in adjusted.items()
    }
    return {
        "p_holm": [adjusted.get(i, math.nan) for i in range(len(records))],
        "noise_floor": floor,
        "noise_pairing": [f and f.pairing for f in floor_of],
        "detectable": [math.nan if d is None else d for d in detectable],
        "verdict": [verdicts.get(i) for i in range(len(records))],
    }
