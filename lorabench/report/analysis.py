"""Records as one tidy table: a row a cell, a column a quantity, units in the column's name. What every output reads.

A cell that failed keeps its row, with status and reason; what was not measured is NaN or None, never 0.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lorabench.record import stats
from lorabench.contract.kind import kind, registered
from lorabench.record.schema import TOTAL, ArmMemory, Phase, Record
from lorabench.record.store import ENVIRONMENT, RecordError, read_records

GIB = 2**30
ARMS = ("reference", "candidate")
FORWARD_BACKWARD = "forward + backward"
# Cells whose references are further apart than this were measured on machines too unlike for a ratio of their ratios.
REFERENCES_APART = 0.10
OF_LIMIT = ("", "_low", "_high", "_paired", "_forward", "_forward_low", "_forward_high", "_forward_paired")
Session = dict[str, Any]


def load_results(folder: str | Path) -> pd.DataFrame:
    """The tidy table of one results folder (see `frame`). Raises RecordError where it cannot be read."""
    folder = Path(folder)
    return frame(read_records(folder), read_sessions(folder))


def read_sessions(folder: Path) -> list[Session]:
    """The sweep runs in environment.json, oldest first; [] without that file. Raises RecordError."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return []
    try:
        sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"]
        if not all(isinstance(s, dict) and isinstance(s["id"], str) for s in sessions):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path} is not an environment file: expected a JSON object with `sessions`") from None
    return sessions


def frame(records: Sequence[Record], sessions: Sequence[Session] = ()) -> pd.DataFrame:
    """One row a record, in their order. Columns, apart from the record's own fields:

    {phase}_{arm}_ms, _ms_low, _ms_high: median with its 95 % interval; {phase}_speedup, _low, _high likewise.
    p, p_holm: of the total, raw and corrected over all these records. noise_floor, detectable: shares, from the A/A
    record of the same model, workload and (where there is one) reference. verdict: see stats.verdict; None for A/A.
    {arm}_peak_gib, memory_saved_pct; {arm}_tokens_s: real tokens; {arm}_padded_share; {arm}_bound, {arm}_of_ceiling:
    of the phase that takes longest, and averaged by time. limit: a bound on a step, not one; its total is forward +
    backward. of_limit, _low, _high, _paired: limit's time / candidate's time, both of forward + backward (see
    `of_limit`), and of_limit_forward of forward alone.
    device: from environment.json.
    """
    devices = {s["id"]: _device(s.get("machine") or {}) for s in sessions}
    rows = [_row(r, devices.get(r.session, "")) for r in records]
    table = pd.DataFrame(rows, columns=pd.Index(_columns(records)))
    return _judge(table, list(records))


def _device(machine: dict[str, Any]) -> str:
    return str(machine.get("name") or machine.get("device") or "")


def toggles(record: Record) -> str:
    """The row's name: the toggles under test."""
    return " + ".join(record.ablations) or "reference again (A/A)"


def trials_of(record: Record, phase: str) -> Phase | None:
    """The trials of a phase, or of FORWARD_BACKWARD, their sum. A limit has no optimizer step, so forward + backward is
    also what its `total` means, in both arms."""
    phases: dict[Any, Phase] = dict(record.phases or {})
    if phase != FORWARD_BACKWARD :
        return phases.get(phase)
    both = [phases[p] for p in ("forward", "backward") if p in phases]
    if len(both) != 2:
        return None
    sums = {}
    for arm in ARMS:
        first, second = (getattr(p, f"{arm}_ms") for p in both)
        sums[f"{arm}_ms"] = [a + b for a, b in zip(first, second, strict=True)] if first and second else None
    return Phase(**sums)


def phase_speedup(record: Record, phase: str) -> stats.Speedup | None:
    """Speed-up of one phase as it stands in the record, or computed from its trials where it is not there."""
    found = trials_of(record, phase)
    if found is None or not found.reference_ms or not found.candidate_ms:
        return None
    if found.speedup is not None and found.low is not None and found.high is not None:
        return stats.Speedup(found.speedup, found.low, found.high)
    try:
        return _speedup(tuple(found.reference_ms), tuple(found.candidate_ms), record.pairing != "abba")
    except ValueError as error:
        raise RecordError(f"record {record.key} ({toggles(record)}), phase {phase}: {error}") from None


