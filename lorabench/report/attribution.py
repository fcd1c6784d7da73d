"""Who earned what when toggles are on together: ladder, leave-one-out, pairwise interaction, Shapley values.

Gains do not multiply, so each design answers its own question, and none is derived from another's numbers. All
functions take the records of one group. Cells are independent measurements, so what several of them say together is
bootstrapped cell by cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorabench.record.contrast import Contrast, Speedup, combined, contrast
from lorabench.record.schema import ARMS, DID_NOT_APPLY, TOTAL, ArmMemory, Record
from lorabench.report.contrasts import Contrasts, toggles
from lorabench.report.shares import reference_waits

Subset = frozenset[str]


class Rung(NamedTuple):
    """One step of a ladder. `below`: the rung that it stands on, None for the reference. increment: this rung against
    that one; None where either has no time. base: the toggles of the ladder's start; cumulative: this rung against it.
    step, whole: what these two were measured by; None where they are made of other cells' ratios. unpaired: the
    increment is the ratio of two cells' own times. start, before, after: milliseconds of the ladder's start, of the
    rung below and of this one; NaN where unknown. trials: of the cells that these numbers are of, in the one that has
    the fewest."""

    added: str
    record: Record
    below: Record | None
    base: list[str]
    cumulative: Speedup | None
    increment: Speedup | None
    step: Record | None
    whole: Record | None
    unpaired: bool
    start: float
    before: float
    after: float
    trials: int


class LeftOut(NamedTuple):
    """What a toggle still adds when all the others are on."""

    toggle: str
    record: Record
    speedup: Speedup | None


class Interaction(NamedTuple):
    """S(ab) / (S(a) · S(b)): above 1 the two help each other, below 1 they compete for the same time."""

    first: str
    second: str
    effect: Speedup


class Shapley(NamedTuple):
    """A fair split of what all `players` bring together, over every order of switching them on.

    factors: of time; their product is the speed-up of all. saved_bytes: of peak memory; their sum is what all save, and
    a negative one is what a toggle costs; None where a cell has no peak. left_out: toggles dropped because of
    `missing`, the subsets without a time.
    """

    players: tuple[str, ...]
    factors: dict[str, Speedup]
    saved_bytes: dict[str, float] | None
    left_out: tuple[str, ...]
    missing: tuple[tuple[str, ...], ...]


def ladder(records: Sequence[Record], contrasts: Contrasts) -> list[Rung]:
    """The rungs of a ladder from the lowest, failed ones included; [] without one.

    A rung was measured against the reference, against the rung below it, or both. What
    was not measured is made of the other: an increment is then the ratio of two cumulative ratios, and a cumulative
    ratio the product of the increments. Milliseconds are those of the reference beside the highest stack that was
    measured over it, divided by each rung's own ratio: so they add up, whatever the machine did between two cells.

    Rungs of one family shared rounds: an increment is then their contrast over these, whether the design shows it or
    not. In records of schemas 1 and 2 a start that waits for its host would bring the host's noise into every increment
    twice. There an increment is the ratio of the two cells' own times, unpaired, and milliseconds are the medians of
    these.
    """
    steps = _steps(records)
    wholes = _wholes(records, steps)
    numbers = sorted(wholes.keys() | steps.keys())
    start = _start([*(wholes[n] for n in numbers[::-1] if n in wholes), *(steps[n] for n in numbers[:1] if n in steps)])
    base = (steps.get(numbers[0]) or wholes[numbers[0]]).reference if numbers else []
    waits = any(map(_start_waits, wholes.values()))
    rungs: list[Rung] = []
    reached: dict[int, Contrast | None] = {}  # over the reference, by the identity of a rung's record
    for n in numbers:
        record, whole = steps.get(n) or wholes[n], wholes.get(n)
        lower = _below(rungs, record)
        below = lower.record if lower else None
        under = reached[id(below)] if below else None
        own = contrasts.of(whole) if whole else None
        shared = contrasts.beside(whole, lower.whole) if whole and lower and lower.whole and n not in steps else None
        step = contrasts.of(steps[n]) if n in steps else shared and shared.contrast
        paired = True
        if lower is None:  # the start is what it stands on
            own = step = own or step
        elif under and step and not own:
            own = under.product(step)
        elif under and own and whole and not step:
            direct = _direct(lower.whole, whole) if waits and lower.whole else None
            step, paired = direct or own.difference(under), direct is None
        reached[id(record)] = own
        after = start / own.centre if own else math.nan
        if own and whole and waits and not steps:
            after = _median(whole, "candidate_ms")
        added = " + ".join(a for a in record.ablations if below is None or a not in below.candidate) or toggles(record)
        trials = min((c.trials for c in (own, step) if c), default=0)
        rungs.append(
            Rung(added, record, below, base, own and own.speedup, step and step.speedup,
                 steps.get(n) or (None if below else whole), whole or (None if below else steps.get(n)),
                 not paired, start, lower.after if lower else start, after, trials)
        )  # fmt: skip
    return rungs


def _wholes(records: Sequence[Record], steps: Mapping[int, Record]) -> dict[int, Record]:
    """Stacks over the reference, by their rung; of steps that is the end alone, which stands on the highest."""
    found = {r.rung or len(r.ablations): r for r in records if r.design == "ladder" and r.ablations}
    for record in records:
        if record.design == "steps" and record.rung is None and record.ablations:
            same = [n for n, r in steps.items() if set(r.candidate) == set(record.candidate)]
            found |= dict.fromkeys(same[-1:], record)
    return found


def _steps(records: Sequence[Record]) -> dict[int, Record]:
    """Stacks over the one below, by their rung."""
    return {r.rung: r for r in records if r.design == "steps" and r.rung is not None}


def _start(cells: Sequence[Record]) -> float:
    """Milliseconds of the reference in the first of the cells that has any."""
    return next((ms for r in cells if math.isfinite(ms := _median(r, "reference_ms"))), math.nan)


def _direct(below: Record, record: Record) -> Contrast | None:
    """The ratio of two cells' own times."""
    before, after = (_times(r, "candidate_ms") for r in (below, record))
    return contrast(before, after, paired=False) if before and after else None


