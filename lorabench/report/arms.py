"""The arms of a group of records, each with what it took, held and used, as the page shows them.

A record is two arms held together; a page shows each arm once, and holds it against any other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from lorabench.contract.kind import kind
from lorabench.record import stats
from lorabench.record.older import is_made_of
from lorabench.record.pairs import place_of
from lorabench.record.schema import TOTAL, ArmRecord, Record
from lorabench.report.analysis import Analysis
from lorabench.report.comparable import base_of
from lorabench.report.contrasts import toggles
from lorabench.report.groups import Group
from lorabench.report.tidy import GIB

REFERENCE, TWIN, CANDIDATE, LEAST = "reference", "twin", "candidate", "least"  # what an arm is in its group


class Arm(NamedTuple):
    """`own`: its record in each session. `record`: the row in which the tables show it, of the reference the first row
    that is over it; None of an arm that no design shows. `side`: which of the two it is there."""

    name: str
    role: str
    own: list[ArmRecord]
    record: Record | None
    side: str = "candidate"

    @property
    def timed(self) -> list[ArmRecord]:
        return [arm for arm in self.own if arm.status == "ok" and arm.phases]

    @property
    def status(self) -> str:
        """Of the arm itself: of a row whose reference failed it may be ok."""
        return "ok" if self.timed else self.own[-1].status


def arms_of(group: Group, analysis: Analysis) -> list[Arm]:
    """The reference first, then each arm once, in the order of the tables; last those that only stand below another."""
    base = base_of(group.records)
    records = sorted(analysis.ordered(group), key=lambda r: frozenset(r.reference) != base)
    found = [_reference(records[0], base, analysis)]
    seen = {_key(arm) for arm in found[0].own}
    for record in records:
        own = _own(record, analysis)
        if own and not seen.intersection(map(_key, own)):
            seen.update(map(_key, own))
            found.append(Arm(_name(record, analysis), _role(record), own, record))
    for record in records:
        for sibling in _siblings(record, analysis):
            if _key(sibling) not in seen and sibling.kind == group.kind.name and sibling.role == CANDIDATE:
                seen.add(_key(sibling))
                found.append(Arm(sibling.arm, CANDIDATE, [sibling], None))
    return [arm for arm in found if arm.own]


def _key(arm: ArmRecord) -> tuple[Any, ...]:
    return (*place_of(arm), arm.arm)


def _reference(record: Record, base: frozenset[str], analysis: Analysis) -> Arm:
    own = analysis.contrasts.arms(record, sorted(base))
    return Arm(analysis.against or REFERENCE, REFERENCE, own, record, "reference")


def _own(record: Record, analysis: Analysis) -> list[ArmRecord]:
    if not record.is_noise_floor:
        return analysis.contrasts.arms(record, record.candidate)
    places = map(place_of, analysis.contrasts.measured(record))
    found = (analysis.contrasts.siblings.get(place) for place in places)
    return [own.twin for own in found if own and own.twin]


def _siblings(record: Record, analysis: Analysis) -> list[ArmRecord]:
    """The arms of the record's family, where it is one that was measured in rounds."""
    own = analysis.contrasts.siblings.get(place_of(record))
    return own.arms if own and not is_made_of(record.family) else []


def _name(record: Record, analysis: Analysis) -> str:
    return toggles(record).partition(" (")[0] if record.is_noise_floor else analysis.row(record)["toggles"]


def _role(record: Record) -> str:
    return TWIN if record.is_noise_floor else CANDIDATE if record.is_candidate else LEAST


# -- what an arm took, held and used ----------------------------------------------------------------------------------


def took(arm: Arm) -> dict[str, list[float | None]]:
    """Phase → median ms with its 95 % interval: of several sessions the median of their medians, from the lowest of
    their bounds to the highest. The sum of all phases is TOTAL."""
    found: dict[str, list[float | None]] = {}
    for phase in (*kind(arm.own[-1].kind).phases, TOTAL):
        lists = [times for own in arm.timed if (times := own.totals() if phase == TOTAL else own.phases.get(phase))]
        if lists:
            each = stats.median_intervals(lists)
            found[phase] = [rounded(np.median(each[:, 0])), rounded(each[:, 1].min()), rounded(each[:, 2].max())]
    return found


def held(arm: Arm) -> dict[str, float | None]:
    """GiB at its most, and of these what stays between two steps."""
    memory = (arm.timed or arm.own)[-1].memory
    sizes = {name: getattr(memory, name, None) for name in ("peak", "static")}
    return {name: rounded(size / GIB) if size else None for name, size in sizes.items()}


def used(arm: Arm) -> dict[str, float | None]:
    """Real tokens in a step; and joules for a thousand of them, where a GPU counted."""
    last = (arm.timed or arm.own)[-1]
    real = last.tokens.real if last.tokens else None
    joules = last.energy.joules / last.energy.steps if last.energy else None
    return {"tokens": real, "joules": rounded(1000 * joules / real) if joules and real else None}


def trials(arm: Arm) -> list[dict[str, Any]]:
    """A session each: the round and the process of every turn, and ms by phase, four digits of each."""
    return [
        {
            "session": own.session, "rounds": own.rounds, "seats": own.seats,
            "ms": {p: [rounded(ms, 4) for ms in times] for p, times in (own.phases | {TOTAL: own.totals()}).items()},
        }
        for own in arm.timed
    ]  # fmt: skip


def rounded(value: Any, digits: int = 5) -> float | None:
    """So many digits; None for what is unknown."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
