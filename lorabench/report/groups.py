"""Records that stand in one table: of one model, workload, kind and reference.

The least work of a kind (a record that is no candidate) stands with the rows that it bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from lorabench.contract.kind import kind
from lorabench.record.pairs import REFERENCE
from lorabench.record.schema import Record


class Group(NamedTuple):
    """Records of one table. `kind` is that of its candidates."""

    title: str
    kind: Any
    records: list[Record]


def groups(records: Sequence[Record], against: str | None = None, devices: Sequence[str] = ()) -> list[Group]:
    """Groups in order of first appearance: `model @ workload`, the kind where there are several, and against which
    reference where the sweep had several (each has an A/A record of its own), or where one was chosen. devices: of each
    record; where there are several, a group has one."""
    chosen = f", against {against}" if against not in (None, REFERENCE) else ""
    found: list[Group] = []
    several = len(set(devices)) > 1
    for (model, workload, device), together in _alike(records, devices).items():
        homes, where = home_kinds(together), f", on {device or 'an unknown machine'}"
        kinds = list(dict.fromkeys(homes))
        for name in kinds:
            own = [r for r, home in zip(together, homes, strict=True) if home == name]
            suffix = (f", {name}" if len(kinds) > 1 else "") + (where if several else "")
            found += _by_reference(f"{model} @ {workload}{suffix}{chosen}", name, own)
    return found


def _alike(records: Sequence[Record], devices: Sequence[str]) -> dict[tuple[str, str, str], list[Record]]:
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record, device in zip(records, devices or [""] * len(records), strict=True):
        found.setdefault((record.model, record.workload, device), []).append(record)
    return found


def home_kinds(members: Sequence[Record]) -> list[str]:
    """Of records of one model and workload, the kind in whose table each stands: its own; of one that is no candidate,
    the first kind that has all its phases, of the same reference if there is one."""
    candidates: dict[str, set[frozenset[str]]] = {}
    for record in members:
        if record.is_candidate:
            candidates.setdefault(record.kind, set()).add(frozenset(record.reference))
    return [r.kind if r.is_candidate else _bounded_kind(r, candidates) for r in members]


def _bounded_kind(record: Record, candidates: dict[str, set[frozenset[str]]]) -> str:
    own = set(kind(record.kind).phases)
    fitting = [name for name in candidates if own <= set(kind(name).phases)]
    same = [name for name in fitting if frozenset(record.reference) in candidates[name]]
    return next(iter([*same, *fitting]), record.kind)


def _by_reference(title: str, name: str, members: list[Record]) -> list[Group]:
    bases = list(dict.fromkeys(tuple(r.reference) for r in members if r.is_noise_floor))
    titled: dict[str, list[Record]] = {}
    for record in members:
        titled.setdefault(f"{title}{_against(record, bases)}", []).append(record)
    return [Group(full, kind(name), own) for full, own in titled.items()]


def _against(record: Record, bases: Sequence[tuple[str, ...]]) -> str:
    """Which of several references is the record's: by the toggles that tell them apart. '' where there is but one."""
    if len(bases) < 2:
        return ""
    own = set(record.reference)  # leave-one-out adds toggles to it: then the one most like it
    base = max(bases, key=lambda base: (set(base) == own, len(own & set(base))))
    apart = [t for t in dict.fromkeys(itertools.chain(*bases)) if not all(t in b for b in bases)]
    has = [t for t in apart if t in base]
    return f", reference {'with' if has else 'without'} {' + '.join(has or apart)}"


class Home(NamedTuple):
    """What a record's noise floor has to have in common with it."""

    model: str
    workload: str
    kind: str
    device: str = ""


def homes(records: Sequence[Record], devices: Sequence[str]) -> dict[int, Home]:
    """id(record) → its home, for all records of a folder."""
    return {
        id(record): Home(model, workload, name, device)
        for (model, workload, device), members in _alike(records, devices).items()
        for record, name in zip(members, home_kinds(members), strict=True)
    }