def _start_waits(record: Record) -> bool:
    """Whether the reference spends most of its time in phases that wait for the host: a short one does
    on any machine."""
    whole = _median(record, "reference_ms")
    mine = [p for p in record.phases or {} if reference_waits(record, (p,))]
    return sum(_median(record, "reference_ms", p) for p in mine) > whole / 2


def _median(record: Record, name: str, phase: str = TOTAL) -> float:
    ms = _times(record, name, phase)
    return float(np.median(ms)) if ms else math.nan


def _times(record: Record, name: str, phase: str = TOTAL) -> list[float]:
    """[] where there are none."""
    return getattr((record.phases or {}).get(phase), name, None) or []


def _below(lower: Sequence[Rung], record: Record) -> Rung | None:
    """The nearest lower rung that did apply. One that did not is no part of those above it, as older records, which do
    not say their rung, show by the toggles that they have."""
    stood = [r for r in lower if r.record.status not in DID_NOT_APPLY]
    if record.rung is None:
        stood = [r for r in lower if set(r.record.ablations) < set(record.ablations)]
    return stood[-1] if stood else None


def leave_one_out(records: Sequence[Record], contrasts: Contrasts) -> list[LeftOut]:
    """Each toggle against everything but it, the most valuable first; failed cells last. The last one of steps is such
    a cell, too, and was measured once, as theirs."""
    own = [r for r in records if r.design == "leave_one_out" and r.ablations]
    ends = {frozenset(r.candidate) for r in own}
    own += [r for r in _steps(records).values() if frozenset(r.candidate) in ends]
    found = [LeftOut(toggles(r), r, contrasts.speedup(r)) for r in own]
    return sorted(found, key=lambda x: -x.speedup.centre if x.speedup else math.inf)


def _lattice(records: Sequence[Record]) -> dict[Subset, Record]:
    """Cells by their set of toggles, of the reference that most of them share (leave-one-out has others)."""
    plain = [r for r in records if r.ablations and r.design != "leave_one_out"]
    bases = [frozenset(r.reference) for r in plain]
    common = max(bases, key=bases.count, default=None)
    return {frozenset(r.ablations): r for r, base in zip(plain, bases, strict=True) if base == common}


