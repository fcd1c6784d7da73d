"""Ladders of several workloads together: each step over all of them, from start to end, and what that says in words.

They may be of several results folders. Each folder's verdicts are its own, as its summary.md has them: what is
corrected for many comparisons counts those of one folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lorabench.record.contrast import Speedup
from lorabench.record.schema import ARMS, DID_NOT_APPLY
from lorabench.report.analysis import Analysis
from lorabench.report.attribution import Rung, ladder
from lorabench.report.attribution_tables import (
    RUNG,
    AnyTable,
    cumulative,
    increment,
    increment_is_clear,
    peak,
    published,
)
from lorabench.report.epoch import Epoch, epochs
from lorabench.report.words import arrow, number, too_few

MUCH = 1.02  # a step that changes less than this, however surely, is nothing that a user would notice


class Ladder(NamedTuple):
    """The ladder of one model @ workload."""

    title: str
    rungs: list[Rung]
    analysis: Analysis

    @property
    def last(self) -> Rung | None:
        """The highest rung with a time."""
        return next((rung for rung in reversed(self.rungs) if rung.cumulative), None)


def ladders(*analyses: Analysis) -> list[Ladder]:
    found = [Ladder(g.title, ladder(g.records, a.contrasts), a) for a in analyses for g in a.groups]
    return [own for own in found if own.rungs]


def steps_table(*analyses: Analysis) -> AnyTable:
    """A row a step, in the order in which they were taken; a column a workload with what the step adds there, or why it
    has no time; and what was published for it."""
    found = ladders(*analyses)
    names = dict.fromkeys(rung.added for own in found for rung in own.rungs)
    rows = []
    for name in names:
        its = [(next((r for r in own.rungs if r.added == name), None), own.analysis) for own in found]
        claimed = dict.fromkeys(_claimed(rung) for rung, _ in its if rung)
        rows.append([name, *(_increment(rung, a) for rung, a in its), "; ".join(filter(None, claimed))])
    return "What each step adds to those before it", [RUNG, *(own.title for own in found), "published"], rows


def _claimed(rung: Rung) -> str:
    """Without whether ours is within: that differs from workload to workload."""
    return published(rung).partition(" (ours")[0]


def _increment(rung: Rung | None, analysis: Analysis) -> str:
    if rung is None:
        return ""
    return increment(rung, analysis) or rung.record.status.replace("_", " ")


def start_to_end(*analyses: Analysis) -> AnyTable:
    """A row a workload and training set: a step at the start and at the end, and an epoch of both, extrapolated."""
    rows = []
    for own in ladders(*analyses):
        if own.last:
            rows += [_ends(own, own.last, epoch) for epoch in epochs(own.rungs) or [None]]
    headings = ["model @ workload", "ms a step, start → end", "of it host, start → end", "in all × [95 %]"]
    headings += ["peak GiB, start → end"]
    headings += ["training set", "minutes per epoch (extrapolated), start → end"]
    return "From the start to the end", headings, rows


def _ends(own: Ladder, last: Rung, epoch: Epoch | None) -> list[str]:
    row = own.analysis.row(last.record)
    before, after = (row.get(f"{arm}_host_share", math.nan) for arm in ARMS)
    ends = [own.title, arrow(last.start, last.after), arrow(before, after, _percent), cumulative(last, own.analysis)]
    ends.append(arrow(peak(own.rungs[0].record, "reference"), peak(last.record, "candidate")))
    if epoch is None:
        return [*ends, "", ""]
    lengths = "" if epoch.data.measured else ", lengths approximate"
    return [*ends, f"{epoch.data.name} ({epoch.data.samples} samples{lengths})", arrow(epoch.start, epoch.end)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else ""


def conclusions(*analyses: Analysis) -> list[str]:
    """A sentence a step: on how many of the workloads it gained, cost or showed neither, and by how much; what could
    not be had; and where the step and a published number with its baseline disagree."""
    found = [(rung, own.analysis) for own in ladders(*analyses) for rung in own.rungs]
    names = dict.fromkeys(rung.added for rung, _ in found)
    return [_sentence(name, [(rung, a) for rung, a in found if rung.added == name]) for name in names]


def _sentence(name: str, rungs: Sequence[tuple[Rung, Analysis]]) -> str:
    timed = [(rung, a) for rung, a in rungs if rung.increment]
    absent = [r.record.status.replace("_", " ") for r, _ in rungs if r.record.status in DID_NOT_APPLY]
    if not timed:
        return f"`{name}` has no time here: {', '.join(dict.fromkeys(absent)) or rungs[0][0].record.status}."
    sure = [r.increment for r, a in timed if r.increment and increment_is_clear(r, a)]
    gains = sum(found.centre >= MUCH for found in sure)
    costs = sum(found.centre <= 1 / MUCH for found in sure)
    few = sum(too_few(r.increment, r.trials) for r, _ in timed if r.increment)
    rest = len(timed) - gains - costs - few
    verdicts = {"gains on": gains, "costs on": costs, "shows no clear change on": rest, "has too few trials on": few}
    counted = [f"{verdict} {n}" for verdict, n in verdicts.items() if n]
    notes = [_by_how_much(timed, sure), next((c for rung, _ in rungs if (c := _claimed(rung))), "")]
    said = "; ".join(filter(None, notes))
    return f"`{name}` {' and '.join(counted)} of {len(timed)} workloads{f' ({said})' if said else ''}."


def _by_how_much(timed: Sequence[tuple[Rung, Analysis]], sure: Sequence[Speedup]) -> str:
    """Of a single workload its interval, of several the range of those that show a direction."""
    if len(timed) == 1:
        return f"{'×' if sure else ''}{increment(*timed[0])}"
    low, high = (number(end((found.centre for found in sure), default=0)) for end in (min, max))
    return f"×{low} to ×{high}" if len(sure) > 1 else f"×{low}" if sure else ""
