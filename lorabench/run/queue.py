"""The queue: takes cells, yields (cell, record) in any order. The sweep alone writes what comes out into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.record.schema import Record
from lorabench.run.process import Workers
from lorabench.run.runner import Runner
from lorabench.run.session import Session, new_session


class QueueError(RuntimeError):
    """Cells cannot be measured where the queue was asked to; the message is one line."""


class Watch(Protocol):
    """Who wants to see what the queue does: the sweep's display."""

    def start(self, cell: Cell) -> None: ...

    def phase(self, text: str) -> None: ...


class Queue(Protocol):
    """A context manager: what it started on the way is gone after it, whatever has happened.

    `sessions`, by their id: on which machine and with which ceilings the records so far were measured. One is there
    before the first record that names it is yielded. `where`: the place, in words, as soon as it was looked at.
    """

    sessions: dict[str, Session]
    where: str

    def look(self, command: list[str]) -> Machine:
        """The machine to plan for; `command` is what the sessions say that the user gave. Raises ProbeError or
        QueueError. To be called before `run`."""
        ...

    def run(self, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        """Measure every cell once; each comes back with its record as soon as that is there."""
        ...

    def __enter__(self) -> Queue: ...

    def __exit__(self, *_: object) -> None: ...


def queue(name: str, dtype: str, timeout_s: float, folder: Path) -> Queue:
    """The queue of this name, `local` or `ray`. Raises QueueError where it cannot be used here at all."""
    if name == "ray":
        from lorabench.run.ray_cluster import RayCluster
        from lorabench.run.ray_queue import RayQueue

        return RayQueue(RayCluster(), dtype, timeout_s)
    return LocalQueue(dtype, timeout_s, folder)


class LocalQueue:
    """One cell after the other, on this machine."""

    def __init__(self, dtype: str, timeout_s: float, folder: Path) -> None:
        """`folder` takes the running worker's log."""
        self.dtype, self.timeout_s, self.folder = dtype, timeout_s, folder
        self.workers, self.where = Workers(), ""
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

    def run(self, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        own = self.machine, self.ceilings, self.session["id"]
        with Runner(self.workers, *own, self.timeout_s, self.folder) as runner:
            for cell in cells:
                watch.start(cell)
                yield cell, runner.measure(cell, watch.phase)