def alone(records: Sequence[Record]) -> dict[str, Record]:
    """Toggle → its cell alone over the reference that most cells share, of whichever design."""
    return {next(iter(chosen)): r for chosen, r in _lattice(records).items() if len(chosen) == 1}


def interactions(records: Sequence[Record], contrasts: Contrasts) -> list[Interaction]:
    """Every pair that was measured together and alone, the strongest interaction first."""
    lattice = {s: c for s, r in _lattice(records).items() if (c := contrasts.of(r))}
    found = []
    for pair, record in _lattice(records).items():
        cells = [pair, *(frozenset([a]) for a in record.ablations)]
        if len(pair) == 2 and all(s in lattice for s in cells):
            both, first, second = (lattice[s] for s in cells)
            effect = both.difference(first).difference(second).speedup
            found.append(Interaction(record.ablations[0], record.ablations[1], effect))
    return sorted(found, key=lambda x: -abs(math.log(x.effect.centre)))


def shapley(records: Sequence[Record], contrasts: Contrasts) -> Shapley | None:
    """Shapley values on log time and on peak bytes; None without a factorial or a complete part of it.

    They are defined over a complete game only. With cells missing (out of memory, conflict) they are computed over the
    largest set of toggles whose subsets all have a time, and say so.
    """
    players = list(dict.fromkeys(a for r in records if r.design == "factorial" for a in r.ablations))
    # A cell that another design of the sweep has too was measured once, as that one's.
    lattice = {chosen: r for chosen, r in _lattice(records).items() if chosen <= set(players)}
    worth = {s: c for s, r in lattice.items() if (c := contrasts.of(r))}
    chosen = _largest_complete(players, worth)
    if chosen is None:
        return None
    used = [frozenset(s) for s in _subsets(chosen)]
    trials = min(worth[s].trials for s in used)
    shares = shapley_values(chosen, {s: worth[s].logs for s in used})
    return Shapley(
        chosen,
        {p: combined(logs, trials).speedup for p, logs in shares.items()},
        _shared_bytes(chosen, {s: lattice[s] for s in used}),
        tuple(p for p in players if p not in chosen),
        tuple(s for s in _subsets(players) if frozenset(s) not in worth),
    )


def _largest_complete(players: Sequence[str], worth: dict[Subset, Contrast]) -> tuple[str, ...] | None:
    """The largest set of two players or more whose subsets all have a time."""
    for size in range(len(players), 1, -1):
        for chosen in itertools.combinations(players, size):
            if all(frozenset(s) in worth for s in _subsets(chosen)):
                return chosen
    return None


def _shared_bytes(players: Sequence[str], cells: dict[Subset, Record]) -> dict[str, float] | None:
    """Each player's share of the peak bytes saved; None where a cell has no peak."""
    saved = {s: np.array([b]) for s, r in cells.items() if (b := _saved(r)) is not None}
    if len(saved) < len(cells):
        return None
    return {p: float(x[0]) for p, x in shapley_values(players, saved).items()}


def _subsets(players: Sequence[str]) -> list[tuple[str, ...]]:
    """All but the empty one, small ones first."""
    return [s for n in range(1, len(players) + 1) for s in itertools.combinations(players, n)]


def _saved(record: Record) -> int | None:
    held: dict[Any, ArmMemory] = dict(record.memory or {})
    peaks = [held.get(arm) for arm in ARMS]
    before, after = (m.peak if m else None for m in peaks)
    return before - after if before is not None and after is not None else None


def shapley_values(players: Sequence[str], worth: dict[Subset, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Shapley value of each player, in the shape of the worths; the empty subset is worth 0. All subsets must be there.

    phi(i) = sum over S without i of |S|! (n - |S| - 1)! / n! · (v(S + i) - v(S))
    """
    n = len(players)
    nothing = np.zeros_like(next(iter(worth.values())), dtype=np.float64)
    values = {p: nothing.copy() for p in players}
    for p in players:
        others = [q for q in players if q != p]
        for rest in [(), *_subsets(others)]:
            weight = math.factorial(len(rest)) * math.factorial(n - len(rest) - 1) / math.factorial(n)
            values[p] += weight * (worth[frozenset([*rest, p])] - worth.get(frozenset(rest), nothing))
    return values
