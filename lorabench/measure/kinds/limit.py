"""Kind `limit`: the least work that any trial of another kind must do. No candidate: no adapter's
gradients are computed, so it has no gate and no verdict.

Its reference is an ordinary arm of the kind that the toggle bounds (`Ablation.bounds`), trained as ever, of which the
phases that a limit has are recorded; so every other row of that reference can be given as a share of the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.work import Work
from lorabench.measure.kind import Kind, Request

FORWARD, BACKWARD = "forward", "backward"


class Limit(Kind):
    name: ClassVar[str] = "limit"
    summary: ClassVar[str] = "the least work that any trial of the bounded kind must do: forward, backward"
    phases: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD)
    total: ClassVar[str] = "forward + backward"
    carries: ClassVar[tuple[str, ...]] = ("tokens",)
    candidate: ClassVar[bool] = False
    in_key: ClassVar[bool] = False
    shares: ClassVar[tuple[tuple[str, ...], ...]] = ((FORWARD,), (FORWARD, BACKWARD))

    def older(self, record: Mapping[str, Any]) -> bool:
        return bool(record.get("limit"))

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        return self._of(cell.candidate).refusal(cell, machine)

    def samples(self, cell: Cell) -> list[list[Sample]]:
        return self._of(cell.candidate).samples(cell)

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        return self._of(cell.candidate).work(cell, samples, ablations)

    def _of(self, ablations: Sequence[Ablation]) -> Any:
        """The kind that is bounded."""
        return kind(next(a.bounds for a in ablations if a.bounds))

    def imports(self, request: Request) -> None:
        self._of(request.cell.candidate).imports(request)

    def build(self, request: Request) -> Arm:
        """An arm of the bounded kind: only what of it is recorded is the limit's own."""
        return self._of(request.cell.candidate).build(request)

    def audited(self, arm: Arm) -> Sequence[Ablation]:
        """A limit runs no part of the model, so the reference's toggles cannot be at work in it."""
        return [a for a in arm.ablations if a.bounds] or super().audited(arm)
