"""The design: how a list of ablations becomes cells."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from lorabench.contract.ablation import Ablation, combine, conflict
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import Faulty, asked, asked_requires, contained, described
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import multicast
from lorabench.contract.switches import switch_fault
from lorabench.contract.workload import Workload

Toggles = tuple[Ablation, ...]  # one item of `ablations=`: mostly one toggle, or several that make one candidate
Design = Literal["ladder", "leave_one_out", "factorial", "pairwise", "solo"]
# Of several in one sweep the first has the cells that they share: a ladder needs its own, the others find any.
DESIGNS: tuple[str, ...] = get_args(Design)
ADAPTING = ("ladder", "leave_one_out")  # whose cells depend on what became of the others
FACTORIAL_LIMIT = 5  # 2^5 = 32 arms; more is no longer a sweep that anyone waits for


class DesignError(ValueError):
    """A design that the list of ablations does not allow; the message says what was expected."""


def _never(cell: Cell) -> bool:
    return False


@dataclass(frozen=True)
class Known:
    """What is known of a cell while the others are planned, which may build on it.

    `refused`: it need not be tried on this machine. `failed`: it was tried, and the toggle that it adds did not apply.
    """

    refused: Callable[[Cell], bool] = _never
    failed: Callable[[Cell], bool] = _never


NOTHING = Known()

# Of (what the reference is, which toggles the candidate adds); of a ladder also which rung it is, from 1.
Make = Callable[..., Cell]


def contrasts(
    design: str, base: list[Ablation], ablations: Sequence[Toggles], make: Make, known: Known
) -> Iterator[Cell]:
    """Each cell of the design, without A/A.

    solo: each alone, those that are listed together together. ladder: the first, the first two, … in the order given,
    each against the reference and against the one before it. leave_one_out: everything, against everything but one.
    pairwise: each alone and every pair. factorial: every subset. Where a toggle does not apply, a ladder and
    leave_one_out go on without it; its own cell stays, with the reason. In these a toggle takes the place of an earlier
    one in its slot, which leave_one_out then has no cell of.
    """
    if design == "solo":
        yield from (make(base, list(together)) for together in ablations)
        return
    each = [a for (a,) in ablations]
    if design == "ladder":
        yield from _ladder(base, each, make, known)
    elif design == "leave_one_out":
        yield from _leave_one_out(base, each, make, known)
    else:
        largest = {"pairwise": 2, "factorial": len(each)}[design]
        for size in range(1, largest + 1):
            yield from (make(base, list(chosen)) for chosen in itertools.combinations(each, size))


STEPS = "steps"  # the design of a rung's cell over the one below it


def _ladder(base: list[Ablation], each: Sequence[Ablation], make: Make, known: Known) -> Iterator[Cell]:
    """Of each toggle, on top of those that stand, the cell over the reference and the one over the rung below. One that
    does not apply is not among those that stand."""
    standing: list[Ablation] = []
    for number, toggle in enumerate(each, start=1):
        cell = make(base, combine(standing, [toggle]), rung=number)
        step = make(combine(base, standing), [toggle], rung=number, design=STEPS)
        yield cell
        if standing:  # else it is the same cell
            yield step
        if not any(known.refused(c) or known.failed(c) for c in (cell, step)):
            standing = combine(standing, [toggle])


def _leave_one_out(base: list[Ablation], each: Sequence[Ablation], make: Make, known: Known) -> list[Cell]:
    """A cell that is refused is so for its own toggle's sake only if the others in it are known to apply: so they are
    put together one by one. One that failed has shown that by its reference, which did not."""
    own: dict[int, Cell] = {}  # of those that do not apply, by id, as they were found

    def of(toggle: Ablation) -> Cell:
        return make(combine(base, [a for a in all_on if a is not toggle]), [toggle])

    while True:
        all_on, replaced = _all_on(base, [a for a in each if id(a) not in own], make, known)
        wrong = next((a for a in all_on if known.failed(of(a))), None)
        if wrong is None:
            return [own.get(id(toggle)) or of(toggle) for toggle in each if toggle not in replaced]
        own[id(wrong)] = of(wrong)


def _all_on(
    base: list[Ablation], each: Sequence[Ablation], make: Make, known: Known
) -> tuple[list[Ablation], list[Ablation]]:
    """(the toggles that can be on together, those whose place a later one has taken)."""
    all_on: list[Ablation] = []
    replaced: list[Ablation] = []
    for toggle in each:
        if not known.refused(make(combine(base, all_on), [toggle])):
            replaced += [a for a in all_on if a.slot == toggle.slot]
            all_on = combine(all_on, [toggle])
    return all_on, replaced


def check_design(design: str, ablations: Sequence[Toggles]) -> None:
    """Raises DesignError where the design and the list do not go together."""
    names = [" + ".join(sorted(a.label for a in together)) for together in ablations]
    if design != "solo" and any(len(together) != 1 for together in ablations):
        raise DesignError(f"design {design} takes toggles one by one; several as one candidate are for design=solo")
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise DesignError(f"{sorted(twice)[0]} stands twice in ablations=")
    if design == "factorial" and len(ablations) > FACTORIAL_LIMIT:
        raise DesignError(f"factorial over {len(ablations)} ablations is {2 ** len(ablations)} arms; at most 5")
    if design in ("leave_one_out", "pairwise", "ladder") and len(ablations) < 2:
        raise DesignError(f"design {design} needs at least two ablations")


@dataclass(frozen=True)
class Subject:
    """What a design is measured on: a model and its workload, as cells of a kind."""

    kind: str
    model: ModelSpec
    workload: Workload


def cells(
    subjects: Sequence[Subject],
    reference: Sequence[Toggles],
    ablations: Sequence[Toggles],
    *,
    design: str = "solo",
    trials: int = 30,
    warmup: int = 5,
    seed: int = 0,
    world_size: int = 1,
    known: Known = NOTHING,
) -> list[Cell]:
    """Every cell of a sweep: for each subject the reference against itself, then the design's contrasts.

    An item of the reference is a toggle, or several of which a model gets the first that it can have. A kind takes of
    the reference what it takes. A candidate is measured on the subjects whose kind takes its toggles;
    one that no subject's kind takes becomes a cell all the same, which is refused with the reason.
    """
    check_design(design, ablations)
    made = []
    for subject in subjects:
        own = reference_of(subject, reference)
        fitting = [t for t in ablations if goes_with(t, subject, subjects)]
        make = partial(
            _cell, subject, design=design, trials=trials, warmup=warmup, seed=seed, world_size=world_size
        )  # fmt: skip
        made += [make(own, []), *(contrasts(design, own, fitting, make, known) if fitting else ())]
    return made


def reference_of(subject: Subject, reference: Sequence[Toggles]) -> list[Ablation]:
    """The toggles of a reference that a subject's kind knows: of each item the first that its model can have. Raises
    DesignError where they do not go together."""
    its = [_first_that_fits(item, subject.model) for item in reference]
    if reason := conflict(its):
        raise DesignError(f"the reference cannot be built: {reason}")
    return [a for a in its if _takes(subject, a)]


def _first_that_fits(choice: Toggles, model: ModelSpec) -> Ablation:
    """Of a reference's item; the last one, where the model can have none: its cells are then refused with a reason."""
    return next((a for a in choice[:-1] if _fits(a, model)), choice[-1])


