"""The search: which family to measure next, from the records so far and the seconds that are left.

First every contender alone, in a second family those for which the first had no time; then the best of each slot put
together, each stack and what it is without each member, in one family: gains do not multiply. Where two that are nearly
as good cannot be on together, there is a whole around each. Then more rounds, where the two best cannot be told apart,
and where a contender may help and does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lorabench.advice.budget import Pace
from lorabench.advice.expected import Toggles, slow
from lorabench.advice.known import ALONE, DECIDING, TOGETHER, Known, named
from lorabench.contract.family import Family
from lorabench.plan.design import refusal
from lorabench.record.stats import MIN_TRIALS_FOR_VERDICT

# Of the time: no contender is seated alone after SEATED of it, and those that are slow to start are only among them
# where all are expected to be seated after SLOWLY.
SEATED, SLOWLY = 0.5, 0.25
SEAT_SHARE, SEAT_LEAST_S = 0.25, 20.0  # that one candidate may take to be seated: what hangs must leave time for others
SOONER = 0.5  # of what is expected, until a stack of toggles that have run has its rounds: 0.55 was seen on an H200
FEWEST, MOST = MIN_TRIALS_FOR_VERDICT + 2, 300  # rounds of a family: more of them would decide nothing
LEAST_S = 1.0  # in less nothing can be begun
OFTEN = 3  # families that decide between the same stacks


class Step(NamedTuple):
    """A family; how many rounds it has, by the seconds that are left when its arms are seated and those that a round
    takes; and in seconds from now until when candidates are seated."""

    family: Family
    rounds: Callable[[float, float], int]
    seat_by: float


def following(known: Known, left: float, first: bool) -> Step | None:
    """What to measure next; None where every question has its answer, or what is left is too little. `left`: seconds;
    `first`: whether nothing was measured in this run."""
    if (known.reference and known.reference.status not in ("ok", "oom")) or left < LEAST_S:
        return None
    if first and (known.untried or known.reference is None):
        return _alone_first(known, left)
    return (
        _left_over(known, left)
        or _together(known, left)
        or _decided(known, left)
        or _one_more(known, left)
        or _sharper(known, left)
    )


def _alone_first(known: Known, left: float) -> Step:
    """All that start quickly, and of the others as many as are expected to be seated in time."""
    own, pace = known.question, Pace(known)
    free = [c for c in known.untried if refusal(own.cell(c), own.machine)]  # a record with the reason, and no time
    measured: list[Toggles] = []
    for toggles in known.untried:
        if toggles in free:
            continue
        if not slow(toggles, own.size) or pace.seconds([*measured, toggles], 0) <= SLOWLY * left:
            measured.append(toggles)

    fewest = sum(sorted(map(pace.start, measured))[:2]) / pace.starts(measured)  # stacks beside who sits then

    def rounds(then: float, one: float) -> int:
        """As many as asked for where that leaves time for two stacks; else all that there is."""
        spare = then - (own.rounds + FEWEST) * one - fewest * (left - then)
        return own.rounds if spare >= 0 else _all(then, one)

    return Step(_family(known, [*measured, *free], ALONE), rounds, SEATED * left)


def _left_over(known: Known, left: float) -> Step | None:
    """Contenders for which there was no time before, as many as are expected to leave some for stacks."""
    pace, chosen = Pace(known), list[Toggles]()
    reserved = pace.seconds(known.foremost, FEWEST) if known.members else 0.0
    for toggles in known.measurable:
        if known.members and toggles in known.question.in_need:  # a reference that does not fit has a way to fit
            continue
        if pace.rounds([*chosen, toggles], left - reserved) >= FEWEST:
            chosen.append(toggles)
    if not chosen:
        return None

    def rounds(then: float, one: float) -> int:
        """As many as the others had, where that leaves time for stacks; else all that there is."""
        spare = _all(then - reserved, one)
        return min(known.question.rounds, spare) if spare >= FEWEST else _all(then, one)

    return Step(_family(known, chosen, ALONE), rounds, left)


def _together(known: Known, left: float) -> Step | None:
    """The stacks, in their order, as many as are seated while there is time for their rounds, which may be more than
    expected: a stack of toggles that have run starts sooner than they did. Fewer than two tell nothing."""
    stacks, pace = known.stacks, Pace(known)
    if not known.to_put_together or pace.rounds(stacks[:2], left) < FEWEST:
        return None
    surely = pace.starts(stacks[:2])
    while len(stacks) > 2 and max(surely, SOONER * pace.starts(stacks)) + pace.turns(stacks, FEWEST) > left:
        stacks.pop()
    reserved = min((pace.seconds([c], FEWEST) for c in known.measurable), default=0.0)

    def rounds(then: float, one: float) -> int:
        """Those that leave time for what was left out, where that is not too few."""
        fewer = _all(then - reserved, one)
        return fewer if fewer >= 2 * FEWEST else _all(then, one)

    seat_by = left - pace.turns(stacks, FEWEST)
    return Step(_family(known, stacks, TOGETHER, known.ground), rounds, seat_by)


def _decided(known: Known, left: float) -> Step | None:
    """More rounds of stacks of which any may be the best; as many as they had, or they tell nothing new."""
    if not known.contested or known.deciding is None:
        return None
    ground = known.ground if known.deciding.design != ALONE else ()
    stacks = [s for s in known.contested if s != ground]
    labels = [known.question.labels(s) for s in stacks]
    before = [t for t in known.families if t.design == DECIDING and all(map(t.finished, labels))]
    had = max(map(known.deciding.rounds, labels))
    if len(before) >= OFTEN or Pace(known).rounds(stacks, left) < had:
        return None
    return Step(_family(known, stacks, DECIDING, ground), _all, left)


def _one_more(known: Known, left: float) -> Step | None:
    """A contender that is not expected to be done in time, all the same: what is expected comes from another machine,
    and nothing else is left to do."""
    if not known.measurable or left <= 2 * Pace(known).seconds([], FEWEST):
        return None
    return Step(_family(known, known.measurable[:1], ALONE), _all, left)


def _sharper(known: Known, left: float) -> Step | None:
    """More rounds of contenders that may help and do not show it; twice as many as they had, or they tell nothing
    new."""
    chosen = known.undecided
    had = max((told.rounds(known.question.labels(one)) for one in chosen if (told := known.alone(one))), default=0)
    if not chosen or Pace(known).rounds(chosen, left) < 2 * had:
        return None
    return Step(_family(known, chosen, ALONE), _all, left)


def _all(left: float, one: float) -> int:
    """As many as so many seconds hold, `one` each, and no more than decide anything."""
    return min(MOST, int(left / max(one, 1e-3)))


def _family(known: Known, stacks: Sequence[Toggles], design: str, ground: Toggles = ()) -> Family:
    """The reference with `ground` against itself, then each of these on top of it."""
    own = known.question
    return Family(tuple(own.cell(s, design, ground) for s in ((), *stacks) if s != ground or not s))


def seat_seconds(budget: float, left: float) -> float:
    """Seconds for one candidate, of a budget of which so many are left."""
    return min(max(SEAT_SHARE * budget, SEAT_LEAST_S), 0.9 * left)


def more(known: Known) -> tuple[str, float]:
    """(what more time would tell, in words; about how many seconds that takes). '' where nothing is open, but for what
    had its time and did not end."""
    pace, parts, seconds = Pace(known), list[str](), 0.0
    if known.reference and known.reference.status not in ("ok", "oom"):
        return "", 0.0
    if left := known.measurable:
        parts.append("measure " + ", ".join(map(named, left)))
        seconds += pace.seconds(left, FEWEST)
    if wholes := known.to_put_together:
        largest = [whole for whole in wholes if not any({*whole} < {*other} for other in wholes)]
        parts += [f"put {', '.join(t.label for t in whole)} together" for whole in largest]
        seconds += pace.seconds([*known.stacks[:1], *wholes], FEWEST)
    elif known.contested:
        names = [named(s) or "the reference" for s in known.contested]
        parts.append(f"tell whether {' or '.join(names[1:])} is better than {names[0]}")
        seconds += pace.seconds(known.contested, MOST)
    elif blurred := known.undecided:
        parts.append(f"tell whether {' or '.join(map(named, blurred))} helps")
        seconds += pace.seconds(blurred, MOST)
    return " and ".join(parts), seconds
