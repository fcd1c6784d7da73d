"""Every arm of a group over every other: what the page shows when a reader chooses another baseline.

All ratios come from `Contrasts`. They are made on logarithms, so those of two arms the other way round are the inverse,
and only one half is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lorabench.record import stats
from lorabench.record.contrast import Contrast, Speedup
from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Analysis
from lorabench.report.arms import CANDIDATE, REFERENCE, Arm, rounded
from lorabench.report.contrasts import Beside

PAIRING = {"within": "paired", "between": "turns"}  # how two arms met → how the A/A record that judges them was paired
MOST = 60  # arms of a group of which every phase is held together; of more only the totals


class Held(NamedTuple):
    """`ratios`: phase → for each arm a list with every later arm's place, [ratio, low, high] of the first's time over
    the later one's, or None. `how`: likewise, in which way the two met. `verdicts`: for each arm as the baseline, what
    is said of each arm, '' where nothing is."""

    ratios: dict[str, list[list[list[float | None] | None]]]
    how: list[list[str]]
    verdicts: list[list[str]]


def held_together(arms: Sequence[Arm], phases: Sequence[str], analysis: Analysis) -> Held:
    phases = [TOTAL] if len(arms) > MOST else [*phases, TOTAL]
    n = len(arms)
    made = {(i, j): _beside(arms[j], arms[i], phases, analysis) for i, j in itertools.combinations(range(n), 2)}
    rows = [[made[i, j] for j in range(i + 1, n)] for i in range(n)]
    ratios = {p: [[_three(beside.get(p)) for beside in row] for row in rows] for p in phases}
    how = [[beside[TOTAL].how if TOTAL in beside else "" for beside in row] for row in rows]
    totals = {at: beside[TOTAL] for at, beside in made.items() if TOTAL in beside}
    return Held(ratios, how, [_verdicts(i, arms, totals, analysis) for i in range(n)])


def _beside(candidate: Arm, reference: Arm, phases: Sequence[str], analysis: Analysis) -> dict[str, Beside]:
    """By phase, how many times as fast the candidate is; {} where one of the two has no time."""
    contrasts = analysis.contrasts
    if not candidate.timed or not reference.timed:
        return {}
    if pairs := contrasts.pairs(candidate.timed, reference.timed):
        found = {p: contrasts.over(pairs, (p,)) for p in phases}
    elif reference.role == REFERENCE and candidate.record:
        # A pair that was measured before there were rounds is over a reference of its own.
        found = {p: own and Beside(own, "") for p in phases for own in [contrasts.of(candidate.record, (p,))]}
    elif candidate.record and reference.record and reference.side == "candidate":
        found = {p: contrasts.beside(candidate.record, reference.record, (p,)) for p in phases}
    else:
        found = {}
    return {phase: beside for phase, beside in found.items() if beside}


def _three(beside: Beside | None) -> list[float | None] | None:
    return [rounded(end) for end in beside.contrast.speedup] if beside else None


# -- verdicts ---------------------------------------------------------------------------------------------------------


def _verdicts(
    base: int, arms: Sequence[Arm], totals: Mapping[tuple[int, int], Beside], analysis: Analysis
) -> list[str]:
    """Over the reference those of the tables, corrected over all rows of the folder; over any other arm by the same
    rules, corrected over the group."""
    if arms[base].role == REFERENCE:
        return [_of_row(arm, analysis) for arm in arms]
    floors = _floors(arms, analysis)
    against: dict[int, tuple[Contrast, Speedup, float]] = {}
    for (i, j), (contrast, how) in totals.items():
        other = j if i == base else i if j == base else None
        if other is not None and arms[other].role in (CANDIDATE, REFERENCE):
            ratio = contrast.speedup if i == base else _inverse(contrast.speedup)
            floor = floors.get(PAIRING.get(how), max(floors.values(), default=stats.MIN_FLOOR))
            against[other] = contrast, ratio, floor
    holm = stats.holm([contrast.p_value() for contrast, _, _ in against.values()])
    said = [""] * len(arms)
    for corrected, (other, (contrast, ratio, floor)) in zip(holm, against.items(), strict=True):
        said[other] = stats.verdict(ratio, corrected, floor, contrast.trials) or ""
    return said


def _of_row(arm: Arm, analysis: Analysis) -> str:
    row: Any = analysis.row(arm.record) if arm.record and arm.role == CANDIDATE else {}
    return row["verdict"] if isinstance(row.get("verdict"), str) else ""


def _floors(arms: Sequence[Arm], analysis: Analysis) -> dict[str | None, float]:
    """By how the reference was paired with itself, how far it was from itself."""
    rows = [analysis.row(arm.record) for arm in arms if arm.record and arm.role == CANDIDATE]
    found: dict[str | None, float] = {}
    for row in rows:
        pairing = row["noise_pairing"] if isinstance(row["noise_pairing"], str) else None
        found[pairing] = max(row["noise_floor"], found.get(pairing, 0.0))
    return found


def _inverse(found: Speedup) -> Speedup:
    return Speedup(1 / found.centre, 1 / found.high, 1 / found.low)
