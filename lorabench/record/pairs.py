"""Pairs of arms, made on reading from the arms of a folder: one record for each contrast that a design shows.

All arms of a family share their rounds, so any two of them can be held together. Two that had turns in one process are
paired in it, round by round. Two that sat apart are paired round by round between processes, and then the process is
what is independent (record/contrast.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown, nearest
from lorabench.record.schema import (
    ARMS,
    REFERENCE,
    TOTAL,
    ArmName,
    ArmRecord,
    Cost,
    Numerics,
    Record,
    Shown,
)  # fmt: skip

AGAINST = "against"  # the design of a record that shows an arm against one that was chosen on reading
ALONE = "the time was up before any other arm of the family; the reference's own times stand beside it"
ALWAYS = ("memory", "ranks", "roofline", "energy")  # what is known of an arm, whatever became of the other
Place = tuple[str, str, int]  # family, session and replicate


class Side(NamedTuple):
    """An arm, and its turns that are looked at: the round, the seat and the place in the arm's lists of each."""

    arm: ArmRecord
    turns: list[tuple[int, int, int]]

    @property
    def seats(self) -> set[int]:
        return {seat for _, seat, _ in self.turns}

    def of(self, times: Sequence[float]) -> list[float]:
        """These turns' of a number each turn of the arm."""
        return [times[place] for _, _, place in self.turns]


class Together(NamedTuple):
    """The turns of two arms that are held together. `processes`: how many of them each process made, in their order."""

    reference: Side
    candidate: Side
    pairing: Literal["paired", "turns", "abba"]
    processes: dict[Any, list[int]] | None


