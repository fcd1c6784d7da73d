"""The queue: takes cells, yields (cell, record) in any order. The sweep alone writes what comes out of it into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from lorabench.contract.cell import Cell
from lorabench.record.schema import Record
from lorabench.run.process import Workers
from lorabench.run.runner import Runner

Session = dict[str, Any]


class Watch(Protocol):
    """Who wants to see what the queue does: the sweep's display."""

    def start(self, cell: Cell) -> None: ...

    def phase(self, text: str) -> None: ...


class Queue(Protocol):
    """`sessions`, by their id: on which machine and with which ceilings the records so far were measured."""

    sessions: dict[str, Session]

    def run(self, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        """Measure every cell once; each comes back with its record as soon as that is there."""
        ...


class LocalQueue:
    """One cell after the other, on this machine."""

    def __init__(self, workers: Workers, machine: Any, session: Session, timeout_s: float, folder: Path) -> None:
        """`session` names the machine, with its ceilings; `folder` takes the running worker's log."""
        self.sessions = {session["id"]: session}
        self._make: Callable[[], Runner] = lambda: Runner(
            workers, machine, session["ceilings"], session["id"], timeout_s, folder
        )

    def run(self, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        with self._make() as runner:
            for cell in cells:
                watch.start(cell)
                yield cell, runner.measure(cell, watch.phase)
