"""The design: how a list of ablations becomes cells. Also what a cell is, and its key."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lorabench.plan.ablation import Ablation, combine, conflict
from lorabench.plan.model import ModelSpec
from lorabench.plan.workload import Workload

Toggles = tuple[Ablation, ...]  # one item of `ablations=`: mostly one toggle, or several that make one candidate
Design = Literal["solo", "ladder", "leave_one_out", "pairwise", "factorial"]
DESIGNS: tuple[str, ...] = get_args(Design)
LATER = ("seed",)  # fields of a workload that came after the first published records: unset, they leave the keys alone
FACTORIAL_LIMIT = 5  # 2^5 = 32 arms; more is no longer a sweep that anyone waits for


class DesignError(ValueError):
    """A design that the list of ablations does not allow; the message says what was expected."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A pair of arms to be measured together in one process. `toggles` are under test; none: reference against itself.

    `timeout_s` and where it runs are not part of the content, so they do not change the key.
    """

    model: ModelSpec
    workload: Workload
    design: str
    reference: tuple[Ablation, ...]
    candidate: tuple[Ablation, ...]
    toggles: tuple[Ablation, ...]
    trials: int
    warmup: int
    seed: int

    @property
    def key(self) -> str:
        """Hash of the content: what makes two cells the same measurement."""
        content = {
            "model": self.model.model_dump(mode="json"),
            "workload": {k: v for k, v in self.workload.model_dump(mode="json").items() if k not in LATER or v},
            "reference": _content(self.reference),
            "candidate": _content(self.candidate),
            "toggles": _content(self.toggles),
            "design": self.design,
            "trials": self.trials,
            "warmup": self.warmup,
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        what = " + ".join(t.label for t in self.toggles) or "reference against itself"
        return f"{self.model.name} @ {self.workload.name}: {what}"

    @property
    def separate(self) -> bool:
        """Whether a toggle's patch reaches beyond its own model, so that the arms must not share a process."""
        return any(a.global_patch for a in (*self.reference, *self.candidate))

    @property
    def loading(self) -> tuple[Ablation, ...]:
        """How both arms alike hold their frozen weights (slot `loading`). It is then part of the model and not under
        test: the gate's gold has the same weights, and nothing is tolerated for their sake."""
        return tuple(a for a in self.reference if a.slot == "loading" and a in self.candidate)

    def arm(self, name: str) -> tuple[Ablation, ...]:
        return self.reference if name == "reference" else self.candidate


def _content(ablations: Sequence[Ablation]) -> list[Any]:
    return sorted(([a.name, asdict(a)] for a in ablations), key=lambda item: item[0])


def contrasts(
    design: str, reference: Sequence[Ablation], ablations: Sequence[Toggles]
) -> Iterator[tuple[list[Ablation], list[Ablation]]]:
    """(what the reference is, which toggles the candidate adds) for each cell of the design, without A/A.

    solo: each alone, those that are listed together together. ladder: the first, the first two, … in the order given.
    leave_one_out: everything, against everything but one. pairwise: each alone and every pair. factorial: every subset.
    """
    base = list(reference)
    if design == "solo":
        yield from ((base, list(together)) for together in ablations)
        return
    each = [a for (a,) in ablations]
    if design == "ladder":
        yield from ((base, each[:n]) for n in range(1, len(each) + 1))
    elif design == "leave_one_out":
        for left_out in each:
            yield combine(base, [a for a in each if a is not left_out]), [left_out]
    else:
        largest = {"pairwise": 2, "factorial": len(each)}[design]
        for size in range(1, largest + 1):
            yield from ((base, list(chosen)) for chosen in itertools.combinations(each, size))


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


def cells(
    pairs: Sequence[tuple[ModelSpec, Workload]],
    reference: Sequence[Ablation],
    ablations: Sequence[Toggles],
    *,
    design: str = "solo",
    trials: int = 30,
    warmup: int = 5,
    seed: int = 0,
) -> list[Cell]:
    """Every cell of a sweep: for each model and workload the reference against itself, then the design's contrasts."""
    check_design(design, ablations)
    if reason := conflict(reference):
        raise DesignError(f"the reference cannot be built: {reason}")
    made = []
    for model, workload in pairs:
        both = [(list(reference), []), *contrasts(design, reference, ablations)]
        for base, toggles in both:
            made.append(
                Cell(
                    model=model, workload=workload, design=design, reference=tuple(base),
                    candidate=tuple(combine(base, toggles)), toggles=tuple(toggles),
                    trials=trials, warmup=warmup, seed=seed,
                )
            )  # fmt: skip
    return made


def refusal(cell: Cell, machine: Any) -> tuple[str, str] | None:
    """(status, reason) of a cell that need not be tried: conflict, unsupported or not_applied, known before a start."""
    for arm in (cell.reference, cell.candidate):
        if reason := conflict(arm):
            return "conflict", reason
    for ablation in (*cell.reference, *cell.candidate):
        if cell.model.op and not ablation.ops:
            return "unsupported", f"{ablation.name} is for whole models; {cell.model.name} is a single operation"
        if reason := ablation.requires.unmet(machine, cell.model):
            return "unsupported", f"{ablation.name} {reason}"
    for toggle in cell.toggles:
        if toggle in cell.reference:
            return "not_applied", f"{toggle.label} is already part of the reference"
        if reason := toggle.excuses(cell.reference, machine.dtype(cell.model.dtype)):
            return "not_applied", reason
    return None