class Share(NamedTuple):
    """A fraction of the limit with its 95 % interval. paired: by way of the reference that both cells had."""

    centre: float
    low: float
    high: float
    paired: bool


def of_limit(record: Record, records: Sequence[Record], phase: str = FORWARD_BACKWARD) -> Share | None:
    """The limit's time / this candidate's in `phase`, of the same model, workload and reference; None without one.

    The two were never in one cell: it is the ratio of their speed-ups over the reference, each measured in pairs, which
    cancels what differs between two GPUs or their clocks. Where the reference waits for its host, or was not equally
    fast in both cells, it would bring in what differs between the hosts instead; then it is the ratio of the two times
    as they are, not paired. `records` are of one kind of device.
    """
    alike = lambda r: (r.model, r.workload, frozenset(r.reference)) == (  # noqa: E731
        record.model, record.workload, frozenset(record.reference),
    )  # fmt: skip
    limit = next((r for r in records if not r.is_candidate and r.status == "ok" and alike(r)), None)
    if limit is None or not record.is_candidate or record.status != "ok":
        return None
    (ours, n), (bound, m) = _logs(record, phase), _logs(limit, phase)
    if not n or not m:
        return None
    apart = abs(math.log(_median(_ms("reference", record, phase)) / _median(_ms("reference", limit, phase))))
    if _reference_waits(record) or apart > REFERENCES_APART:
        direct = _speedup(_ms("candidate", limit, phase), _ms("candidate", record, phase), False)
        return direct and Share(*direct, paired=False)
    return Share(*_interval(ours - bound, min(n, m)), paired=True)


def mean_speedup(records: Sequence[Record], phase: str) -> stats.Speedup | None:
    """Geometric mean of several cells' speed-ups; None where one of them has none."""
    found = [_logs(r, phase) for r in records]
    if not found or not all(n for _, n in found):
        return None
    return _interval(np.mean([logs for logs, _ in found], axis=0), min(n for _, n in found))


def _interval(logs: Any, trials: int) -> stats.Speedup:
    """What `_logs` gives, or a combination of several cells' logs: these are independent, so their replicates are
    combined one by one."""
    low, high = np.quantile(logs[1:], stats.tails(trials))
    return stats.Speedup(*(math.exp(x) for x in (logs[0], min(low, logs[0]), max(high, logs[0]))))


def _reference_waits(record: Record) -> bool:
    """Whether the profile saw the device idle in the reference's forward or backward."""
    bound = (record.roofline or {}).get("reference", {})
    return any(bound[p].label == "host-bound" for p in ("forward", "backward") if p in bound)


def _ms(arm: str, record: Record, phase: str) -> tuple[float, ...]:
    """An arm's times; `_logs` has found that there are some."""
    trials = trials_of(record, phase)
    assert trials is not None
    return tuple(getattr(trials, f"{arm}_ms"))


def _logs(record: Record, phase: str) -> tuple[Any, int]:
    """Log speed-up, the centre and its bootstrap replicates; and the number of trials, 0 where they are too few."""
    trials, found = trials_of(record, phase), phase_speedup(record, phase)
    if found is None or trials is None or not trials.reference_ms or not trials.candidate_ms:
        return None, 0
    times = (tuple(trials.reference_ms), tuple(trials.candidate_ms))
    drawn = _replicates(*times, record.pairing != "abba", zlib.crc32(record.key.encode()))
    return np.concatenate([[math.log(found.centre)], drawn]), min(map(len, times))


@lru_cache(maxsize=4096)
def _replicates(reference_ms: tuple[float, ...], candidate_ms: tuple[float, ...], paired: bool, seed: int) -> Any:
    return stats.replicates(reference_ms, candidate_ms, paired, seed)


@lru_cache(maxsize=4096)  # every output asks again, and a bootstrap takes some 20 ms
def _speedup(reference_ms: tuple[float, ...], candidate_ms: tuple[float, ...], paired: bool) -> stats.Speedup | None:
    return stats.speedup(reference_ms, candidate_ms, paired)


def _median(ms: Sequence[float] | None) -> float:
    return float(np.median(ms)) if ms else math.nan