class Siblings:
    """The arms of one family in one session."""

    def __init__(self, arms: Iterable[ArmRecord]) -> None:
        self.arms = list({arm.arm: arm for arm in arms}.values())
        self.reference = next((arm for arm in self.arms if arm.role == "reference"), None)
        self.twin = next((arm for arm in self.arms if arm.role == "twin"), None)

    def stack(self, toggles: Iterable[str]) -> ArmRecord | None:
        """The arm with these toggles; one that is there to be held against its like only without that."""
        found = [arm for arm in self.arms if set(arm.toggles) == set(toggles)]
        return min(found, key=lambda arm: any(not shown.ablations for shown in arm.shown), default=None)

    def named(self, name: str) -> ArmRecord | None:
        """The arm of that name; or the one whose name or toggles have the same parts in another order."""
        parts = _parts(name)
        alike = [arm for arm in self.arms if parts in (_parts(arm.arm), frozenset(arm.toggles))]
        return next((arm for arm in self.arms if arm.arm == name), alike[0] if alike else None)

    def records(self, base: ArmRecord | None = None) -> list[Record]:
        """Every contrast that the designs show; or every arm over `base`, which stands alone where it failed."""
        if base is None:
            made = [(arm, shown) for arm in self.arms for shown in arm.shown if self._has(shown)]
            lone = self.reference if len(self.arms) == 1 and not made else None
            if lone and lone.status == "ok":
                return self._with_cost([self._alone(lone)], [lone])
        else:
            made = self._over_all(base)
        records = [self.record(arm, shown) for arm, shown in made]
        records += [floor for arm, shown in made if (floor := self._floor_between(arm, shown))]
        return self._with_cost(records, [arm for arm, _ in made])

    def record(self, candidate: ArmRecord, shown: Shown) -> Record:
        """A contrast of the candidate with the arm that it is held against."""
        reference = self.stack(shown.against)
        if candidate.status != "ok":
            return self._failed(candidate, reference, shown, candidate, "candidate")
        if reference is None or reference.status != "ok":
            return self._failed(candidate, reference, shown, reference, "reference")
        return self._measured(shown, reference, candidate, self._together(reference, candidate))

    def _has(self, shown: Shown) -> bool:
        """Whether there is something to hold it against. Another arm than the reference may wait for its turn, where
        the time was up: the row comes with it."""
        return self.reference is None or self.stack(shown.against) is not None

    def between(self, candidate: ArmRecord | None, reference: ArmRecord | None) -> Record | None:
        """Two arms of the family, whether a design shows their contrast or not. None where one was not measured, and of
        an arm against itself."""
        if not candidate or not reference or {candidate.status, reference.status} != {"ok"} or candidate is reference:
            return None
        shown = self._over(reference, candidate)
        return self._measured(shown, reference, candidate, self._together(reference, candidate))

    def _over_all(self, base: ArmRecord) -> list[tuple[ArmRecord, Shown]]:
        """Every arm over this one, and the noise floor, which belongs to every table of the family; a base that failed
        by itself."""
        if base.status != "ok":
            return [(base, self._over(base, base))]
        made = [(arm, self._over(base, arm)) for arm in self._others(base)]
        floors = self.twin.shown if self.twin and made else []
        return made + [(self.twin, shown) for shown in floors if self.twin and not shown.ablations]

    def _others(self, base: ArmRecord) -> list[ArmRecord]:
        """What was judged, or failed, of another stack than the base's; the twin adds nothing to the reference."""
        others = [a for a in self.arms if a is not self.twin and set(a.toggles) != set(base.toggles)]
        return [a for a in others if a.status != "ok" or self._numerics(a) or "numerics" not in kind(a.kind).carries]

    def _over(self, base: ArmRecord, arm: ArmRecord) -> Shown:
        """The arm is called what it is called over the reference: what it has more than the base is half of it."""
        key = _key(arm.family, *sorted(arm.toggles), AGAINST, *sorted(base.toggles))
        return Shown(key=key, design=AGAINST, rung=None, ablations=[arm.arm], against=base.toggles)

    def _floor_between(self, arm: ArmRecord, shown: Shown) -> Record | None:
        """The noise floor between processes: the twin's own seats over the reference in the seat that both share."""
        if arm is not self.twin or shown.ablations or not self.reference or self.reference.status != "ok":
            return None
        own = self._own_seats(arm)
        if not own.turns or own.seats == _side(arm).seats:  # without a shared seat the twin's record is that floor
            return None
        shown = shown.model_copy(update={"key": _key(shown.key, "between seats")})
        return self._measured(shown, self.reference, arm, _apart(_side(self.reference), own))

    def _own_seats(self, arm: ArmRecord) -> Side:
        """The arm's turns outside the reference's seats."""
        shared = set(self.reference.seats) if self.reference else set()
        return Side(arm, [turn for turn in _side(arm).turns if turn[1] not in shared])

    def _together(self, reference: ArmRecord, candidate: ArmRecord) -> Together:
        sides = _side(reference), _side(candidate)
        common = {turn[:2] for turn in sides[0].turns} & {turn[:2] for turn in sides[1].turns}
        if common:
            first, second = (Side(side.arm, [t for t in side.turns if t[:2] in common]) for side in sides)
            return Together(first, second, "paired", None)
        if set(reference.toggles) == set(candidate.toggles):
            return _apart(*sides)
        return _apart(self._spread(sides[0]), self._spread(sides[1]))

    def _spread(self, side: Side) -> Side:
        """The turns that stand for an arm beside one that sat apart. Those of the reference's stack are in the twin's
        own seats, where it has several: one process says nothing of how far processes differ."""
        if self.twin is None or set(side.arm.toggles) != set(self.twin.toggles):
            return side
        return max(side, self._own_seats(self.twin), key=lambda one: len(one.seats))

    def _measured(self, shown: Shown, reference: ArmRecord, candidate: ArmRecord, found: Together) -> Record:
        both: dict[ArmName, ArmRecord] = {"reference": reference, "candidate": candidate}
        return Record(
            **_contents(shown, candidate), **_of_both(both, (*ALWAYS, "tokens", "jobs")), status="ok",
            pairing=found.pairing, processes=found.processes, applied=candidate.applied or {},
            phases=_phases({"reference": found.reference, "candidate": found.candidate}),
            notes=_notes(candidate, both), numerics=self._numerics(candidate), telemetry=candidate.telemetry,
        )  # fmt: skip

    def _numerics(self, arm: ArmRecord) -> Numerics | None:
        """Of the arm; the reference and its twin are one stack, so what was found of either holds for both."""
        alike = (other.numerics for other in self.arms if set(other.toggles) == set(arm.toggles))
        return arm.numerics or next((found for found in alike if found), None)

    def _failed(
        self, candidate: ArmRecord, reference: ArmRecord | None, shown: Shown, failed: ArmRecord | None, name: ArmName
    ) -> Record:
        """Out of memory is a result: the other arm's times stand in the record."""
        if failed is None:
            status, reason = "crash", "the arm that it is held against has no record in this session"
            return Record(**_contents(shown, candidate), status=status, reason=reason, arm="reference")
        both: dict[ArmName, ArmRecord] = {
            arm: own for arm, own in zip(ARMS, (reference, candidate), strict=True) if own
        }
        ok: dict[ArmName, Side] = {arm: _side(own) for arm, own in both.items() if own.status == "ok"}
        times: dict[str, Any] = {}
        if failed.status == "oom" and ok:
            times = {"phases": _phases(ok), "pairing": "paired", **_of_both(both, ("tokens",))}
        return Record(
            **_contents(shown, candidate), **times, **_of_both(both, ALWAYS), status=failed.status,
            reason=failed.reason, arm=name, rank=failed.rank, notes=_notes(candidate, both), numerics=failed.numerics,
            telemetry=candidate.telemetry, log=failed.log,
        )  # fmt: skip

    def _alone(self, reference: ArmRecord) -> Record:
        """Of a reference that no other arm was measured beside: its times are not lost."""
        shown = Shown(
            key=_key(reference.family, AGAINST), design=AGAINST, rung=None, ablations=[], against=reference.toggles
        )
        both: dict[ArmName, ArmRecord] = {"reference": reference}
        return Record(
            **_contents(shown, reference), **_of_both(both, (*ALWAYS, "tokens")), status="timeout", reason=ALONE,
            arm="candidate", phases=_phases({"reference": _side(reference)}), pairing="paired",
            notes=_notes(reference, both), telemetry=reference.telemetry,
        )  # fmt: skip

    def _with_cost(self, records: list[Record], arms: Sequence[ArmRecord]) -> list[Record]:
        """Each arm's cost in the first of its records. What arms cost that have none (the reference above all) stands
        in the twin's, or else in the first: so the costs of all records add up to those of all arms."""
        if not records:
            return records
        first = {arm.arm: place for place, arm in reversed([*enumerate(arms)])}
        rest = first.get(self.twin.arm, 0) if self.twin else 0
        for arm in self.arms:
            record = records[first.get(arm.arm, rest)]
            record.cost = _sum(record.cost, arm.cost)
        return records


