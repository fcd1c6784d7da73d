"""Who earned what, as tables of text: the ladder with all that is known of each of its steps, and the other ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lorabench.record.contrast import Speedup
from lorabench.record.schema import ARMS, TOTAL, ArmName, Record
from lorabench.report import claims
from lorabench.report.analysis import Analysis
from lorabench.report.attribution import (
    LeftOut,
    Rung,
    alone,
    interactions,
    ladder,
    leave_one_out,
    shapley,
)
from lorabench.report.claims import Match
from lorabench.report.epoch import epochs
from lorabench.report.tidy import GIB
from lorabench.report.words import arrow, is_clear, number, speedup, told

AnyTable = tuple[str, list[str], list[list[str]]]  # caption, headings, rows

RUNG = "rung"
STATUS = "status"
SHAPLEY = "Shapley values"
LADDER = [
    RUNG, "ms, before → after", "increment × [95 %]", "cumulative × [95 %]", "alone × [95 %]", "last × [95 %]",
    "published for this step", "peak GiB", STATUS,
]  # fmt: skip
ALONE = "alone: over the start; last: over all the others"
UNPAIRED = "unpaired: the ratio of the two cells' own times, because the start waits for its host"


def attribution_tables(members: Sequence[Record], analysis: Analysis) -> list[AnyTable]:
    """(caption, headings, rows) for each way of attribution that these records allow."""
    made: list[AnyTable] = []
    contrasts = analysis.contrasts
    left = leave_one_out(members, contrasts)
    if rungs := ladder(members, contrasts):
        made.append(ladder_table(rungs, left, members, analysis))
        made += _epoch_table(rungs)
    if left:
        rows = [[x.toggle, _of_row(x.record, analysis), x.record.status] for x in left]
        made.append(("Leave one out: all toggles against all but one", ["toggle", "total × [95 %]", STATUS], rows))
    if pairs := interactions(members, contrasts):
        rows = [[p.first, p.second, speedup(p.effect)] for p in pairs]
        made.append(("Interaction S(ab) / (S(a) S(b)): 1 is independent", ["toggle", "with", "factor [95 %]"], rows))
    if split := shapley(members, contrasts):
        rows = [[p, speedup(split.factors[p]), _gib(split.saved_bytes, p)] for p in split.players]
        gaps = "; ".join(" + ".join(s) for s in split.missing)
        part = f" over {', '.join(split.players)} only; no time for: {gaps}" if gaps else ""
        made.append((f"{SHAPLEY}{part}", ["toggle", "factor of time [95 %]", "peak GiB saved"], rows))
    return made


def _gib(saved: dict[str, float] | None, player: str) -> str:
    return number(saved[player] / GIB) if saved else ""


def ladder_table(
    rungs: Sequence[Rung], left: Sequence[LeftOut], members: Sequence[Record], analysis: Analysis
) -> AnyTable:
    """A row a rung: what it adds here, what alone and what last, and what was published for the same step. Columns that
    no rung has anything in are left out."""
    first = {name: _of_row(record, analysis) for name, record in alone(members).items()}
    last = {x.toggle: _of_row(x.record, analysis) for x in left}
    rows = [
        [
            r.added,
            arrow(r.before, r.after, lambda ms: number(ms, 4)) if r.cumulative else "",
            increment(r, analysis),
            cumulative(r, analysis),
            first.get(r.added, ""),
            last.get(r.added, ""),
            published(r),
            number(peak(r.record, ARMS[1])),
            r.record.status,
        ]
        for r in rungs
    ]
    kept = [i for i, name in enumerate(LADDER) if name in (RUNG, STATUS) or any(row[i] for row in rows)]
    caption = "Ladder: each rung keeps the ones above it"
    if any(row[LADDER.index(name)] for row in rows for name in LADDER[4:6]):
        caption += f" ({ALONE})"
    if any(r.unpaired for r in rungs):
        caption += f" ({UNPAIRED})"
    return caption, [LADDER[i] for i in kept], [[row[i] for i in kept] for row in rows]


def increment(rung: Rung, analysis: Analysis) -> str:
    """What a rung adds to the one below it, in words; '' without a time."""
    said = told(rung.increment, rung.trials, _verdict(rung.step, analysis))
    return f"{said}, unpaired" if rung.unpaired else said


def increment_is_clear(rung: Rung, analysis: Analysis) -> bool:
    """Whether that shows a direction, or none; False without a time."""
    return rung.increment is not None and is_clear(rung.increment, rung.trials, _verdict(rung.step, analysis))


def cumulative(rung: Rung, analysis: Analysis) -> str:
    """What a rung is over the start, in words; '' without a time."""
    return told(rung.cumulative, rung.trials, _verdict(rung.record, analysis))


def _of_row(record: Record, analysis: Analysis) -> str:
    found = analysis.contrasts.of(record)
    return told(found.speedup, found.trials, _verdict(record, analysis)) if found else ""


def _verdict(record: Record | None, analysis: Analysis) -> str | None:
    return analysis.row(record)["verdict"] if record else None


def peak(record: Record, arm: ArmName) -> float:
    """GiB of an arm at its most; NaN where unknown."""
    most = record.held(arm).peak
    return math.nan if most is None else most / GIB


def claimed_of(rung: Rung) -> list[Match]:
    """The claims about what a rung's toggle brings over what it stands on, of time."""
    base = rung.below.candidate if rung.below else rung.record.reference
    return _of_time(claims.about(rung.record, [rung.added], base))


def _of_time(found: Sequence[Match]) -> list[Match]:
    return [m for m in found if m.claim.of_phase == TOTAL and m.claim.measure == claims.SPEEDUP]


def published(rung: Rung) -> str:
    """The claims about a rung, in words; '' without any."""
    return "; ".join(dict.fromkeys(_claim(m, ours) for m, ours in _claimed(rung)))


def outcomes(rung: Rung) -> list[str]:
    """Of each of these that has this baseline: whether ours is above, within or below."""
    same = {_claim(m, ours): claims.against(m, *ours) for m, ours in _claimed(rung) if ours and not m.differs}
    return list(same.values())


def _claimed(rung: Rung) -> list[tuple[Match, Speedup | None]]:
    """The claims about a rung's toggle over what it stands on, or about all so far over the start, with our numbers.
    Where none has this baseline, those of another one, which do not compare."""
    stack = [a for a in rung.record.candidate if a not in rung.record.reference]
    so_far = _of_time(claims.about(rung.record, stack, rung.record.reference))
    ratios = [(m, rung.increment) for m in claimed_of(rung)] + [(m, rung.cumulative) for m in so_far]
    return [(m, ours) for m, ours in ratios if not m.differs] or ratios


def _claim(match: Match, ours: Speedup | None) -> str:
    said = "–".join(dict.fromkeys(number(end) for end in (match.low, match.high) if math.isfinite(end)))
    said = f"{match.source.name} {said}"
    if match.differs:
        return f"{said} (over another baseline)"
    return f"{said} (ours {claims.against(match, *ours)})" if ours else said


def _epoch_table(rungs: Sequence[Rung]) -> list[AnyTable]:
    """[] for a workload that no known training set has the lengths of."""
    rows = [
        [
            e.data.name, f"{e.data.samples}", "measured" if e.data.measured else "approximate",
            number(e.start), number(e.end), e.data.source,
        ]
        for e in epochs(rungs)
    ]  # fmt: skip
    headings = ["training set", "samples", "lengths", "minutes at the start", "minutes at the end", "size by"]
    caption = "Minutes per epoch, extrapolated from the steps measured here: steps alone, nothing loaded or evaluated"
    return [(caption, headings, rows)] if rows else []
