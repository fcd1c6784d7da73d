"""How near a row is to the least work that there is: that work's time / the row's, over phases that its kind names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lorabench.contract.kind import registered
from lorabench.record.schema import Record
from lorabench.report.contrasts import Beside, Contrasts, Phases


class ShareOf(NamedTuple):
    """One column of shares: of which kind, over which of its phases."""

    kind: Any
    phases: Phases

    @property
    def column(self) -> str:
        """`of_KIND` over all the kind's phases, `of_KIND_PHASES` over some."""
        some = () if self.phases == self.kind.phases else self.phases
        return "_".join(["of", self.kind.name, *some])

    @property
    def heading(self) -> str:
        return f"of {self.kind.name} [95 %], {' + '.join(self.phases)}"


def columns(kinds: Iterable[Any]) -> list[ShareOf]:
    """The shares that rows of these kinds can have, the one over all phases of the least work first."""
    has = [set(k.phases) for k in kinds if k.candidate]
    found = [ShareOf(k, s) for k in registered().values() for s in sorted(k.shares, key=len, reverse=True)]
    return [share for share in found if any(set(share.kind.phases) <= phases for phases in has)]


class Shares:
    """The shares of the records of a folder; `devices` are those they were measured on, in their order."""

    def __init__(self, records: Sequence[Record], devices: Sequence[str], contrasts: Contrasts) -> None:
        self._contrasts = contrasts
        self._device = {id(r): device for r, device in zip(records, devices, strict=True)}
        self._least: dict[Any, Record] = {}
        for record in records:
            if not record.is_candidate and record.status == "ok":
                for place in self._places(record):
                    self._least.setdefault((record.kind, *place), record)

    def _places(self, record: Record) -> list[tuple[str, str, str, Any]]:
        """What a record and what bounds it have in common: the family, or else the reference."""
        place = self._device[id(record)], record.model, record.workload
        return [(*place, together) for together in (record.family, frozenset(record.reference)) if together]

    def of(self, record: Record, share: ShareOf) -> Beside | None:
        """None for a record without times and for one that nothing bounds."""
        found = (self._least.get((share.kind.name, *place)) for place in self._places(record))
        least = next(filter(None, found), None)
        if least is None or not record.is_candidate or record.status != "ok":
            return None
        return self._contrasts.beside(record, least, share.phases)
