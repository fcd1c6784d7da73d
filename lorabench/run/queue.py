"""The queue: takes cells, yields (cell, record) in any order. The sweep alone writes what comes out into the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.record.schema import Record
from lorabench.run.session import Session


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

    def run(self, cells: Iterable[Cell], watch: Watch) -> Iterator[tuple[Cell, Record]]:
        """Measure every cell once; each comes back with its record as soon as that is there. A queue that measures one
        after the other asks for the next cell only then: what became of one may make others needless."""
        ...

    def __enter__(self) -> Queue: ...

    def __exit__(self, *_: object) -> None: ...
