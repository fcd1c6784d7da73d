"""The agenda: which cells a sweep still has to measure, by what its records say so far."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from lorabench.contract.cell import Cell
from lorabench.contract.family import Family, families
from lorabench.contract.machine import Machine
from lorabench.plan.compose import SweepConfig, plan
from lorabench.plan.design import ADAPTING, Known, refusal
from lorabench.record.schema import ARMS, DID_NOT_APPLY, INTERRUPTED, Record

AGAIN = ("crash", "timeout", "oom")  # what resume=failed measures once more


class Agenda:
    """The cells of a sweep, and those of them that its records lack. `plan_for` comes before the rest."""

    def __init__(self, config: SweepConfig, records: Iterable[Record]) -> None:
        self.config = config
        self.recorded: dict[tuple[str, int], str] = {}  # key and number of the session → status of the last record
        self.tried: set[tuple[str, int]] = set()  # in this run
        self.failed: set[str] = set()  # keys of the cells whose own toggle did not apply
        self.done: dict[tuple[str, int], int] = {}  # rounds of a session that was ended from outside
        self.cells: list[Cell] = []
        for record in records:
            self._note(record)

    def plan_for(self, device: str, machine: Machine | None = None) -> None:
        """Plan for such a device; `machine`, where it has been looked at. Raises ConfigError."""
        self.device, self.machine = device, machine
        self.cells = plan(self.config, device, Known(self.refused, lambda cell: cell.key in self.failed)).cells
        if self.config.part:  # of the candidates, by a plan that knows of no failures: another part's are unknown here
            whole = plan(self.config, device, Known(self.refused)).cells
            stacks = {c.key: frozenset(a.label for a in c.candidate) for c in whole if c.toggles}
            place = {stack: n for n, stack in enumerate(dict.fromkeys(stacks.values()))}
            others = {key for key, stack in stacks.items() if not self.config.is_own(place[stack])}
            self.cells = [cell for cell in self.cells if cell.key not in others]

    def refused(self, cell: Cell) -> bool:
        return self.machine is not None and refusal(cell, self.machine) is not None

    def missing(self, replicate: int) -> list[Cell]:
        """What one session still has to measure, in its order.

        Of several sessions each has an order of its own: what a cell owes to those before it is no part of its ratio.
        """
        again = AGAIN if self.config.resume == "failed" else ()
        found = [
            c
            for c in self.cells
            if (c.key, replicate) not in self.tried and self.recorded.get((c.key, replicate)) in (None, *again)
        ]
        if self.config.repeat > 1:
            random.Random(f"{self.config.seed} {replicate}").shuffle(found)
        return found

    @property
    def _adapts(self) -> bool:
        return any(design in ADAPTING for design in self.config.design)

    def families(self, replicate: int) -> list[Family]:
        """What one session still has to measure, by what is measured together."""
        return families(
            self.missing(replicate),
            not self.config.isolate,
            {k: n for (k, r), n in self.done.items() if r == replicate},
        )

    def replan(self, family: Family, outcomes: Mapping[str, str]) -> Family:
        """The family as it is where cells came to this before a round was measured: a design that adapts goes on
        without what did not apply."""
        wrong = {key for key, status in outcomes.items() if status in DID_NOT_APPLY}
        if not wrong or not self._adapts or self.config.isolate:
            return family
        self.failed |= wrong
        self.plan_for(self.device, self.machine)
        mine, recorded = {cell.key: cell for cell in family.cells}, {key for key, _ in self.recorded}
        kept = [cell for cell in self.cells if cell.key in mine or cell.key not in recorded]
        now = next((f for f in families(kept) if f.key == family.key), family)
        done = tuple(mine[key] for key in outcomes if key not in {c.key for c in now.cells})
        return Family((*now.cells, *done), family.done)

    def take(self, record: Record) -> None:
        """A cell has its record: the others may have to do without its toggle."""
        self.tried.add((record.key, record.replicate))
        self._note(record)
        if record.key in self.failed and self._adapts:
            self.plan_for(self.device, self.machine)

    def _note(self, record: Record) -> None:
        at = record.key, record.replicate
        if INTERRUPTED in record.notes and record.status == "ok":
            self.done[at] = self.done.get(at, 0) + record.notes[INTERRUPTED]
            return
        self.recorded[at] = record.status
        if record.status in DID_NOT_APPLY and record.arm != ARMS[0]:  # else it is the reference that did not
            self.failed.add(record.key)
