"""What the records say: of each family how its arms compare, and of the contenders which help and what they make
together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from lorabench.advice.expected import Toggles
from lorabench.contract.ablation import combine, conflict
from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.record.contrast import Speedup, contrast_of
from lorabench.record.pairs import Siblings, by_place
from lorabench.record.schema import TOTAL, ArmRecord, Record
from lorabench.record.stats import MIN_FLOOR, MIN_TRIALS_FOR_VERDICT, without_figure
from lorabench.report.analysis import Analysis, Row, Session
from lorabench.report.paste import apart, found_size

ALONE, TOGETHER, DECIDING = "solo", "together", "deciding"  # the designs of the families' cells
Labels = frozenset[str]  # of all toggles of an arm
RIVALS = 2  # of the best, that more rounds are spent on
MATTERS = 0.02  # of a step's time: what may be better by less is no reason to measure on
ON_TOP = 0.05  # that what is unclear alone has to bring: two arms alike on a busy host were seen to differ by 0.04
WHOLES = 3  # that are measured: the one around the best, and those around others that are nearly as fast
NEARLY = 1.25  # times as fast alone: who is ahead by more has the better whole, too, as far as can be guessed


def named(toggles: Toggles) -> str:
    return " + ".join(t.label for t in toggles)


@dataclass(frozen=True)
class Question:
    """`itself`: the reference against itself. `contenders`: the best first, by what is expected of them. `in_need`:
    those that are tried only where the reference does not fit, or where the samples of a step do not at once. `size`:
    of the model, in parameters. `rounds`: of the contenders alone; more go to what decides."""

    itself: Cell
    contenders: Sequence[Toggles]
    machine: Machine
    size: int
    in_need: Sequence[Toggles] = ()
    rounds: int = 12

    def cell(self, toggles: Toggles, design: str = ALONE, ground: Toggles = ()) -> Cell:
        """These toggles on top of the reference with `ground`."""
        reference = tuple(combine(self.itself.reference, ground))
        own = tuple(t for t in toggles if t not in ground)
        candidate = tuple(combine(reference, own))
        return replace(self.itself, design=design, reference=reference, candidate=candidate, toggles=own)

    def labels(self, toggles: Toggles) -> Labels:
        return frozenset(t.label for t in combine(self.itself.reference, toggles))

    @cached_property
    def keys(self) -> set[str]:
        """Of cells by which a family of this question is known."""
        grounds = [(), *self.contenders]
        designs = (ALONE, TOGETHER, DECIDING)
        own = {self.cell((), design, ground).key for design in designs for ground in grounds}
        return own | {self.cell(toggles).key for toggles in self.contenders}


class Told:
    """One family, as it was measured."""

    def __init__(self, siblings: Siblings, sessions: Sequence[Session], fewest: int) -> None:
        """`fewest`: rounds of an arm that was not cut short."""
        self._siblings, self._sessions, self._fewest = siblings, sessions, fewest
        self.arms = {frozenset(arm.toggles): arm for arm in siblings.arms if arm.role != "twin"}
        self.reference = siblings.reference
        self.design = next((one.design for arm in siblings.arms for one in arm.shown), "")

    @cached_property
    def analysis(self) -> Analysis:
        """Of this family alone: what the same arms did in another is no part of its numbers."""
        return Analysis(self._siblings.records(), self._sessions, arms=self._siblings.arms)

    def record(self, labels: Labels) -> Record | None:
        """An arm over the family's reference."""
        return next((r for r in self.analysis.records if r.ablations and frozenset(r.candidate) == labels), None)

    def row(self, record: Record) -> Row:
        return self.analysis.row(record)

    def finished(self, labels: Labels) -> bool:
        """Whether it is known what becomes of the arm."""
        arm = self.arms.get(labels)
        return arm is not None and (arm.status != "ok" or self.rounds(labels) >= self._fewest)

    def rounds(self, labels: Labels) -> int:
        return len(self.arms[labels].rounds)

    def measured(self, labels: Labels) -> bool:
        return self.finished(labels) and self.arms[labels].status == "ok"

    def ms(self, labels: Labels) -> float:
        return statistics.median(self.arms[labels].totals())

    @property
    def floor(self) -> float:
        """The noise floor: how far from itself the reference may be, as a share."""
        twin = next((r for r in self.analysis.records if r.is_noise_floor and r.status == "ok"), None)
        return self.row(twin)["noise_floor"] if twin else MIN_FLOOR

    def beside(self, arm: Labels, other: Labels) -> Speedup | None:
        """How many times as fast an arm is as another."""
        found = self._siblings.between(self.arms.get(arm), self.arms.get(other))
        contrast = found and contrast_of(found, (TOTAL,))
        return contrast and contrast.speedup

    def best(self, stacks: Mapping[Labels, Toggles]) -> tuple[Labels, list[Labels]]:
        """(the best of these arms, else the reference; others that may be better by what matters, as far as the rounds
        tell, the fastest first). Of the fastest and those that are level with it the best has fewest toggles."""
        assert self.reference
        base = frozenset(self.reference.toggles)
        tried = [labels for labels in stacks if labels != base and self.measured(labels)]
        fastest = min([labels for labels in tried if self.helps(labels)] or [base], key=self.ms)
        level = [labels for labels in tried if self.helps(labels) and self._level(fastest, labels)]
        chosen = min([fastest, *level], key=lambda labels: (len(stacks.get(labels, ())), self.ms(labels)))
        others = [labels for labels in tried if labels != chosen and self._may_be_better(labels, chosen)]
        return chosen, sorted(others, key=self.ms)

    def helps(self, labels: Labels) -> bool:
        """Whether an arm fits where the reference does not, or is clearly faster."""
        record = self.record(labels)
        return bool(record) and (makes_it_fit(record) or self.row(record)["verdict"] == "faster")

    def _level(self, arm: Labels, other: Labels) -> bool:
        """Whether an arm is not clearly faster than another, and in the middle by no more than what matters: a wide
        interval alone does not make a slow arm as good as a fast one."""
        found = self.beside(arm, other)
        if found is None:
            return True
        return found.centre <= self.enough and (found.low <= 1 or found.high <= 1 + self.floor)

    def clearly_faster(self, arm: Labels, than: Labels) -> bool:
        """By more than two arms alike may be apart, in rounds that both have."""
        found = self.measured(arm) and self.measured(than) and self.beside(arm, than)
        return bool(found) and found.low > 1 and found.centre > 1 + max(ON_TOP, self.floor)

    def _may_be_better(self, arm: Labels, than: Labels) -> bool:
        found = self.beside(arm, than)
        return found is not None and found.high > self.enough

    @property
    def enough(self) -> float:
        """Times as fast that matter."""
        return 1 + max(MATTERS, self.floor)


