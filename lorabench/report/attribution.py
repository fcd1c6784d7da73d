"""Who earned what when toggles are on together: ladder, leave-one-out, pairwise interaction, Shapley values.

Gains do not multiply, so each design answers its own question, and none is derived from another's numbers. All
functions take the records of one model and workload. A ratio carries a 95 % bootstrap interval; cells are independent
measurements, so a combination of several is bootstrapped cell by cell.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorabench.record import stats
from lorabench.report.analysis import phase_speedup, toggles
from lorabench.record.stats import Speedup
from lorabench.record.schema import Record

Subset = frozenset[str]


class Rung(NamedTuple):
    """One step of a ladder. increment: this rung against the one below; None where either has no time."""

    added: str
    record: Record
    cumulative: Speedup | None
    increment: Speedup | None


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

    factors: of time; their product is the speed-up of all. saved_bytes: of peak memory; their sum is what all save;
    None where a cell has no peak. left_out: toggles dropped because of `missing`, the subsets without a time.
    """

    players: tuple[str, ...]
    factors: dict[str, Speedup]
    saved_bytes: dict[str, float] | None
    left_out: tuple[str, ...]
    missing: tuple[tuple[str, ...], ...]


def groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by title, in order of first appearance: `model @ workload`, and against which reference where the sweep
    had several (each has an A/A record of its own)."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.model, record.workload), []).append(record)
    titled: dict[str, list[Record]] = {}
    for (model, workload), members in found.items():
        bases = list(dict.fromkeys(tuple(r.reference) for r in members if r.is_noise_floor))
        for record in members:
            titled.setdefault(f"{model} @ {workload}{_against(record, bases)}", []).append(record)
    return titled


def _against(record: Record, bases: Sequence[tuple[str, ...]]) -> str:
    """Which of several references is the record's: by the toggles that tell them apart. '' where there is but one."""
    if len(bases) < 2:
        return ""
    own = set(record.reference)  # leave-one-out adds toggles to it: then the one most like it
    base = max(bases, key=lambda base: (set(base) == own, len(own & set(base))))
    apart = [t for t in dict.fromkeys(itertools.chain(*bases)) if not all(t in b for b in bases)]
    has = [t for t in apart if t in base]
    return f", reference {'with' if has else 'without'} {' + '.join(has or apart)}"


def _logs(record: Record, phase: str = "total") -> NDArray[np.float64] | None:
    """Log speed-up of one cell, shape (1 + resamples,): the centre, then its bootstrap replicates."""
    ratio, times = phase_speedup(record, phase), (record.phases or {}).get(phase)  # type: ignore[call-overload]
    if record.status != "ok" or ratio is None or times is None or not times.reference_ms or not times.candidate_ms:
        return None
    seed = zlib.crc32(record.key.encode())  # own draws for each cell: equal seeds would correlate them
    drawn = stats.replicates(times.reference_ms, times.candidate_ms, record.pairing != "abba", seed)
    return np.concatenate([[math.log(ratio.centre)], drawn])


def _interval(logs: NDArray[np.float64], trials: int) -> Speedup:
    low, high = np.quantile(logs[1:], stats.tails(trials))
    return Speedup(*(math.exp(x) for x in (logs[0], min(low, logs[0]), max(high, logs[0]))))


def _trials(records: Iterable[Record]) -> int:
    totals = [r.phases["total"] for r in records if r.phases]
    return min(len(ms) for t in totals for ms in (t.reference_ms, t.candidate_ms) if ms)


def ladder(records: Sequence[Record]) -> list[Rung]:
    """The rungs of a ladder from the lowest, failed ones included; [] without one."""
    steps = sorted((r for r in records if r.design == "ladder" and r.ablations), key=lambda r: len(r.ablations))
    rungs: list[Rung] = []
    for below, record in zip([None, *steps], steps, strict=False):
        before = set(below.ablations) if below else set()
        added = " + ".join(a for a in record.ablations if a not in before) or toggles(record)
        rungs.append(Rung(added, record, _total(record), _increment(below, record)))
    return rungs


