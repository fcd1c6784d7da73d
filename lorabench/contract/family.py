"""The family: the arms of one question on one model and workload, measured together in rounds.

A design says in cells what is held against what; a family is the arms that its cells need, each of them once: the
reference, the reference again, and every other stack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from lorabench.contract.ablation import Ablation
from lorabench.contract.cell import Cell
from lorabench.contract.job import Job

REFERENCE, TWIN = "reference", "reference again"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An arm that is still to be built. `cell` holds it against the family's reference: as its candidate it is built,
    judged and named. `cells` are the contrasts in which it is the candidate."""

    name: str
    cell: Cell
    cells: tuple[Cell, ...] = ()

    @property
    def kind(self) -> str:
        return self.cell.kind

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        return self.cell.candidate

    @property
    def labels(self) -> list[str]:
        return [a.label for a in self.ablations]

    @property
    def role(self) -> str:
        return {REFERENCE: "reference", TWIN: "twin"}.get(self.name, "candidate")

    @property
    def is_reference(self) -> bool:
        """Whether it is the reference, or the reference again."""
        return self.name in (REFERENCE, TWIN)

    @property
    def alone(self) -> bool:
        """Whether it has to sit alone, because a toggle's patch reaches beyond its own model."""
        return any(a.global_patch for a in self.ablations)

    @property
    def slow_start(self) -> bool:
        """Whether the host compiles for minutes before its first trial."""
        return any(a.slow_start for a in self.ablations)

    @property
    def ranks(self) -> int:
        """How many processes it steps on: one, unless a toggle steps on several."""
        return self.cell.ranks_of("candidate")

    @property
    def process_a_job(self) -> bool:
        """Whether each of its processes trains a job of its own, all of them on one GPU."""
        return any(a.process_a_job for a in self.ablations)


@dataclass(frozen=True)
class Family:
    """Cells of one model, workload and kind that are measured together. All have the same trials, warm-up and seed.
    `done`: how many of their rounds an earlier session has measured, which was ended from outside."""

    cells: tuple[Cell, ...]
    done: int = 0

    @cached_property
    def reference(self) -> Cell:
        """The reference against itself: of the cell that the plan has for that, or of the first cell's reference."""
        itself = next((c for c in self.cells if not c.toggles), None)
        first = self.cells[0]
        return itself or replace(first, kind=_home(first), candidate=first.reference, toggles=(), rung=None)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The reference, the reference again where a cell asks for it, then every other stack in the cells' order: as
        candidate or as what one is held against; again too, where a cell holds it against itself."""
        base = self.reference.reference
        made: dict[frozenset[str], Stack] = {}
        shown: dict[frozenset[str], list[Cell]] = {}
        for cell in self.cells:
            for side, its in (("reference", cell.reference), ("candidate", cell.candidate)):
                key = _key(its)
                if key != _key(base) and key not in made:
                    made[key] = self._stack(cell, its)
                if side == "candidate":
                    shown.setdefault(key, []).append(cell)
        itself = tuple(shown.get(_key(base), ()))
        twin = (Stack(name=TWIN, cell=self.reference, cells=itself),) if itself else ()
        others: list[Stack] = []
        for key, stack in made.items():
            own = tuple(cell for cell in shown.get(key, ()) if cell.toggles)
            itself = tuple(cell for cell in shown.get(key, ()) if not cell.toggles)
            others.append(replace(stack, cells=own))
            others += [replace(stack, name=f"{stack.name} again", cells=itself)] if itself else []
        return (Stack(name=REFERENCE, cell=self.reference), *twin, *others)

    def _stack(self, cell: Cell, ablations: Sequence[Ablation]) -> Stack:
        base = self.reference.reference
        own = tuple(a for a in ablations if a not in base)
        kind = cell.kind if any(a.bounds for a in ablations) else self.reference.kind
        as_candidate = replace(
            self.reference, kind=kind, reference=base, candidate=tuple(ablations), toggles=own, rung=None,
        )  # fmt: skip
        return Stack(name=" + ".join(a.label for a in own) or "nothing", cell=as_candidate)

    def names(self, cell: Cell) -> set[str]:
        """Of the two arms that a cell holds together, but for the reference."""
        both = {_key(cell.reference), _key(cell.candidate)}
        return {s.name for s in self.stacks if not s.is_reference and _key(s.ablations) in both}

    @property
    def rounds(self) -> int:
        """How many are still to be measured."""
        return max(1, self.reference.trials - self.done)

    @property
    def jobs(self) -> list[Job]:
        return self.reference.jobs

    @property
    def title(self) -> str:
        return f"{self.reference.model.name} @ {self.reference.workload.name}"

    @property
    def question(self) -> str:
        """What two families have to share for an arm of one to be the arm of that name in the other."""
        return json.dumps([_question(self.reference), sorted(_key(self.reference.reference))])

    @property
    def key(self) -> str:
        """Hash of what its arms have in common: two families of one key are of the same question."""
        content = [self.reference.key, self.reference.kind]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def ranks(self) -> int:
        """How many processes the largest of its arms needs."""
        return max(stack.ranks for stack in self.stacks)

    @property
    def gpus(self) -> int:
        """How many GPUs it needs: one a process, unless these share the first one. No family has both: what divides a
        step wants a world_size of several, and a process a job a world_size of one."""
        return max(1 if stack.process_a_job else stack.ranks for stack in self.stacks)


NOTHING: Mapping[str, int] = MappingProxyType({})


def families(cells: Iterable[Cell], together: bool = True, done: Mapping[str, int] = NOTHING) -> list[Family]:
    """The cells by what they have in common, in the order of their first. Not `together`: each cell is a family of its
    own, so that a toggle which nobody trusts has only the reference beside it. `done`: rounds by the key of a cell."""
    if not together:
        return [Family((cell,), done.get(cell.key, 0)) for cell in cells]
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault((_question(cell), done.get(cell.key, 0)), []).append(cell)
    return [Family(tuple(own), rounds) for (_, rounds), own in found.items()]


def _question(cell: Cell) -> str:
    """What the cells of one family share."""
    content = [
        _home(cell), cell.model.content(), cell.workload.model_dump(mode="json"), cell.trials, cell.warmup, cell.seed,
        cell.world_size,
    ]  # fmt: skip
    return json.dumps(content, sort_keys=True, default=str)


def _home(cell: Cell) -> str:
    """The kind with which a cell is measured: a limit stands with the kind that it bounds."""
    return next((a.bounds for a in cell.candidate if a.bounds), cell.kind)


def _key(ablations: Sequence[Ablation]) -> frozenset[str]:
    """Of a stack, whatever the order of its toggles."""
    return frozenset(a.label for a in ablations)
