"""The noise floor that goes with a record: how far its reference is from itself, measured against itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lorabench.record.contrast import Speedup
from lorabench.record.schema import Record
from lorabench.record.stats import noise_floor
from lorabench.report.contrasts import Contrasts
from lorabench.report.groups import Home, homes


class Floor(NamedTuple):
    """The interval of the reference against itself, and how its arms were paired: the record's own way, or another
    where no A/A record has that."""

    same: Speedup
    pairing: str | None


class NoiseFloors:
    """The A/A intervals of a folder, found by what they have in common with a record."""

    def __init__(self, records: Sequence[Record], contrasts: Contrasts, devices: Sequence[str]) -> None:
        self._contrasts, self._homes = contrasts, homes(records, devices)
        self._of_home: dict[Home, list[Record]] = {}
        for record in records:
            if record.is_noise_floor:
                self._of_home.setdefault(self._homes[id(record)], []).append(record)
        self._found: dict[tuple[Home, frozenset[str], str | None], Floor | None] = {}

    def of(self, record: Record) -> Floor | None:
        """The A/A interval of the record's own reference and pairing where that was measured, else the widest; None
        without any."""
        at = (self._homes[id(record)], frozenset(record.reference), record.pairing)
        if at not in self._found:
            self._found[at] = self._find(*at)
        return self._found[at]

    def same(self, record: Record) -> Speedup | None:
        """The interval alone."""
        found = self.of(record)
        return found and found.same

    def _find(self, home: Home, reference: frozenset[str], pairing: str | None) -> Floor | None:
        found = self._of_home.get(home, [])
        found = [r for r in found if frozenset(r.reference) == reference] or found
        found = [r for r in found if r.pairing == pairing] or found
        floors = [Floor(s, r.pairing) for r in found if (s := self._contrasts.speedup(r))]
        return max(floors, key=lambda floor: noise_floor(floor.same), default=None)
