"""The journal of a family's rounds: a line a round, on the disk before the next one begins.

A sweep that is killed loses the round in flight. The next one makes records of what the journal holds, and empties it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorabench.record.schema import ArmRecord

JOURNAL = "rounds.jsonl"
INTERRUPTED = "rounds_until_the_sweep_was_ended"  # in the notes of a record


@dataclass(frozen=True)
class Turn:
    """What an arm's turn came to: milliseconds by phase, in which round and seat."""

    round: int
    seat: int
    phases: dict[str, float]


class Journal:
    """Of the family that is being measured."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL

    def begin(self, records: Sequence[ArmRecord]) -> None:
        """The arms as they are before the first round: their records, without times."""
        self._write({"arms": [json.loads(r.model_dump_json(by_alias=True, exclude_none=True)) for r in records]}, "w")

    def round(self, number: int, turns: Mapping[str, Sequence[Turn]]) -> None:
        self._write({"round": number, "turns": {n: [[t.seat, t.phases] for t in own] for n, own in turns.items()}})

    def left(self, arm: str, status: str, reason: str) -> None:
        self._write({"left": arm, "status": status, "reason": reason})

    def end(self) -> None:
        """The family's records are written."""
        self.path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any], mode: str = "a") -> None:
        with open(self.path, mode) as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def recovered(self) -> list[ArmRecord]:
        """The records of a family whose sweep was killed in its rounds; none where there is nothing of use. A last line
        that was cut off is left out."""
        if not self.path.is_file():
            return []
        lines: list[dict[str, Any]] = []
        for line in self.path.read_text(errors="replace").split("\n")[:-1]:
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        if not lines or "arms" not in lines[0]:
            return []
        arms = {arm["arm"]: arm for arm in lines[0]["arms"]}
        rounds = [line for line in lines[1:] if "round" in line]
        for line in rounds:
            for name, turns in line["turns"].items():
                for seat, phases in turns:
                    _add(arms[name], line["round"], seat, phases)
        for line in lines[1:]:
            if "left" in line:
                arms[line["left"]] |= {"status": line["status"], "reason": line["reason"], "phases": {}}
                arms[line["left"]] |= {"rounds": [], "seats": []}
        return [_record(arm, len(rounds)) for arm in arms.values() if arm.get("rounds") or arm["status"] != "ok"]


def _add(arm: dict[str, Any], number: int, seat: int, phases: Mapping[str, float]) -> None:
    arm.setdefault("rounds", []).append(number)
    arm.setdefault("seats", []).append(seat)
    for phase, ms in phases.items():
        arm.setdefault("phases", {}).setdefault(phase, []).append(ms)


def _record(arm: dict[str, Any], rounds: int) -> ArmRecord:
    arm["notes"] = {**arm.get("notes", {}), INTERRUPTED: rounds}
    return ArmRecord.model_validate(arm)