def _notes(candidate: ArmRecord, both: Mapping[ArmName, ArmRecord]) -> dict[str, Any]:
    """What the toggles say, and what the kind says of each arm, by its name."""
    return candidate.notes | {name: arm.said for name, arm in both.items() if arm.said}


def by_place(arms: Iterable[ArmRecord]) -> dict[Place, Siblings]:
    """The arms that were measured together, in the order of first appearance."""
    found: dict[Place, list[ArmRecord]] = {}
    for arm in arms:
        found.setdefault(place_of(arm), []).append(arm)
    return {place: Siblings(own) for place, own in found.items()}


def place_of(one: ArmRecord | Record) -> Place:
    return one.family, one.session, one.replicate


def pairs(arms: Iterable[ArmRecord], against: str | None = None) -> list[Record]:
    """The pair records of these arms, of any number of families and sessions.

    against: the name of an arm that all others of its family are held against, in place of what the designs show. A
    family without such an arm has no records then. Raises NameUnknown (a ValueError) where no family has it.
    """
    families = by_place(arms).values()
    if against in (None, REFERENCE):
        return [record for family in families for record in family.records()]
    named = [(family, arm) for family in families if (arm := family.named(against))]
    if not named:
        raise nearest("arm", against, {REFERENCE, *(arm.arm for family in families for arm in family.arms)})
    if all(arm is family.twin for family, arm in named):
        why = "it is the reference once more, over which a report without against= shows every arm"
    elif all(arm.status != "ok" for _, arm in named):
        why = f"it is {named[0][1].status}: {named[0][1].reason}"
    elif made := [record for family, arm in named for record in family.records(arm)]:
        return made
    elif sum(arm.status == "ok" for family, _ in named for arm in family.arms) > len(named):
        why = "records of schemas 1 and 2 are pairs, whose reference was not judged"
    else:
        why = "no other arm was measured beside it"
    raise NameUnknown(f"nothing can be held against {against!r}: {why}")


