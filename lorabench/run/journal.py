"""The journal of a family's rounds: a line a round, on the disk before the next one begins.

A sweep that is killed loses the round in flight. The next one, or a report, makes records of what the journal holds,
and empties it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorabench.contract.hooks import first_line
from lorabench.record.schema import INTERRUPTED, UNCHECKED, ArmRecord
from lorabench.record.store import RecordError, Store

JOURNAL = "rounds.jsonl"


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

    def begin(self, records: Sequence[ArmRecord], rounds: int) -> None:
        """The arms as they are before the first round of a block that is to have so many: their records, with the times
        of the blocks before."""
        arms = [json.loads(r.model_dump_json(by_alias=True, exclude_none=True)) for r in records]
        self._write({"planned": rounds, "arms": arms}, "w")

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
        that was cut off is left out. Raises RecordError for what no sweep has written."""
        if not self.path.is_file():
            return []
        try:
            return _records(self.path.read_text(errors="replace").split("\n")[:-1])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            words = f"{type(error).__name__}: {first_line(error)}"
            raise RecordError(f"{self.path} cannot be read: {words}; expected what a sweep wrote, or no file") from None


def _records(written: Sequence[str]) -> list[ArmRecord]:
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(written, start=1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            if number < len(written):
                raise
    if not lines or "arms" not in lines[0]:
        return []
    arms = {arm["arm"]: arm for arm in lines[0]["arms"]}
    before = {name: len(arm.get("rounds", [])) for name, arm in arms.items()}
    rounds = [line for line in lines[1:] if "round" in line]
    for line in rounds:
        for name, turns in line["turns"].items():
            for seat, phases in turns:
                _add(arms[name], line["round"], seat, phases)
    for line in lines[1:]:
        if "left" in line:
            arms[line["left"]] |= {"status": line["status"], "reason": line["reason"], "phases": {}}
            arms[line["left"]] |= {"rounds": [], "seats": []}
    for name, arm in arms.items():
        whole = before[name] >= lines[0]["planned"]  # in a block before
        if len(arm.get("rounds", [])) > before[name] and not whole:
            arm["notes"] = {**arm.get("notes", {}), INTERRUPTED: len(rounds), UNCHECKED: True}
    found = [arm for arm in arms.values() if arm.get("rounds") or arm["status"] != "ok"]
    return [ArmRecord.model_validate(arm) for arm in found]


def kept(store: Store, without: Container[str] = ()) -> int | None:
    """What a sweep that was killed has left in this folder's journal, as records in the store: of how many rounds they
    are, or None. The journal is emptied. `without`: records of these statuses are dropped."""
    journal = Journal(store.folder)
    found = [record for record in journal.recovered() if record.status not in without]
    for record in found:
        store.append(record)
    journal.end()
    return max((len(record.rounds) for record in found), default=None)


def _add(arm: dict[str, Any], number: int, seat: int, phases: Mapping[str, float]) -> None:
    arm.setdefault("rounds", []).append(number)
    arm.setdefault("seats", []).append(seat)
    for phase, ms in phases.items():
        arm.setdefault("phases", {}).setdefault(phase, []).append(ms)