def _promising(row: Any) -> bool:
    """Whether it may well help, and the rounds or the noise do not let that be said."""
    return without_figure(row["verdict"]) and row[f"{TOTAL}_low"] > 1 and row[f"{TOTAL}_speedup"] > 1 + MATTERS


def makes_it_fit(record: Record) -> bool:
    """Whether the reference ran out of memory and the candidate did not."""
    return record.status == "oom" and record.arm == "reference" and bool(record.ms("candidate"))


class Choice(NamedTuple):
    """What to switch on, and the family that says so; without toggles: nothing."""

    toggles: Toggles
    told: Told | None


@dataclass
class Known:
    """All that is known of a question. `lost`: the arms that were ended by their time in this run, each with what is
    known of it; they are not tried again. `seated`: those that still sit, of the family before."""

    question: Question
    arms: Iterable[ArmRecord]
    sessions: Sequence[Session] = ()
    lost: Mapping[Labels, str] = field(default_factory=dict)
    seated: frozenset[Labels] = frozenset()

    @cached_property
    def families(self) -> list[Told]:
        keys = self.question.keys
        own = [s for s in by_place(self.arms).values() if any(one.key in keys for arm in s.arms for one in arm.shown)]
        fewest = min(MIN_TRIALS_FOR_VERDICT, self.question.rounds)
        return [Told(siblings, self.sessions, fewest) for siblings in own]

    @property
    def base(self) -> Labels:
        return self.question.labels(())

    @cached_property
    def reference(self) -> ArmRecord | None:
        """The user's reference, in the last family that has it."""
        found = [told.arms[self.base] for told in self.families if told.finished(self.base)]
        return next((arm for arm in reversed(found) if arm.status == "ok"), found[-1] if found else None)

    @property
    def fits(self) -> bool:
        """Whether the reference fits the device, as far as is known."""
        return self.reference is None or self.reference.status != "oom"

    @property
    def wanted(self) -> list[Toggles]:
        return [c for c in self.question.contenders if not self.fits or c not in self.question.in_need]

    @property
    def untried(self) -> list[Toggles]:
        return [toggles for toggles in self.wanted if self.alone(toggles) is None]

    @property
    def measurable(self) -> list[Toggles]:
        """The untried that were not ended by their time."""
        return [toggles for toggles in self.untried if self.question.labels(toggles) not in self.lost]

    def alone(self, toggles: Toggles) -> Told | None:
        """The family in which it was held, alone, against the user's reference; of several that with most rounds."""
        labels = self.question.labels(toggles)
        own = [t for t in self.families if t.reference and frozenset(t.reference.toggles) == self.base]
        found = [told for told in own if told.finished(labels)]
        measured = [told for told in found if told.measured(labels)]
        return max(measured, key=lambda told: told.rounds(labels), default=found[-1] if found else None)

    def record(self, toggles: Toggles) -> Record | None:
        """A contender alone."""
        told = self.alone(toggles)
        return told and told.record(self.question.labels(toggles))

    @cached_property
    def _each_alone(self) -> list[tuple[Toggles, Told, Record]]:
        """Each that is wanted and was held alone, with that family and its record."""
        held = [(toggles, told) for toggles in self.wanted if (told := self.alone(toggles))]
        made = [(toggles, told, told.record(self.question.labels(toggles))) for toggles, told in held]
        return [(toggles, told, record) for toggles, told, record in made if record]

    @cached_property
    def ranked(self) -> list[Toggles]:
        """Those that help alone, as far as is known, the best first. Where the reference does not fit, those that make
        it fit, and after them whatever ran out of memory alone."""
        ranks: list[tuple[tuple[int, float], int]] = []
        for place, (_, told, record) in enumerate(self._each_alone):
            row: Any = told.row(record)
            if makes_it_fit(record):
                ranks.append(((0, row[f"{TOTAL}_candidate_ms"]), place))
            elif record.status == "oom" and not self.fits:
                ranks.append(((2, 0.0), place))
            elif record.status == "ok" and (row["verdict"] == "faster" or _promising(row)):
                ranks.append(((1, 1 / row[f"{TOTAL}_speedup"]), place))
        some = any(rank < 2 for (rank, _), _ in ranks)
        return [self._each_alone[place][0] for _, place in sorted(ranks)] if some else []

    @property
    def unclear(self) -> list[Toggles]:
        """Those beside all wholes that may help by what matters and do not show it alone."""
        found = []
        for toggles, told, record in self._each_alone:
            row: Any = told.row(record)
            may = record.status == "ok" and row["verdict"] == "unclear" and row[f"{TOTAL}_high"] > told.enough
            if may and not self._in_a_whole(toggles):
                found.append(toggles)
        return found if self.fits else []

    @property
    def undecided(self) -> list[Toggles]:
        """The unclear of which more rounds alone may tell; each is asked once more, or no answer would ever be the
        last."""
        labels = {toggles: self.question.labels(toggles) for toggles in self.unclear}
        alone = [told for told in self.families if told.design == ALONE]
        return [toggles for toggles, own in labels.items() if sum(told.measured(own) for told in alone) == 1]

    def _put_together(self, order: Iterable[Toggles]) -> tuple[list[Toggles], dict[Toggles, str]]:
        """(those that can be on together, each taken in its turn; the others, with the reason)."""
        members: list[Toggles] = []
        passed: dict[Toggles, str] = {}
        for toggles in dict.fromkeys(order):
            slots = {t.slot for t in toggles}
            together = combine(self.question.itself.reference, [t for own in (*members, toggles) for t in own])
            if rival := next((own for own in members if slots & {t.slot for t in own}), None):
                passed[toggles] = f"{named(rival)}, which fills the same slot, was better"
            elif reason := conflict(together) or apart(together):
                passed[toggles] = reason
            else:
                members.append(toggles)
        return members, passed

    @cached_property
    def wholes(self) -> list[list[Toggles]]:
        """The members of each whole. The first has the best of each slot that can be on together, the best first. Each
        of the others has one at its head that cannot be on with a member of the first, and is nearly as fast alone:
        with others it may be faster. What was measured stays one, whatever more rounds say of its head alone."""
        found = [self.members]
        ground = [] if self.fits else self.members[:1]
        for toggles in self.ranked:
            members, _ = self._put_together([*ground, toggles, *self.ranked])
            rival = next((one for one in self.members if one not in members), None)
            stays = len(members) > 1 and self._finished(joined(members))
            if rival and (stays or self._nearly(toggles, rival)) and set(members) not in map(set, found):
                found.append(members)
        return found[:WHOLES]

    def _nearly(self, toggles: Toggles, rival: Toggles) -> bool:
        """Whether a contender is nearly as fast alone as a better one, or may be: by the rounds that they share, else
        by their times. Of what ran out of memory alone nothing is known."""
        labels, better = self.question.labels(toggles), self.question.labels(rival)
        shared = [found for told in self.families if (found := told.beside(better, labels))]
        if shared:
            return shared[-1].low <= 1 or shared[-1].centre <= NEARLY
        own, other = self.alone(toggles), self.alone(rival)
        if not own or not other or not own.measured(labels) or not other.measured(better):
            return True
        return own.ms(labels) <= NEARLY * other.ms(better)

    @cached_property
    def _first(self) -> tuple[list[Toggles], dict[Toggles, str]]:
        return self._put_together(self.ranked)

    @property
    def members(self) -> list[Toggles]:
        """Of the first whole."""
        return self._first[0]

    def _in_a_whole(self, toggles: Toggles) -> bool:
        return any(toggles in members for members in self.wholes)

    @property
    def around(self) -> list[Toggles]:
        """The members of the whole that has what is chosen."""
        return max(self.wholes, key=lambda members: len({*joined(members)} & {*self.choice.toggles}))

    @property
    def passed_over(self) -> dict[Toggles, str]:
        """Those that help alone and cannot be on with a better one: why. Not those of another whole: they were not
        passed over."""
        return {toggles: why for toggles, why in self._first[1].items() if not self._in_a_whole(toggles)}

    @property
    def ground(self) -> Toggles:
        """What the others are put on: nothing, or what makes the reference fit."""
        return () if self.fits or not self.members else self.members[0]

    @property
    def stacks(self) -> list[Toggles]:
        """What is measured together, in the order in which it is worth knowing: the best alone, each whole, with the
        unclear and with more room on top, the heads of the others, each whole without each member, and the best two of
        each, the best three, and so on."""
        roomier = [[*own, saving] for own in self.wholes for saving in self._saving(own)]
        heads = [own[:1] for own in self.wholes[1:]]
        without = [[[m for m in own if m is not one] for one in own if one != self.ground] for own in self.wholes]
        in_turns = [own for turn in zip_longest(*without, fillvalue=[]) for own in turn]
        grown = [own[:n] for own in self.wholes for n in range(2, len(own))]
        more = map(joined, (*roomier, *heads, *in_turns, *grown))
        found = {self.question.labels(stack): stack for stack in (*self.foremost, *more) if stack}
        return list(found.values())

    @property
    def foremost(self) -> list[Toggles]:
        """The best alone, the wholes, and these with the unclear: what the others are worth little without."""
        every = map(joined, (*(own[:1] for own in self.wholes[:1]), *self.wholes, *self._enriched))
        return list({self.question.labels(stack): stack for stack in every if stack}.values())

    @cached_property
    def _richer(self) -> list[tuple[list[Toggles], list[Toggles]]]:
        """Each whole, and it with the unclear on top: a gain that drowns alone in a step that waits for its host may
        be seen where the others are on."""
        unclear = self.unclear
        found = [(own, self._put_together([*own, *unclear])[0]) for own in self.wholes if own]
        return [(own, more) for own, more in found if len(more) > len(own)]

    @property
    def _enriched(self) -> list[list[Toggles]]:
        return [more for _, more in self._richer]

    def _unproven(self, told: Told) -> list[Labels]:
        """The wholes with the unclear on top that a family does not show to be faster than without: they have more
        toggles, of which none was worth it alone."""
        pairs = [(self.question.labels(joined(own)), self.question.labels(joined(more))) for own, more in self._richer]
        return [more for own, more in pairs if not told.clearly_faster(more, own)]

    def _saving(self, members: Sequence[Toggles]) -> list[Toggles]:
        """What saves memory and may go with a whole, where the whole has a toggle that found room for fewer samples
        than a step has: with more room a step may be faster."""
        count = self.question.itself.workload.count
        found = ((own, self.record(own)) for own in members)
        sizes = [found_size(own, record.notes) for own, record in found if record and record.status == "ok"]
        if not self.fits or not any(size and size < count for size in sizes):
            return []
        reference, whole = self.question.itself.reference, joined(members)
        filled = {toggle.slot for toggle in whole}
        free = [own for own in self.question.in_need if filled.isdisjoint(toggle.slot for toggle in own)]
        return [
            own for own in free if not conflict(together := combine(reference, [*whole, *own])) and not apart(together)
        ]

    def with_more_room(self, toggles: Toggles) -> Speedup | None:
        """What saves memory, on top of the whole; None where that was not measured."""
        told, labels, whole = self.deciding, self.question.labels, joined(self.around)
        if told is None or toggles not in self._saving(self.around):
            return None
        return told.beside(labels((*whole, *toggles)), labels(whole))

    @property
    def to_put_together(self) -> list[Toggles]:
        """The wholes that were not measured, with the unclear and with more room, too."""
        wanted = [joined(own) for own in (*self.wholes, *self._enriched) if len(own) > 1]
        wanted += [joined((*own, saving)) for own in self.wholes for saving in self._saving(own)]
        return [whole for whole in wanted if not self._finished(whole)]

    def _finished(self, stack: Toggles) -> bool:
        labels = self.question.labels(stack)
        return labels in self.lost or any(told.finished(labels) for told in self.families)

    @cached_property
    def deciding(self) -> Told | None:
        """The family that decides: the last of stacks, where a best one is still that of its time; else the best's own,
        or the last in which the reference was measured."""
        later = [t for t in self.families if t.design != ALONE and t.reference and t.reference.status == "ok"]
        best = [self.question.labels(joined(part)) for own in self.wholes for part in (own[:1], own)]
        if later and (not self.members or any(told.measured(one) for told in later for one in best)):
            return later[-1]
        if self.members:
            return self.alone(self.members[0])
        return next((told for told in reversed(self.families) if told.measured(self.base)), None)

    @cached_property
    def _decided(self) -> tuple[Choice, list[Toggles]]:
        """(what to switch on; it and those of which more rounds would tell whether they are better, if any)."""
        told = self.deciding
        if told is None or told.reference is None:
            return Choice((), None), []
        own = {self.question.labels(s): s for s in (*self.stacks, *self.wanted, self.ground)}
        unproven = self._unproven(told)
        own = {labels: stack for labels, stack in own.items() if labels not in unproven}
        if not any(map(told.measured, own)):
            return Choice((), None), []
        labels, others = told.best(own)
        contested = [own[one] for one in (labels, *others[:RIVALS])] if others else []
        if own[labels] or not self.members:
            return Choice(own[labels], told), contested
        best, alone = self.members[0], self.alone(self.members[0])
        helps = alone and alone.helps(self.question.labels(best))
        return (Choice(best, alone) if helps else Choice((), told)), contested

    @property
    def choice(self) -> Choice:
        return self._decided[0]

    @property
    def contested(self) -> list[Toggles]:
        return self._decided[1]


def joined(contenders: Iterable[Toggles]) -> Toggles:
    return tuple(toggle for toggles in contenders for toggle in toggles)
