"""The queue: takes families, yields each with the records of its arms, in any order. The sweep alone stores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lorabench.contract.family import Family
from lorabench.contract.machine import Machine
from lorabench.record.schema import ArmRecord
from lorabench.run.entries import Replan, as_planned
from lorabench.run.session import Session


class QueueError(RuntimeError):
    """Families cannot be measured where the queue was asked to; the message is one line."""


class Watch(Protocol):
    """Who wants to see what the queue does: the sweep's display."""

    def start(self, family: Family) -> None: ...

    def phase(self, text: str) -> None: ...


class Queue(Protocol):
    """A context manager: what it started on the way is gone after it, whatever has happened.

    `sessions`, by their id: on which machine and with which ceilings the records so far were measured. One is there
    before the first record that names it is yielded, and is another object where more has become known of it. `where`:
    the place, in words, as soon as it was looked at.
    """

    sessions: dict[str, Session]
    where: str

    def look(self, command: list[str]) -> Machine:
        """The machine to plan for; `command` is what the sessions say that the user gave. Raises ProbeError or
        QueueError. To be called before `run`."""
        ...

    def run(
        self, families: Iterable[Family], watch: Watch, replan: Replan = as_planned
    ) -> Iterator[tuple[Family, list[ArmRecord]]]:
        """Measure every family once; each comes back with its arms' records as soon as those are there. `replan` is
        asked where an arm did not come to sit, by queues that measure in this process's reach."""
        ...

    def __enter__(self) -> Queue: ...

    def __exit__(self, *_: object) -> None: ...
