"""What a reader wants to know first: which records are the fastest, what one buys, and how published numbers fared.

The fastest is the one with the fewest milliseconds; those that are not told apart from it are named beside it.
README.md's tables go by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lorabench.record.schema import TOTAL, Record
from lorabench.report.analysis import Analysis, Row
from lorabench.report.attribution_tables import outcomes
from lorabench.report.cells import host_bound, whole
from lorabench.report.ladder_summary import ladders
from lorabench.report.published import compared
from lorabench.report.words import number, percent

MS = f"{TOTAL}_candidate_ms"


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
        said.append(f"on this host {percent(1 - row[MS] / row[f'{TOTAL}_reference_ms'])} less time")
    else:
        said.append(f"{whole(row)} × as fast")
    if math.isfinite(saved := row["memory_saved_pct"]):
        said.append(f"{number(abs(saved))} % {'less' if saved >= 0 else 'more'} memory")
    return ", ".join(said)


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
