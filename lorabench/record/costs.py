"""What arms took on this machine, by the records of earlier sweeps: what the next ones' times are estimated by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lorabench.contract.machine import Machine
from lorabench.plan.estimate import Seen
from lorabench.record.schema import TOTAL, ArmRecord
from lorabench.record.store import Line, read_lines, read_sessions


def seen_on(machine: Machine, folders: Iterable[Path]) -> Iterator[Seen]:
    """What was measured in these results folders by sessions on such a machine: by arm, and in records of schemas 1 and
    2 by pair. Raises RecordError."""
    for folder in folders:
        here = {s["id"] for s in read_sessions(folder) if _same(machine, s.get("machine"))}
        yield from (seen for line in read_lines(folder) if line.session in here and (seen := _seen(line)))


def trials_share(arms: Iterable[ArmRecord]) -> tuple[float, float]:
    """(share of the wall time that was trials, wall time in seconds) of what these arms cost; (NaN, 0) without any."""
    costs = [arm.cost for arm in arms if arm.cost]
    wall = math.fsum(cost.wall for cost in costs)
    return (math.fsum(cost.trials for cost in costs) / wall if wall else math.nan), wall


def _same(machine: Machine, other: Any) -> bool:
    facts = ("device", "name") if machine.device == "cuda" else ("device", "name", "cores")
    return isinstance(other, dict) and all(other.get(fact) == getattr(machine, fact) for fact in facts)


def _seen(line: Line) -> Seen | None:
    if isinstance(line, ArmRecord):
        toggles, separate, trials = line.toggles, 0 not in line.seats, len(line.rounds)
    else:
        total = (line.phases or {}).get(TOTAL)
        both = total is not None and total.reference_ms and total.candidate_ms
        toggles, separate, trials = line.candidate, line.separate, len(both or ())
    if line.cost is None or not trials:
        return None
    cost = line.cost
    return Seen(
        line.kind, line.model, line.workload, frozenset(toggles), separate, cost.wall, cost.trials, trials
    )  # fmt: skip
