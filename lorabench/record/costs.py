"""What cells took on this machine, by the records of earlier sweeps: what the next ones' times are estimated by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lorabench.contract.machine import Machine
from lorabench.plan.estimate import Seen
from lorabench.record.schema import TOTAL, Record
from lorabench.record.store import read_records, read_sessions


def seen_on(machine: Machine, folders: Iterable[Path]) -> Iterator[Seen]:
    """The measured cells of these results folders whose session was on such a machine. Raises RecordError."""
    for folder in folders:
        here = {s["id"] for s in read_sessions(folder) if _same(machine, s.get("machine"))}
        yield from (seen for r in read_records(folder) if r.session in here and (seen := _seen(r)))


def _same(machine: Machine, other: Any) -> bool:
    facts = ("device", "name") if machine.device == "cuda" else ("device", "name", "cores")
    return isinstance(other, dict) and all(other.get(fact) == getattr(machine, fact) for fact in facts)


def _seen(record: Record) -> Seen | None:
    total = (record.phases or {}).get(TOTAL)
    if record.cost is None or total is None or not total.reference_ms or not total.candidate_ms:
        return None
    return Seen(
        record.kind, record.model, record.workload, frozenset(record.candidate), record.pairing == "abba",
        record.cost.wall, record.cost.trials, len(total.candidate_ms),
    )  # fmt: skip