def _fits(ablation: Ablation, model: ModelSpec) -> bool:
    try:
        with contained(ablation.name):
            return ablation.requires.unmet_by(model) is None
    except Exception:  # a third party's: what is wrong with it, its cells will say
        return True


def once(made: Sequence[Cell]) -> list[Cell]:
    """Without the cells that another design has already: the same content is measured once in a sweep."""
    found: dict[str, Cell] = {}
    for cell in made:
        found.setdefault(replace(cell, design="").key, cell)
    return list(found.values())


def _cell(subject: Subject, base: Sequence[Ablation], toggles: Sequence[Ablation], **common: Any) -> Cell:
    name = _kind_of(subject.kind, toggles)
    return Cell(
        kind=name, kind_in_key=kind(name).in_key, model=subject.model, workload=subject.workload,
        reference=tuple(base), candidate=tuple(combine(base, toggles)), toggles=tuple(toggles), **common,
    )  # fmt: skip


def _kind_of(subject: str, toggles: Sequence[Ablation]) -> str:
    """A toggle that bounds the subject's kind makes its cell one of the kind that such toggles are for."""
    return next((a.kinds[0] for a in toggles if a.bounds), subject)


def goes_with(toggles: Toggles, subject: Subject, subjects: Sequence[Subject]) -> bool:
    """Whether a candidate is measured on a subject, in a sweep that has all these `subjects`."""
    return fits(toggles, subject) or not any(fits(toggles, one) for one in subjects)


