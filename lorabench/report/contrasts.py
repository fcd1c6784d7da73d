"""The contrasts of records, each made once: every table, plot and comparison asks here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lorabench.record.contrast import Contrast, Speedup, contrast_of, mean, over_sessions
from lorabench.record.older import across
from lorabench.record.pairs import by_place, place_of
from lorabench.record.schema import TOTAL, ArmRecord, Record
from lorabench.record.store import RecordError
from lorabench.report.replicates import Row

Phases = tuple[str, ...]
WHOLE: Phases = (TOTAL,)
WITHIN, BETWEEN = "within", "between"  # one process, or processes
THROUGH, UNPAIRED = "through the reference", "unpaired"  # of two families: see record/older.py


class Beside(NamedTuple):
    """How many times as fast one row's candidate is as another's, and how the two met: over the rounds that they
    shared, within a process or between; or not at all."""

    contrast: Contrast
    how: str

    @property
    def paired(self) -> bool:
        return self.how != UNPAIRED


def toggles(record: Record) -> str:
    """The row's name: the toggles under test."""
    return " + ".join(record.ablations) or f"reference again (A/A{', separate processes' if record.separate else ''})"


def how(record: Record) -> str:
    """Whether two arms met within a process or between processes; '' where they never shared a round."""
    return {"paired": WITHIN, "turns": BETWEEN}.get(record.pairing or "", "")


class Contrasts:
    """Record and phases → their contrast, over all sessions of the row, made when first asked for and kept.

    `salt` tells two runs apart: one key in two runs must not draw the same rounds, or their errors would cancel.
    `rows` have the records of other sessions that belong to a record; without them it stands for itself. `arms` are
    those of schema 3 that the records were made of.
    """

    def __init__(self, salt: str = "", rows: Iterable[Row] = (), arms: Iterable[ArmRecord] = ()) -> None:
        self._salt, self.siblings = salt, by_place(arms)
        self._rows = {id(row.shown): row.measured for row in rows}
        # By identity: two records may have one key. The record is kept, so that its id stays its own.
        self._made: dict[tuple[int, Phases], tuple[Record, Contrast | None]] = {}

    def of(self, record: Record, phases: Phases = WHOLE) -> Contrast | None:
        """None where an arm has no time, or too few trials. Raises RecordError for trials that do not go together."""
        at = (id(record), phases)
        if at not in self._made:
            found = self.sessions(record, phases)
            self._made[at] = (record, over_sessions(found) if found else None)
        return self._made[at][1]

    def sessions(self, record: Record, phases: Phases = WHOLE) -> list[Contrast]:
        """The contrast of each session that has one."""
        return [c for r in self.measured(record) if (c := self._make(r, phases))]

    def speedup(self, record: Record, phases: Phases = WHOLE) -> Speedup | None:
        """The ratio with its interval, computed from the trials: what stands in a record is of the code that wrote it,
        and older intervals were too narrow (docs/intervals.md)."""
        found = self.of(record, phases)
        return found and found.speedup

    def beside(self, record: Record, other: Record, phases: Phases = WHOLE) -> Beside | None:
        """The time of the other's candidate / the record's, in the sessions in which both were measured together; of
        two families as far as can be said. None where one of them has no time."""
        if found := self.shared(record, other, phases):
            return found
        ours, theirs = self.of(record, phases), self.of(other, phases)
        if record is other or ours is None or theirs is None:
            return None
        made, paired = across((record, ours), (other, theirs), phases)
        return made and Beside(made, THROUGH if paired else UNPAIRED)

    def shared(self, record: Record, other: Record, phases: Phases = WHOLE) -> Beside | None:
        """Over the rounds that both had; None where they never shared one."""
        found = (self.arms(r, r.candidate) for r in (record, other))
        return self.over(self.pairs(*found), phases)

    def arms(self, record: Record, toggles: Sequence[str]) -> list[ArmRecord]:
        """The arm with these toggles in each session of the record's row."""
        found = [own for r in self.measured(record) if (own := self.siblings.get(place_of(r)))]
        return [arm for own in found if (arm := own.stack(toggles))]

    def pairs(self, candidate: Sequence[ArmRecord], reference: Sequence[ArmRecord]) -> list[Record]:
        """The two arms, given as a record a session, held together in each session in which they shared rounds."""
        others = {place_of(arm): arm for arm in reference}
        made = (self.siblings[place_of(arm)].between(arm, others.get(place_of(arm))) for arm in candidate)
        return [pair for pair in made if pair and how(pair)]

    def over(self, pairs: Sequence[Record], phases: Phases = WHOLE) -> Beside | None:
        """What several sessions' pairs of two arms say together; None where none of them has these phases."""
        found = [c for pair in pairs if (c := self._make(pair, phases))]
        said = BETWEEN if any(how(pair) == BETWEEN for pair in pairs) else WITHIN
        return Beside(over_sessions(found), said) if found else None

    def measured(self, record: Record) -> list[Record]:
        """The records of all sessions of its row that were measured."""
        return self._rows.get(id(record), [record])

    def mean(self, records: Sequence[Record], phases: Phases = WHOLE) -> Contrast | None:
        """Geometric mean of several cells; None where one of them has no ratio."""
        found = [c for r in records if (c := self.of(r, phases))]
        return mean(found) if found and len(found) == len(records) else None

    def _make(self, record: Record, phases: Phases) -> Contrast | None:
        seed = zlib.crc32(f"{self._salt}{record.key}{record.replicate}{record.session}".encode())
        try:
            return contrast_of(record, phases, seed)
        except ValueError as error:
            where = f"record {record.key} ({toggles(record)}), {' + '.join(phases)}"
            raise RecordError(f"{where}: {error}") from None
