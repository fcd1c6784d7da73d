"""Records of schema 1, turned into schema 2 on reading; what lies on the disk is never rewritten.

Schema 1 knew one kind of cell and told two others by a flag and by the model's name; phases were fields; the total of a
limit held the reference's optimizer step, which the limit has not (a ratio of 72.71 for one of 69.83).
"""

from __future__ import annotations

from typing import Any

from lorabench.contract.kind import kind, registered
from lorabench.record.schema import PAIRS, TOTAL

ARM_FIELDS = ("reference_ms", "candidate_ms")


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
