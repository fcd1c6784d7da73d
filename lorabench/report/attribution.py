"""Who earned what when toggles are on together: ladder, leave-one-out, pairwise interaction, Shapley values.

Gains do not multiply, so each design answers its own question, and none is derived from another's numbers. All
functions take the records of one group. Cells are independent measurements, so what several of them say together is
bootstrapped cell by cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorabench.record.contrast import Contrast, Speedup, combined
from lorabench.record.schema import ARMS, DID_NOT_APPLY, ArmName, Record
from lorabench.report.contrasts import Beside, Contrasts, how, toggles

Subset = frozenset[str]


class Rung(NamedTuple):
    """One step of a ladder. `record`: of all so far over the ladder's start. `below`: the rung that it stands on, None
    for the start. cumulative: this rung against the start; increment: against the one below; None where either has no
    time. step: the record that the increment is of; None where no design shows it. unpaired: the increment is the ratio
    of two rungs' own times. start, before, after: milliseconds of the ladder's start, of the rung below and of this
    one; NaN where unknown. trials: of the contrasts, in the one that has the fewest."""

    added: str
    record: Record
    below: Record | None
    cumulative: Speedup | None
    increment: Speedup | None
    step: Record | None
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

    Each rung was measured over the start. Its increment is its contrast with the rung below, whether the design shows
    that or not. Milliseconds are those of the start beside the highest rung, divided by each rung's own ratio: so they
    add up. Where rungs did not share rounds and have only their own times, these are the milliseconds.
    """
    wholes = {r.rung or len(r.ablations): r for r in records if r.design == "ladder" and r.ablations}
    steps, found = _steps(records), list[tuple[Record, Record | None, Beside | None]]()
    for n, whole in sorted(wholes.items()):
        below = _below([lower for lower, _, _ in found])
        shown = contrasts.of(steps[n]) if n in steps else None
        if n in steps:
            step = shown and Beside(shown, how(steps[n]))
        else:
            step = contrasts.beside(whole, below) if below else None
        found.append((whole, below, step))
    start = next((ms for whole, _, _ in reversed(found) if math.isfinite(ms := _median(whole, "reference"))), math.nan)
    unpaired = any(step and not step.paired for _, _, step in found)
    after: dict[int, float] = {}  # by the identity of a rung's record
    rungs: list[Rung] = []
    for n, (whole, below, step) in zip(sorted(wholes), found, strict=True):
        own = contrasts.of(whole)
        increment = step.contrast if step else own if below is None else None
        after[id(whole)] = _median(whole, "candidate") if unpaired else start / own.centre if own else math.nan
        before = after[id(below)] if below else start
        added = " + ".join(a for a in whole.ablations if below is None or a not in below.candidate) or toggles(whole)
        trials = min((c.trials for c in (own, increment) if c), default=0)
        rungs.append(
            Rung(added, whole, below, own and own.speedup, increment and increment.speedup,
                 whole if below is None else steps.get(n), bool(step and not step.paired), start, before,
                 after[id(whole)], trials)
        )  # fmt: skip
    return rungs


def _steps(records: Sequence[Record]) -> dict[int, Record]:
    """Stacks over the one below, by their rung."""
    return {r.rung: r for r in records if r.design == "steps" and r.rung is not None}


def _below(lower: Sequence[Record]) -> Record | None:
    """The nearest lower rung that did apply: one that did not is no part of those above it."""
    return next((r for r in reversed(lower) if r.status not in DID_NOT_APPLY), None)


def _median(record: Record, arm: ArmName) -> float:
    ms = record.ms(arm)
    return float(np.median(ms)) if ms else math.nan


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
    before, after = (record.held(arm).peak for arm in ARMS)
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
