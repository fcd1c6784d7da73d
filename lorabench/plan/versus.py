"""Head to head: every pair of the sides of `versus=` as a cell, so that two stacks are held against each other without
a third between them.

A side is a stack: the sweep's reference with the side's toggles put into their slots. Of each pair the one that is
named first is the candidate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lorabench.contract.ablation import Ablation, combine, conflict
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.plan import registry
from lorabench.plan.design import DesignError, Subject, Toggles, goes_with, reference_of

DESIGN = "versus"
JOIN = "+"  # between the toggles of a side: NAME+NAME


def sides(items: Sequence[Any]) -> list[Toggles]:
    """The items of `versus=`: NAME, NAME+NAME, {NAME: {parameter: value}}, or a list of names and such.

    Raises NameUnknown for a wrong name, DesignError for sides that cannot be held against each other.
    """
    found = [tuple(registry.ablation(part) for part in _parts(item)) for item in items]
    if len(found) < 2:
        raise DesignError("versus= takes two sides or more: versus=[lora_kernels,unsloth]")
    for side in found:
        if reason := conflict(side):
            raise DesignError(f"the side {_named(side)} of versus= cannot be built: {reason}")
        if bound := next((a.name for a in side if a.bounds), None):
            raise DesignError(f"{bound} is no way to do the work but a bound of it, and no side of versus=")
    return found


def _parts(item: Any) -> list[Any]:
    if isinstance(item, str):
        return [part.strip() for part in item.split(JOIN)]
    return item if isinstance(item, list) and item else [item]


def cells(
    subjects: Sequence[Subject], reference: Sequence[Toggles], sides: Sequence[Toggles], *, trials: int, warmup: int,
    seed: int, world_size: int,
) -> list[Cell]:  # fmt: skip
    """For each subject and each side that is the reference of a pair: the side against itself, then its pairs. Raises
    DesignError where two sides come to the same stack."""
    made: list[Cell] = []
    for subject in subjects:
        own = reference_of(subject, reference)
        _check_apart(own, sides)
        for number, against in enumerate(sides):
            rivals = [s for s in sides[:number] if goes_with((*s, *against), subject, subjects)]
            if not rivals:
                continue
            family = [
                Cell(
                    kind=subject.kind, kind_in_key=kind(subject.kind).in_key, model=subject.model,
                    workload=subject.workload, design=DESIGN, reference=tuple(combine(own, against)),
                    candidate=tuple(combine(own, toggles or against)), toggles=toggles, versus=against,
                    trials=trials, warmup=warmup, seed=seed, world_size=world_size,
                )
                for toggles in ((), *rivals)
            ]  # fmt: skip
            made += family
    return made


def _check_apart(reference: Sequence[Ablation], sides: Sequence[Toggles]) -> None:
    stacks = [{a.label for a in combine(reference, side)} for side in sides]
    for (one, first), (other, second) in itertools.combinations(zip(sides, stacks, strict=True), 2):
        if first == second:
            raise DesignError(f"{_named(one)} and {_named(other)} of versus= come to the same stack")


def _named(side: Toggles) -> str:
    return " + ".join(a.label for a in side)