def _row(record: Record, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": record.key,
        "session": record.session,
        "device": device,
        "model": record.model,
        "workload": record.workload,
        "design": record.design,
        "toggles": toggles(record),
        "reference": " + ".join(record.reference),
        "candidate": " + ".join(record.candidate),
        "noise_record": record.is_noise_floor,
        "limit": not record.is_candidate,
        "status": record.status,
        "reason": record.reason,
        "arm": record.arm,
        "pairing": record.pairing,
        "applied": ", ".join(f"{name} {sites}" for name, sites in (record.applied or {}).items()),
    }
    return row | _times(record) | _memory(record) | _throughput(record) | _bounds(record) | _checks(record)


def _times(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for phase in (*kind(record.kind).phases, TOTAL):
        times = trials_of(record, phase) or Phase()
        ratio = phase_speedup(record, phase)
        for arm in ARMS:
            median = stats.median_interval(getattr(times, f"{arm}_ms") or [])
            for name, value in zip(("ms", "ms_low", "ms_high"), median or (math.nan,) * 3, strict=True):
                found[f"{phase}_{arm}_{name}"] = value
        for name, value in zip(("speedup", "low", "high"), ratio or (math.nan,) * 3, strict=True):
            found[f"{phase}_{name}"] = value
    total = trials_of(record, "total") or Phase()
    found["trials"] = min(len(total.reference_ms or []), len(total.candidate_ms or []))
    if total.reference_ms and total.candidate_ms:
        found["p"] = stats.p_value(total.reference_ms, total.candidate_ms, paired=record.pairing != "abba")
    return found


def _memory(record: Record) -> dict[str, Any]:
    held: dict[Any, ArmMemory] = {} if not record.is_candidate else dict(record.memory or {})  # what a limit holds says nothing
    arms = {arm: held.get(arm) or ArmMemory() for arm in ARMS}
    # A CPU has only the process's resident set; the two kinds are never compared with each other.
    kind = "peak" if any(m.peak is not None for m in arms.values()) else "process"
    used = {arm: getattr(m, kind) for arm, m in arms.items()}
    found: dict[str, Any] = {
        f"{arm}_peak_gib": b / GIB if b is not None and kind == "peak" else math.nan for arm, b in used.items()
    }
    found |= {f"{arm}_process_gib": m.process / GIB if m.process is not None else math.nan for arm, m in arms.items()}
    reference, candidate = used["reference"], used["candidate"]
    saved = kind == "peak" and reference and candidate is not None
    found["memory_saved_pct"] = 100 * (1 - candidate / reference) if saved else math.nan
    return found


def _throughput(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    total = (record.phases or {}).get("total") or Phase()
    for arm in ARMS:
        milliseconds = _median(getattr(total, f"{arm}_ms"))
        tokens = None if not record.is_candidate else record.tokens
        padded = getattr(tokens, f"{arm}_padded") if tokens else 0
        found[f"{arm}_tokens_s"] = 1000 * tokens.real / milliseconds if tokens else math.nan
        found[f"{arm}_padded_share"] = padded / max(tokens.real + padded, 1) if tokens else math.nan
    return found


def _bounds(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in ARMS:
        # Not of a limit: the FLOPs are those of a training step, of which it leaves some out.
        phases = {} if not record.is_candidate else dict(record.roofline or {}).get(arm) or {}  # type: ignore[call-overload]
        took = {p: _median(getattr((record.phases or {}).get(p) or Phase(), f"{arm}_ms")) for p in phases}
        labels = [(took[p], b.label) for p, b in phases.items() if b.label and took[p] > 0]
        reached = [(took[p], b.of_ceiling) for p, b in phases.items() if b.of_ceiling is not None and took[p] > 0]
        found[f"{arm}_bound"] = max(labels)[1] if labels else None
        found[f"{arm}_of_ceiling"] = (
            sum(t * x for t, x in reached) / sum(t for t, _ in reached) if reached else math.nan
        )
    return found


def _checks(record: Record) -> dict[str, Any]:
    gate, cost, telemetry = record.numerics, record.cost, record.telemetry
    found: dict[str, Any] = {"disturbed": len(telemetry.disturbed_trials) if telemetry else math.nan}
    if gate:
        found |= {
            "grad_error": gate.grad_error,
            "grad_allowed": gate.grad_allowed,
            "loss_error": gate.loss_error,
            "loss_allowed": gate.loss_allowed,
            "worst_tensor": gate.worst,
            "tolerance": gate.tolerance,
        }
    if cost:
        found |= {"wall_s": cost.wall, "overhead_share": overhead_share([record])}
    return found


def overhead_share(records: Sequence[Record]) -> float:
    """Share of the wall time that is neither warm-up nor trials; NaN where no record has its cost."""
    costs = [r.cost for r in records if r.cost]
    wall = sum(c.wall for c in costs)
    return max(0.0, 1 - sum(c.warmup + c.trials for c in costs) / wall) if wall > 0 else math.nan


def phases_of(records: Sequence[Record]) -> list[str]:
    """The phases of the kinds that are there, in the kinds' order."""
    there = {r.kind for r in records}
    return list(dict.fromkeys(p for name, k in registered().items() if name in there for p in k.phases))


def _columns(records: Sequence[Record]) -> list[str]:
    times = [f"{arm}_{c}" for arm in ARMS for c in ("ms", "ms_low", "ms_high")]
    phases = [f"{p}_{c}" for p in (TOTAL, *reversed(phases_of(records))) for c in ("speedup", "low", "high", *times)]
    arms = [f"{arm}_{c}" for c in ("peak_gib", "process_gib", "tokens_s", "padded_share", "bound", "of_ceiling")
            for arm in ARMS]  # fmt: skip
    return [
        *("model", "workload", "toggles", "status", "verdict", "reason", *phases),
        *(f"of_limit{c}" for c in OF_LIMIT),
        *("trials", "disturbed", "p", "p_holm", "noise_floor", "detectable", *arms, "memory_saved_pct"),
        *("grad_error", "grad_allowed", "loss_error", "loss_allowed", "worst_tensor", "tolerance", "applied"),
        *("reference", "candidate", "design", "pairing", "arm", "noise_record", "limit", "wall_s", "overhead_share"),
        *("device", "session", "key"),
    ]


def _judge(table: pd.DataFrame, records: list[Record]) -> pd.DataFrame:
    """Fill in what takes more than one record: share of the limit, Holm's correction, noise floor, verdict."""
    of_device: dict[str, list[Record]] = {}
    for r, device in zip(records, table["device"], strict=True):
        of_device.setdefault(device, []).append(r)
    for phase, columns in ((FORWARD_BACKWARD, OF_LIMIT[:4]), ("forward", OF_LIMIT[4:])):
        found = [of_limit(r, of_device[d], phase) for r, d in zip(records, table["device"], strict=True)]
        shares = [share or (math.nan, math.nan, math.nan, None) for share in found]
        for column, values in zip(columns, zip(*shares, strict=True), strict=False):
            table[f"of_limit{column}"] = values
    tested = [r.status == "ok" and not r.is_noise_floor and r.is_candidate for r in records]
    judged = [i for i, is_tested in enumerate(tested) if is_tested and table["p"][i] >= 0]
    adjusted = dict(zip(judged, stats.holm([table["p"][i] for i in judged]), strict=True))
    floors = [noise_interval(r, records) for r in records]
    table["p_holm"] = [adjusted.get(i, math.nan) for i in range(len(records))]
    table["noise_floor"] = [stats.noise_floor(f) for f in floors]
    table["detectable"] = [d if (d := stats.detectable(f)) is not None else math.nan for f in floors]
    table["verdict"] = [
        stats.verdict(phase_speedup(r, "total"), adjusted[i], table["noise_floor"][i], table["trials"][i])
        if i in adjusted else None for i, r in enumerate(records)
    ]  # fmt: skip
    return table


def noise_interval(record: Record, records: Sequence[Record]) -> stats.Speedup | None:
    """The A/A interval that goes with a record: of its own reference where that was measured, else the widest."""
    found = [r for r in records if r.is_noise_floor and (r.model, r.workload) == (record.model, record.workload)]
    narrow: list[Callable[[Record], bool]] = [
        lambda r: set(r.reference) == set(record.reference),
        lambda r: r.pairing == record.pairing,
    ]
    for fits in narrow:
        found = [r for r in found if fits(r)] or found
    ratios = [s for r in found if (s := phase_speedup(r, "total"))]
    return max(ratios, key=stats.noise_floor, default=None)
