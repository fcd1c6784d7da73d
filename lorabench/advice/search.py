"""The search: every contender alone, then the best of each slot put together one by one, then the whole.

Greedy, and each step is a cell of its own: what is put on the stack was measured on top of the stack, paired, and
passed the gate there. Gains do not multiply, so the whole stack is measured against the reference too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lorabench.advice.budget import Budget
from lorabench.advice.paste import apart
from lorabench.contract.ablation import Ablation, combine, conflict
from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.plan.design import refusal
from lorabench.record.schema import TOTAL, Record
from lorabench.report.analysis import Analysis

Toggles = tuple[Ablation, ...]  # a contender: mostly one toggle


def named(toggles: Toggles) -> str:
    return " + ".join(t.label for t in toggles)


def makes_it_fit(record: Record) -> bool:
    """Whether the reference ran out of memory and the candidate did not."""
    total = (record.phases or {}).get(TOTAL)
    return record.status == "oom" and record.arm == "reference" and bool(total and total.candidate_ms)


@dataclass
class Search:
    """`planned`: the cells of a solo design, the reference against itself first. `look`: all records so far, analysed.
    `in_need`: contenders that are tried only where the reference does not fit."""

    planned: Sequence[Cell]
    machine: Machine
    budget: Budget
    look: Callable[[], Analysis]
    in_need: Collection[Toggles] = ()
    records: dict[str, Record] = field(default_factory=dict)  # by key, those of earlier runs too
    kept: list[Toggles] = field(default_factory=list)  # the contenders of which the stack is made
    rungs: dict[str, Cell] = field(default_factory=dict)  # by contender: the cell that put it on top of the stack
    passed_over: dict[str, str] = field(default_factory=dict)  # contenders that help alone: why they are left
    left_out: list[tuple[Cell, str]] = field(default_factory=list)  # for want of time, each with what is known of it

    @property
    def itself(self) -> Cell:
        """The reference against itself."""
        return self.planned[0]

    @property
    def solos(self) -> list[Cell]:
        return [cell for cell in self.planned if cell.toggles]

    @property
    def fits(self) -> bool:
        """Whether the reference fits the device."""
        return self.records[self.itself.key].status != "oom"

    @property
    def stack(self) -> Toggles:
        return tuple(toggle for contender in self.kept for toggle in contender)

    @property
    def whole(self) -> Cell:
        """The whole stack against the reference."""
        return self.cell(self.itself.reference, self.stack)

    def cell(self, reference: Sequence[Ablation], toggles: Toggles) -> Cell:
        candidate = tuple(combine(reference, toggles))
        return replace(self.itself, reference=tuple(reference), candidate=candidate, toggles=toggles)

    def leave_out(self, cell: Cell, why: str) -> None:
        self.left_out.append((cell, why))

    def learn(self, cell: Cell, record: Record) -> None:
        self.records[cell.key] = record
        self.budget.learn(cell, record)

    def cells(self) -> Iterator[Cell]:
        """What is to be measured, each cell once the record of the one before is there."""
        yield from self._missing([self.itself])
        found = self.records.get(self.itself.key)
        if found is None or found.status not in ("ok", "oom"):
            return
        tried = [c for c in self.planned[1:] if not self.fits or c.toggles not in self.in_need]
        # The cheap ones first: a cell in processes of its own takes as long as several others.
        yield from self._missing(sorted(tried, key=lambda cell: cell.separate), self._for_stacking)
        contenders = self._contenders(tried)
        if contenders:
            self.kept = contenders[:1]
            yield from self._stacked(contenders[1:])

    def _missing(self, cells: Sequence[Cell], reserved: Callable[[], float] = lambda: 0.0) -> Iterator[Cell]:
        """Those without a record, as long as there is time."""
        for cell in cells:
            if cell.key in self.records:
                continue
            if refusal(cell, self.machine) or self.budget.allows(cell, reserved()):
                yield cell
            else:
                self.leave_out(cell, f"it would take about {self.budget.estimate(cell):.0f} s")

    def _for_stacking(self) -> float:
        """Seconds: as soon as there is something to put together, one more rung and the whole are worth more than the
        contenders that are left."""
        promising = {
            t.slot for cell in self.solos for t in cell.toggles
            if (record := self.records.get(cell.key)) and record.status == "ok" and _low(record) > 1
        }  # fmt: skip
        return 2 * self.budget.estimate(self.itself) if len(promising) > 1 else 0.0

    def _contenders(self, tried: Sequence[Cell]) -> list[Toggles]:
        """Those that help alone, one a slot, the best first. Where the reference does not fit, those that make it fit,
        and after them whatever ran out of memory alone."""
        analysis = self.look()
        ranked = sorted((rank, n) for n, c in enumerate(tried) if (rank := self._rank(c, analysis)) is not None)
        found: list[Toggles] = []
        if not ranked or ranked[0][0][0] == NO_FIT:
            return found
        for _, n in ranked:
            toggles = tried[n].toggles
            rival = next((o for o in found if {t.slot for t in o} & {t.slot for t in toggles}), None)
            if rival:
                self.passed_over[named(toggles)] = f"{named(rival)}, which fills the same slot, was better"
            else:
                found.append(toggles)
        return found

    def _helps(self, cell: Cell) -> bool:
        """Whether it fits where its reference does not, or is clearly faster."""
        rank = self._rank(cell, self.look())
        return rank is not None and rank[0] != NO_FIT

    def _rank(self, cell: Cell, analysis: Analysis) -> tuple[int, float] | None:
        """Better ones are smaller; None where it does not help."""
        record = self.records.get(cell.key)
        if record is None or not cell.toggles:
            return None
        shown = shown_for(record, analysis)
        row = analysis.row(shown)
        if makes_it_fit(shown):
            return FITS, row[f"{TOTAL}_candidate_ms"]
        if shown.status == "oom" and not self.fits:
            return NO_FIT, 0.0
        if shown.status == "ok" and row["verdict"] == "faster":
            return FASTER, 1 / row[f"{TOTAL}_speedup"]
        return None

    def _stacked(self, contenders: Sequence[Toggles]) -> Iterator[Cell]:
        """One contender after the other on top of the stack, then the whole against the reference."""
        if contenders and not self.fits:  # its noise is not known yet
            yield from self._missing([self.cell(self.whole.candidate, ())])
        for contender in contenders:
            together = combine(self.itself.reference, self.stack + contender)
            if reason := conflict(together) or apart(together):
                self.passed_over[named(contender)] = reason
                continue
            rung = self.cell(self.whole.candidate, contender)
            yield from self._missing([rung], lambda: self.budget.estimate(self.itself))
            if rung.key not in self.records:
                continue
            self.rungs[named(contender)] = rung
            if self._helps(rung):
                self.kept.append(contender)
        yield from self._missing([self.whole])
        self._fall_back()

    def _fall_back(self) -> None:
        """To the best alone, where the whole was not measured, or does not help against the reference."""
        if not self._helps(self.whole):
            measured = self.whole.key in self.records
            why = "is not clearly faster than the reference" if measured else "was not measured"
            for contender in self.kept[1:]:
                self.passed_over[named(contender)] = f"it helped on top, but the whole, {named(self.stack)}, {why}"
            self.kept = self.kept[:1]


FITS, FASTER, NO_FIT = range(3)


def shown_for(record: Record, analysis: Analysis) -> Record:
    """The record that stands for this one's cell, where that was measured in several sessions."""
    return next(r for r in analysis.records if (r.kind, r.key) == (record.kind, record.key))


def _low(record: Record) -> float:
    total = (record.phases or {}).get(TOTAL)
    return total.low if total and total.low is not None else 0.0