def fits(toggles: Toggles, subject: Subject) -> bool:
    """Whether a subject has what each of the toggles would change."""
    return all(_takes(subject, a) or a.bounds == subject.kind for a in toggles)


def _takes(subject: Subject, ablation: Ablation) -> bool:
    return kind(subject.kind).takes(ablation, subject.model)


def refusal(cell: Cell, machine: Machine) -> tuple[str, str] | None:
    """(status, reason) of a cell that need not be tried: conflict, unsupported or not_applied, known before a start; or
    crash, where a toggle's own code raises already when it is asked for that."""
    try:
        with contained(f"a toggle of {cell.tested}"):
            return _refusal(cell, machine)
    except Exception as error:
        return "crash", described(error)


def _wrongly_declared(cell: Cell) -> str | None:
    for toggle in (*cell.reference, *cell.candidate):
        fault = toggle.tolerance.fault(toggle.changes_weights) if toggle.tolerance else None
        if fault := fault or switch_fault(toggle.switches, toggle.global_patch):
            return f"{toggle.name} {fault}"
    return None


def _refusal(cell: Cell, machine: Machine) -> tuple[str, str] | None:
    for ablation in (*cell.toggles, *cell.reference, *cell.candidate):
        if isinstance(ablation, Faulty):
            return "crash", ablation.fault
    for arm in (cell.reference, cell.candidate):
        if reason := conflict(arm):
            return "conflict", reason
    if reason := _unsupported(cell, machine) or _wrongly_declared(cell):
        return "unsupported", reason
    for toggle in cell.toggles:
        if toggle in cell.reference:
            return "not_applied", f"{toggle.label} is already part of the reference"
        reason = asked(toggle, Ablation.without_effect, cell.reference, machine.dtype(cell.model.dtype))
        if reason is not None:
            return "not_applied", reason
    return None


def _layers(cell: Cell) -> int:
    return int(cell.model.hf_config().num_hidden_layers)


def _unsupported(cell: Cell, machine: Machine) -> str | None:
    bounded = {a.bounds for a in cell.candidate if a.bounds}
    for ablation in (*cell.toggles, *cell.reference, *cell.candidate):
        if not any(name in ablation.kinds or name == ablation.bounds for name in (cell.kind, *bounded)):
            own = " and ".join(ablation.kinds)
            return f"{ablation.name} is for cells of the kind {own}; {cell.model.name} is measured as {cell.kind}"
        if (reason := asked_requires(ablation, machine, cell.model)) is not None:
            return f"{ablation.name} {reason}"
        if ablation.process_a_job:
            if len(cell.workload.jobs) < 2:
                return (
                    f"{ablation.name} trains several jobs at the same time; the workload {cell.workload.name} has one"
                )
            if cell.world_size > 1:
                return f"{ablation.name} has a process a job, all on one GPU: give world_size=1"
        elif ablation.parallel and cell.world_size < 2 and not ablation.one_rank:
            return f"{ablation.name} steps on several processes: give world_size=2 or more"
        if ablation.parallel and (least := ablation.least_layers(cell.world_size)) > (has := _layers(cell)):
            return f"{ablation.name} needs {least} layers on {cell.world_size} ranks; {cell.model.name} has {has}"
    if reason := kind(cell.kind).refusal(cell, machine):
        return reason
    if machine.device == "cuda" and cell.gpus > machine.gpus:
        return f"world_size={cell.gpus} needs {cell.gpus} GPUs; this machine has {machine.gpus}"
    if machine.device == "cuda" and cell.gpus > 1:
        return multicast(os.environ)
    return None
