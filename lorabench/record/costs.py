"""What arms took on this machine, by the records of earlier sweeps: what the next ones' times are estimated by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lorabench.contract.machine import Machine
from lorabench.plan.estimate import Seen
from lorabench.record.schema import ArmRecord
from lorabench.record.store import read_arms, read_sessions


def seen_on(machine: Machine, folders: Iterable[Path]) -> Iterator[Seen]:
    """What was measured in these results folders by sessions on such a machine. Raises RecordError."""
    for folder in folders:
        here = {s["id"] for s in read_sessions(folder) if _same(machine, s.get("machine"))}
        yield from (seen for arm in read_arms(folder) if arm.session in here and (seen := _seen(arm)))


def trials_share(arms: Iterable[ArmRecord]) -> tuple[float, float]:
    """(share of the wall time that was trials, wall time in seconds) of what these arms cost; (NaN, 0) without any."""
    costs = [arm.cost for arm in arms if arm.cost]
    wall = math.fsum(cost.wall for cost in costs)
    return (math.fsum(cost.trials for cost in costs) / wall if wall else math.nan), wall


def _same(machine: Machine, other: Any) -> bool:
    facts = ("device", "name") if machine.device == "cuda" else ("device", "name", "cores")
    return isinstance(other, dict) and all(other.get(fact) == getattr(machine, fact) for fact in facts)


def _seen(arm: ArmRecord) -> Seen | None:
    if arm.cost is None or not arm.rounds:
        return None
    own, separate, cost = frozenset(arm.toggles), 0 not in arm.seats, arm.cost
    return Seen(arm.kind, arm.model, arm.workload, own, separate, cost.wall, cost.trials, len(arm.rounds))
