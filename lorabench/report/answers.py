"""What a reader wants to know first: of each model and workload the fastest, what it buys, and how sure that is.

The fastest is the one with the fewest milliseconds; those that are not told apart from it are named beside it.
README.md's tables go by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lorabench.record.schema import ARMS, TOTAL, Record
from lorabench.report.analysis import Analysis, Row
from lorabench.report.attribution_tables import outcomes
from lorabench.report.cells import host_bound, moved, whole
from lorabench.report.comparable import references, spans
from lorabench.report.groups import Group
from lorabench.report.ladder_summary import ladders
from lorabench.report.published import compared
from lorabench.report.words import arrow, number, percent

MS = f"{TOTAL}_candidate_ms"


class Answer(NamedTuple):
    """A line of the first table. `record` is None where nothing was clearly faster than its reference."""

    place: str
    fastest: str
    time: str
    buys: str
    sure: str
    record: Record | None


def answers(analysis: Analysis) -> list[Answer]:
    """One for each group in which anything was tried, in the groups' order."""
    return [_answer(group, tried, analysis) for group in analysis.groups if (tried := _tried(group))]


def _tried(group: Group) -> list[Record]:
    return [record for record in group.records if record.is_candidate and not record.is_noise_floor]


def _answer(group: Group, tried: Sequence[Record], analysis: Analysis) -> Answer:
    timed = [record for record in tried if record.status == "ok"]
    faster = [record for record in timed if str(analysis.row(record)["verdict"]).startswith("faster")]
    if not faster:
        unclear = sum(analysis.row(r)["verdict"] == "unclear" for r in timed)
        said = f"{len(timed)} of {len(tried)} measured, {unclear} of them unclear"
        return Answer(group.title, "none is clearly faster", "", "", said, None)
    best, *level = fastest(faster, analysis)
    row = analysis.row(best)
    took = arrow(*(row[f"{TOTAL}_{arm}_ms"] for arm in ARMS))
    sure = "; ".join(_doubts(best, level, timed, analysis))
    return Answer(group.title, row["toggles"], f"{took} ms", buys(row), sure, best)


def fastest(records: Sequence[Record], analysis: Analysis) -> list[Record]:
    """Of records that have times the fastest and all that are level with it: whose milliseconds lie within the noise
    floor of its own, or whose intervals meet. The fastest comes first, then those with the fewest toggles."""
    first, *others = sorted(records, key=lambda record: analysis.row(record)[MS])
    level = [record for record in others if _level(analysis.row(first), analysis.row(record))]
    return [first, *sorted(level, key=lambda record: len(record.ablations))]


def _level(first: Row, other: Row) -> bool:
    within = 1 + max(first["noise_floor"], other["noise_floor"])
    return other[f"{MS}_low"] <= first[f"{MS}_high"] or other[MS] <= first[MS] * within


def buys(row: Row) -> str:
    """Speed and memory, each where it is known. A ratio of hosts is no speed-up of the stack."""
    said = []
    if host_bound(row):
        said.append(
            f"on this host {percent(1 - row[f'{TOTAL}_candidate_ms'] / row[f'{TOTAL}_reference_ms'])} less time"
        )
    else:
        said.append(f"{whole(row)} × as fast")
    if math.isfinite(saved := row["memory_saved_pct"]):
        said.append(f"{number(abs(saved))} % {'less' if saved >= 0 else 'more'} memory")
    return ", ".join(said)


def _doubts(best: Record, level: Sequence[Record], timed: Sequence[Record], analysis: Analysis) -> list[str]:
    """What stands for and against the answer, the weightiest first."""
    row = analysis.row(best)
    took = references([analysis.row(r) for r in timed])
    said = []
    if len(spans(took)) > 1:
        said.append(f"no ranking: the references took {number(min(took))} to {number(max(took))} ms")
    elif level:
        said.append("level with " + " and with ".join(analysis.row(r)["toggles"] for r in level))
    if host_bound(row):
        waits = max(row[f"{arm}_host_share"] for arm in ARMS)
        said.append(f"host-bound: the device waits {100 * waits:.0f} % of the step")
    if moved(row):
        said.append(f"the reference moved {100 * row['reference_moved']:.0f} % between sessions")
    alone = "one session, whose interval knows nothing of the next"
    said.append(alone if row["sessions"] == 1 else f"{row['sessions']} sessions")
    own = row[MS]
    if doubtful := [
        analysis.row(r)["toggles"] for r in timed
        if analysis.row(r)["verdict"] == "unclear" and analysis.row(r)[f"{MS}_low"] < own
    ]:  # fmt: skip
        said.append(f"unclear and perhaps faster: {', '.join(doubtful)}")
    if row["dirty"]:
        said.append("uncommitted changes")
    return said


def published_answer(analysis: Analysis) -> str:
    """How the published numbers fared that have the baseline of one measured here: the rows' own, and those of a
    ladder's steps over the rungs below them, as the tables have both; '' where there are none."""
    rows = [row["outcome"] for row in compared(analysis)]
    steps = [word for own in ladders(analysis) for rung in own.rungs for word in outcomes(rung)]
    said = []
    if rows:
        numbers = "number was" if len(rows) == 1 else "numbers were"
        said.append(f"{len(rows)} published {numbers} measured here against the same baseline: ours {_counted(rows)}.")
    if steps:
        have = "step has" if len(steps) == 1 else "steps have"
        said.append(
            f"{len(steps)} of the ladder's {have} a published number over the rung below: ours {_counted(steps)}."
        )
    return " ".join(said)


def _counted(words: Sequence[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in ("above", "within", "below"))