def _parts(name: str) -> frozenset[str]:
    return frozenset(part.strip() for part in name.split(" + "))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _side(arm: ArmRecord) -> Side:
    """All turns of an arm, in the order of the rounds."""
    return Side(arm, sorted(zip(arm.rounds, arm.seats, range(len(arm.rounds)), strict=True)))


def _apart(reference: Side, candidate: Side) -> Together:
    """Round by round between seats, ordered by the process that each pair of turns is of. Two arms that were never in
    one round are two lists, each by its own processes."""
    of = [{number: (number, seat, place) for number, seat, place in side.turns} for side in (reference, candidate)]
    rounds = sorted(of[0].keys() & of[1].keys(), key=lambda n: (of[1][n][1], of[0][n][1], n))
    if not rounds:
        first, second = (Side(arm, sorted(turns, key=lambda turn: turn[1])) for arm, turns in (reference, candidate))
        sizes = {arm: _sizes(t[1] for t in side.turns) for arm, side in zip(ARMS, (first, second), strict=True)}
        return Together(first, second, "abba", sizes)
    first, second = (
        Side(side.arm, [own[n] for n in rounds]) for side, own in zip((reference, candidate), of, strict=True)
    )
    sizes = _sizes((of[1][n][1], of[0][n][1]) for n in rounds)
    processes = {
        arm: sizes if len(side.seats) > 1 else [len(rounds)] for arm, side in zip(ARMS, (first, second), strict=True)
    }
    return Together(first, second, "turns", processes)


def _sizes(seats: Iterable[Any]) -> list[int]:
    return list(Counter(seats).values())


def _contents(shown: Shown, candidate: ArmRecord) -> dict[str, Any]:
    """What a record says of the cell that it is of."""
    names = ("family", "session", "replicate", "kind", "model", "workload")
    return shown.model_dump() | {name: getattr(candidate, name) for name in names} | {"candidate": candidate.toggles}


def _phases(sides: Mapping[ArmName, Side]) -> dict[str, Any]:
    """The phases that every arm here has, and those that an arm may do without; and over all of these the total of each
    arm, turn by turn."""
    of_kind = kind(next(iter(sides.values())).arm.kind)
    has = [side.arm.phases.keys() for side in sides.values()]
    own = [p for p in of_kind.phases if (any if p in of_kind.optional else all)(p in phases for phases in has)]
    made = {p: {arm: side.of(ms) for arm, side in sides.items() if (ms := side.arm.phases.get(p))} for p in own}
    return made | {TOTAL: {arm: side.of(ms) for arm, side in sides.items() if (ms := side.arm.totals(own))}}


def _of_both(arms: Mapping[ArmName, ArmRecord], names: Sequence[str]) -> dict[str, Any]:
    """What the arms say, as far as they do."""
    return {
        name: {arm: value for arm, own in arms.items() if (value := getattr(own, name)) is not None} for name in names
    }


def _sum(one: Cost | None, other: Cost | None) -> Cost | None:
    if one is None or other is None:
        return one or other
    return Cost(**{part: getattr(one, part) + getattr(other, part) for part in Cost.model_fields})
