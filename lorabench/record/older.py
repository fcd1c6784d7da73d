"""Records of schema 1, turned into schema 2 on reading; what lies on the disk is never rewritten. And what can be said
of two arms that were never measured together, as most of schemas 1 and 2.

Schema 1 knew one kind of cell and told two others by a flag and by the model's name; phases were fields; the total of a
limit held the reference's optimizer step, which the limit has not (a ratio of 72.71 for one of 69.83).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lorabench.contract.kind import kind, registered
from lorabench.record.contrast import Contrast, contrast
from lorabench.record.schema import PAIRS, TOTAL, Record

ARM_FIELDS = ("reference_ms", "candidate_ms")
# Two families whose references are further apart than this were measured on machines too unlike for what follows.
REFERENCES_APART = 0.10


def across(
    one: tuple[Record, Contrast], other: tuple[Record, Contrast], phases: Sequence[str]
) -> tuple[Contrast | None, bool]:
    """(how many times as fast the one's candidate is as the other's, whether that is by way of the reference of both).

    Each is a record with its contrast over these phases. The ratio of the two ratios cancels what differs between two
    GPUs or their clocks. Where a reference waits for its host, or took a tenth longer in one of the two, it would bring
    in what differs between the hosts instead; then it is the ratio of the two times as they are, not paired.
    """
    (record, ours), (beside, theirs) = one, other
    mine, its = record.trials(phases), beside.trials(phases)
    assert mine and its and mine.reference_ms and its.reference_ms and mine.candidate_ms and its.candidate_ms
    took = [statistics.median(ms) for ms in (mine.reference_ms, its.reference_ms)]
    if abs(math.log(took[0] / took[1])) > REFERENCES_APART or _reference_waits(record):
        return contrast(its.candidate_ms, mine.candidate_ms, paired=False), False
    return ours.difference(theirs), True


def _reference_waits(record: Record) -> bool:
    """Whether the reference spends most of its time in phases in which the device waits for its host, by the profile: a
    short phase does on any machine."""
    profiled = (record.roofline or {}).get("reference", {})
    took = {p: statistics.median((record.phases or {})[p].reference_ms or [0.0]) for p in record.own_phases}
    return (
        sum(ms for p, ms in took.items() if p in profiled and profiled[p].label == "host-bound")
        > sum(took.values()) / 2
    )


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1 as one of schema 2. Another is left as it is, for the schema to judge."""
    if record.get("schema") != 1:
        return record
    name = next((k.name for k in registered().values() if k.older(record)), None)
    made = {k: v for k, v in record.items() if k not in ("limit", "bound")}
    made |= {"schema": PAIRS, "kind": name}
    if "bound" in record:
        made["roofline"] = record["bound"]
    if isinstance(record.get("memory"), dict):
        made["memory"] = {arm: _memory(held) for arm, held in record["memory"].items()}
    if name is not None and isinstance(record.get("phases"), dict) and not kind(name).candidate:
        made["phases"] = _without_what_it_has_not(record["phases"], kind(name).phases)
    return made


def _memory(held: dict[str, Any]) -> dict[str, Any]:
    peaks = {phase: held[phase] for phase in ("forward", "backward", "step") if held.get(phase) is not None}
    return {k: v for k, v in held.items() if k not in peaks} | ({"peaks": peaks} if peaks else {})


def _without_what_it_has_not(phases: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Only the limit's phases, and as the total their sum in both arms; its ratio is computed from these trials."""
    kept = {name: phase for name, phase in phases.items() if name in own}
    total: dict[str, Any] = {}
    for field in ARM_FIELDS:
        lists = [phase.get(field) for phase in kept.values()]
        if lists and all(lists):
            total[field] = [sum(times) for times in zip(*lists, strict=True)]
    return {**kept, TOTAL: total}
