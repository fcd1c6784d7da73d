"""The queue over this machine alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.record.schema import Record
from lorabench.run.process import Workers
from lorabench.run.queue import Watch
from lorabench.run.runner import Runner
from lorabench.run.session import Session, new_session


class LocalQueue:
    """One cell after the other, on this machine."""

    def __init__(self, dtype: str, timeout_s: float, folder: Path, workers: Workers | None = None) -> None:
        """`folder` takes the running worker's log."""
        self.dtype, self.timeout_s, self.folder = dtype, timeout_s, folder
        self.workers, self.where = workers or Workers(), ""
        self.sessions: dict[str, Session] = {}

    def __enter__(self) -> LocalQueue:
        return self

    def __exit__(self, *_: object) -> None:
        """A cell's processes end with the cell."""

    def look(self, command: list[str]) -> Machine:
        self.machine, self.ceilings = self.workers.probe(self.dtype)
        self.where = self.machine.name
        looked: Session = {"machine": self.machine.model_dump(mode="json"), "ceilings": self.ceilings}
        self.session = new_session(command) | looked | {"workers": self.workers.method}
        self.sessions = {self.session["id"]: self.session}
        return self.machine

    def run(self, cells: Iterable[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        """The next cell is asked for when what became of the one before has been taken."""
        own = self.machine, self.ceilings, self.session["id"]
        with Runner(self.workers, *own, self.timeout_s, self.folder) as runner:
            for cell in cells:
                watch.start(cell)
                yield cell, runner.measure(cell, watch.phase)