def _total(record: Record) -> Speedup | None:
    return phase_speedup(record, "total") if record.status == "ok" else None


def _increment(below: Record | None, record: Record) -> Speedup | None:
    if below is None:
        return _total(record)
    first, second = _logs(below), _logs(record)
    if first is None or second is None:
        return None
    return _interval(second - first, _trials([below, record]))


def leave_one_out(records: Sequence[Record]) -> list[LeftOut]:
    """Each toggle against everything but it, the most valuable first; failed cells last."""
    found = [LeftOut(toggles(r), r, _total(r)) for r in records if r.design == "leave_one_out" and r.ablations]
    return sorted(found, key=lambda x: -x.speedup.centre if x.speedup else math.inf)


def _lattice(records: Sequence[Record]) -> dict[Subset, Record]:
    """Cells by their set of toggles, of the reference that most of them share (leave-one-out has others)."""
    plain = [r for r in records if r.ablations and r.design != "leave_one_out"]
    bases = [frozenset(r.reference) for r in plain]
    common = max(bases, key=bases.count, default=None)
    return {frozenset(r.ablations): r for r, base in zip(plain, bases, strict=True) if base == common}


def interactions(records: Sequence[Record]) -> list[Interaction]:
    """Every pair that was measured together and alone, the strongest interaction first."""
    lattice = _lattice(records)
    found = []
    for pair, record in lattice.items():
        if len(pair) != 2:
            continue
        first, second = record.ablations
        cells = [record, lattice.get(frozenset([first])), lattice.get(frozenset([second]))]
        logs = [_logs(c) if c else None for c in cells]
        if any(x is None for x in logs):
            continue
        both, a, b = (x for x in logs if x is not None)
        found.append(Interaction(first, second, _interval(both - a - b, _trials(c for c in cells if c))))
    return sorted(found, key=lambda x: -abs(math.log(x.effect.centre)))


def shapley(records: Sequence[Record]) -> Shapley | None:
    """Shapley values on log time and on peak bytes; None without a factorial or a complete part of it.

    They are defined over a complete game only. With cells missing (out of memory, conflict) they are computed over the
    largest set of toggles whose subsets all have a time, and say so.
    """
    lattice = _lattice([r for r in records if r.design == "factorial"])
    players = list(dict.fromkeys(a for r in lattice.values() for a in r.ablations))
    logs = {s: x for s, r in lattice.items() if (x := _logs(r)) is not None}
    missing = [s for s in _subsets(players) if frozenset(s) not in logs]
    complete = (
        chosen
        for size in range(len(players), 1, -1)
        for chosen in itertools.combinations(players, size)
        if all(frozenset(s) in logs for s in _subsets(chosen))
    )
    chosen = next(complete, None)
    if chosen is None:
        return None
    used = {frozenset(s): logs[frozenset(s)] for s in _subsets(chosen)}
    trials = _trials(lattice[s] for s in used)
    factors = {p: _interval(x, trials) for p, x in shapley_values(chosen, used).items()}
    saved = {s: _saved(lattice[s]) for s in used}
    known = {s: np.array([b]) for s, b in saved.items() if b is not None}
    by_bytes = shapley_values(chosen, known) if len(known) == len(used) else None
    return Shapley(
        chosen,
        factors,
        {p: float(x[0]) for p, x in by_bytes.items()} if by_bytes else None,
        tuple(p for p in players if p not in chosen),
        tuple(tuple(s) for s in missing),
    )


def _subsets(players: Sequence[str]) -> list[tuple[str, ...]]:
    """All but the empty one, small ones first."""
    return [s for n in range(1, len(players) + 1) for s in itertools.combinations(players, n)]


def _saved(record: Record) -> int | None:
    peaks = [(record.memory or {}).get(arm) for arm in ("reference", "candidate")]
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
