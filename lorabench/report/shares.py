"""How near a row is to the least work that there is: that work's time / the row's, over the phases that its kind names.

Two arms of a family shared rounds, and the share is their contrast over these. In records of schemas 1 and 2 the two
were never in one cell. There it is the ratio of their speed-ups over the reference, each measured in pairs, which
cancels what differs between two GPUs or their clocks. Where the reference waits for its host, or was not equally fast
in both cells, it would bring in what differs between the hosts instead; then it is the ratio of the two times as they
are, not paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lorabench.contract.kind import kind, registered
from lorabench.record.contrast import contrast
from lorabench.record.schema import Record
from lorabench.report.contrasts import Contrasts, Phases, trials

# Cells whose references are further apart than this were measured on machines too unlike for a ratio of their ratios.
REFERENCES_APART = 0.10


class Share(NamedTuple):
    """A fraction of the least work's speed with its 95 % interval. paired: over shared rounds, or by way of the
    reference of both cells. how: of shared rounds, whether `within` a process or `between` processes."""

    centre: float
    low: float
    high: float
    paired: bool
    how: str = ""


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
                self._least.setdefault((record.kind, *self._place(record)), record)

    def _place(self, record: Record) -> tuple[str, str, str, str | frozenset[str]]:
        """What a record and what bounds it have in common: the family, or in schemas 1 and 2 the reference."""
        together = record.family or frozenset(record.reference)
        return self._device[id(record)], record.model, record.workload, together

    def of(self, record: Record, share: ShareOf) -> Share | None:
        """None for a record without times and for one that nothing bounds."""
        least = self._least.get((share.kind.name, *self._place(record)))
        if least is None or not record.is_candidate or record.status != "ok":
            return None
        return ratio_of_ratios(record, least, share.phases, self._contrasts)


def ratio_of_ratios(record: Record, least: Record, phases: Phases, contrasts: Contrasts) -> Share | None:
    """The time of `least` / the record's, both of the candidate."""
    return of_two(record, least, phases, contrasts, reference_waits(record, kind(least.kind).phases))


def of_two(record: Record, other: Record, phases: Phases, contrasts: Contrasts, waits: bool) -> Share | None:
    """The time of `other` / the record's, both of the candidate. waits: whether the reference waits for its host, which
    leaves no pairing through it."""
    if direct := contrasts.beside(record, other, phases):
        return Share(*direct.contrast.speedup, paired=True, how=direct.how)
    ours, bound = contrasts.of(record, phases), contrasts.of(other, phases)
    if ours is None or bound is None:
        return None
    apart = abs(math.log(_median(record, phases, "reference_ms") / _median(other, phases, "reference_ms")))
    if apart > REFERENCES_APART or waits:
        times = (_times(r, phases, "candidate_ms") for r in (other, record))
        direct = contrast(*times, paired=False)
        return direct and Share(*direct.speedup, paired=False)
    return Share(*ours.difference(bound).speedup, paired=True)


def _median(record: Record, phases: Phases, name: str) -> float:
    return float(np.median(_times(record, phases, name)))


def _times(record: Record, phases: Phases, name: str) -> list[float]:
    return getattr(trials(record, phases), name)


def reference_waits(record: Record, phases: Phases) -> bool:
    """Whether the profile saw the device idle in one of these phases of the reference."""
    profiled = (record.roofline or {}).get("reference", {})
    return any(profiled[p].label == "host-bound" for p in phases if p in profiled)
