"""The queue over this machine alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lorabench.contract.family import Family
from lorabench.contract.machine import Machine
from lorabench.record.schema import ArmRecord
from lorabench.run.entries import Limits, Replan, as_planned
from lorabench.run.journal import Journal
from lorabench.run.links import with_links
from lorabench.run.process import Workers
from lorabench.run.queue import Watch
from lorabench.run.runner import Runner
from lorabench.run.session import Session, new_session


class LocalQueue:
    """One family after the other, on this machine. Its rounds are in the journal of `folder` until they are records."""

    def __init__(self, dtype: str, timeout_s: float, folder: Path, stop_at: float = math.inf) -> None:
        """`folder` takes the running worker's log. `stop_at`: by time.monotonic(), after which no round begins."""
        self.dtype, self.timeout_s, self.folder = dtype, timeout_s, folder
        self.limits = Limits(stop_at)  # of the next family: whoever gives the families may set others before each
        self.workers, self.where = Workers(), ""
        self.sessions: dict[str, Session] = {}
        self.seated: frozenset[frozenset[str]] = frozenset()  # the toggles of each arm that stays for the next family

    def __enter__(self) -> LocalQueue:
        return self

    def __exit__(self, *_: object) -> None:
        """A family's processes end with it."""

    def look(self, command: list[str]) -> Machine:
        self.machine, ceilings = self.workers.probe(self.dtype)
        self.where = self.machine.name
        looked: Session = {"machine": self.machine.model_dump(mode="json"), "ceilings": ceilings}
        self.session: Session = new_session(command) | looked | {"workers": self.workers.method}
        self.sessions = {self.session["id"]: self.session}
        return self.machine

    def run(
        self, families: Iterable[Family], watch: Watch, replan: Replan = as_planned
    ) -> Iterator[tuple[Family, list[ArmRecord]]]:
        """The next family is asked for when what became of the one before has been taken."""
        own = self.machine, self.session["ceilings"], self.session["id"]
        journal = Journal(self.folder)
        with Runner(self.workers, *own, self.timeout_s, self.folder, journal=journal) as runner:
            for family in families:
                if time.monotonic() > self.limits.stop_at:
                    return
                runner.limits = self.limits
                watch.start(family)
                found = with_links(self.session, family, self.machine, self.workers.method)
                if found is not self.session:  # it is stored in the old one's place
                    self.session, self.sessions = found, {found["id"]: found}
                made = runner.family(family, watch.phase, replan)
                stay = runner.staying.entries if runner.staying else []
                self.seated = frozenset(frozenset(entry.stack.labels) for entry in stay)
                yield family, made
                journal.end()
