"""A results folder, analysed once: what every table, plot, page and comparison draws from."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from lorabench.contract.names import NameUnknown
from lorabench.record.contrast import Speedup
from lorabench.record.schema import ArmRecord, Record
from lorabench.record.store import read_arms, read_sessions, records_of
from lorabench.report.claims import Match, match
from lorabench.report.contrasts import Contrasts
from lorabench.report.groups import Group, groups
from lorabench.report.noise import NoiseFloors
from lorabench.report.replicates import device_of, rows
from lorabench.report.tidy import tidy

Session = dict[str, Any]
Row = dict[Any, Any]


class Analysis:
    """Records and sessions with all that is made of them, each when first asked for, and only once. `rows` have all
    records of a cell, `records` the one that each row shows.

    salt: tells two runs apart that are compared with each other, see `Contrasts`. arms: those that records of schema 3
    were made of. against: the arm that all others are shown over, where one was chosen.
    """

    def __init__(
        self,
        records: Sequence[Record],
        sessions: Sequence[Session] = (),
        salt: str = "",
        arms: Sequence[ArmRecord] = (),
        against: str | None = None,
    ) -> None:
        self.sessions, self.arms, self.against = list(sessions), list(arms), against
        self.rows = rows(records, sessions)
        self.records = [row.shown for row in self.rows]
        self.contrasts = Contrasts(salt, self.rows, self.arms)

    @classmethod
    def read(cls, folder: str | Path, salt: str = "", against: str | None = None) -> Analysis:
        """Of a results folder, see `read_records`. Raises RecordError where it cannot be read, and NameUnknown where no
        arm is called `against`; both are ValueErrors."""
        with collector_paused():
            arms = read_arms(Path(folder))
            try:
                records = records_of(arms, against)
            except NameUnknown as error:
                raise NameUnknown(f"{folder}: {error}") from None
            return cls(records, read_sessions(Path(folder)), salt, arms, against)

    @cached_property
    def devices(self) -> list[str]:
        """The device of each record, '' where environment.json does not say."""
        names = {s["id"]: device_of(s) for s in self.sessions}
        return [names.get(r.session, "") for r in self.records]

    def device(self, record: Record) -> str:
        """That of one record."""
        return self.devices[self.place_of[id(record)]]

    @cached_property
    def place_of(self) -> dict[int, int]:
        """id(record) → its place among `records`, and its row's in `table`."""
        return {id(record): place for place, record in enumerate(self.records)}

    @cached_property
    def floors(self) -> NoiseFloors:
        return NoiseFloors(self.records, self.contrasts, self.devices)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The tidy table, a row a cell, see `tidy`."""
        with collector_paused():
            return tidy(self.rows, self.sessions, self.devices, self.contrasts, self.floors)

    @cached_property
    def groups(self) -> list[Group]:
        return groups(self.records, self.against, self.devices)

    @cached_property
    def _row_of(self) -> dict[int, Row]:
        return {id(r): row for r, row in zip(self.records, self.table.to_dict("records"), strict=True)}

    def row(self, record: Record) -> Row:
        """The record's row of `table`."""
        return self._row_of[id(record)]

    def ordered(self, group: Group) -> list[Record]:
        """A group as it is shown: the reference against itself, then from the fastest to those that failed, then the
        least work that there is."""
        return sorted(group.records, key=lambda r: (not r.is_candidate, not r.is_noise_floor, self._slow(r)))

    def _slow(self, record: Record) -> float:
        found = self.speedup(record)
        return -found.centre if found else 0.0

    def speedup(self, record: Record) -> Speedup | None:
        """Of the total."""
        return self.contrasts.speedup(record)

    @cached_property
    def matches(self) -> list[Match]:
        """Every published number beside every record that it can be held against."""
        return match(self.records)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cycle collector: 10,000 records are millions of objects that all live, and looking at them again
    and again takes five times as long as making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
