"""The kind of a cell, as planning, records and reports see it; `measure/kind.py` adds how it is measured.

A kind is found as a toggle is: an entry point in the group `lorabench.kinds`, one class in one file (measure/kinds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.names import NameUnknown, nearest
from lorabench.contract.work import Work

GROUP = "lorabench.kinds"


class KindSpec:
    """What everything but the measuring itself asks a kind."""

    name: ClassVar[str]
    summary: ClassVar[str]
    phases: ClassVar[tuple[str, ...]]  # in the order in which they run
    total: ClassVar[str]  # what their sum is called
    # Phases that an arm may do without: where only one arm has one, the record holds its times and no ratio.
    optional: ClassVar[tuple[str, ...]] = ()
    # Fields of a record with status `ok` that must be there beside phases, applied and pairing.
    carries: ClassVar[tuple[str, ...]] = ()
    candidate: ClassVar[bool] = True  # False: the least work of another kind, so without gate, rank and verdict
    in_key: ClassVar[bool] = True  # False: older than the word kind; its cells keep their keys
    # Phase sums over which any row of the same model and workload is given as a share of this one's time.
    shares: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def model(self, name: str) -> dict[str, Any] | None:
        """Fields of a ModelSpec for a model name that this kind alone knows, or None. Raises NameUnknown where the name
        only begins like one."""
        return None

    def default_workload(self, device: str) -> str | None:
        """The name that `workload=auto` stands for; None: as for every kind without one of its own."""
        return None

    def takes(self, ablation: Any, model: ModelSpec) -> bool:
        """Whether a cell of this kind and model has anything that the toggle could change."""
        return self.name in ablation.kinds

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        """Why a cell cannot be of this kind, known before a start; or None."""
        return None

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        """The useful work of one trial of an arm with these toggles, a Work a job, from shapes and the jobs'
        samples."""
        return [Work() for _ in samples]

    def older(self, record: Mapping[str, Any]) -> bool:
        """Whether a record written before records named their kind is of this one."""
        return False


@cache
def registered() -> Mapping[str, KindSpec]:
    """Every kind by its name. Raises NameUnknown for an entry point that does not load or does not agree."""
    found: dict[str, KindSpec] = {}
    for point in entry_points(group=GROUP):
        try:
            made = point.load()()
        except Exception as error:  # a third party's import may fail in any way
            raise NameUnknown(f"the kind {point.name} ({point.value}) does not load: {error}") from error
        if getattr(made, "name", None) != point.name:
            raise NameUnknown(f"the entry point {point.name} holds a kind named {getattr(made, 'name', made)!r}")
        if point.name in found and type(found[point.name]) is not type(made):
            raise NameUnknown(f"two packages register a kind named {point.name}; rename or uninstall one")
        found[point.name] = made
    return found


def kind(name: str) -> Any:
    """The kind of that name. Raises NameUnknown with the nearest right name."""
    known = registered()
    if name not in known:
        raise nearest("kind", name, known)
    return known[name]
