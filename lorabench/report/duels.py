"""How many times as fast one stack is as another, for every two of one table.

Two arms of a family shared rounds: `within` a process or `between` processes. In records of schemas 1 and 2 a record
that has the two as its arms is of trials made in turn: `direct`. Else it is the ratio of
their ratios to the reference that both were measured against, `indirect`: what both cells share cancels, and its
interval has the errors of both. Where the reference itself waited for its host, or was not equally fast in both cells,
only the two times are left: `unpaired`, whose interval knows nothing of what differs between two processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from lorabench.record.contrast import Speedup
from lorabench.record.schema import ARMS, Record
from lorabench.report.analysis import Analysis
from lorabench.report.cells import HOST_BOUND
from lorabench.report.contrasts import BETWEEN, WHOLE, WITHIN, how
from lorabench.report.grid import Cell, grid
from lorabench.report.heatmap import MAP
from lorabench.report.shares import of_two
from lorabench.report.words import number

REFERENCE = "reference"
DIRECT, INDIRECT, UNPAIRED = "direct", "indirect", "unpaired"

Stack = frozenset[str]


class Duel(NamedTuple):
    """`ratio`: the second's time / the first's, so above 1 the first is faster."""

    first: str
    second: str
    ratio: Speedup
    how: str


def each_against_each(records: Sequence[Record], analysis: Analysis) -> list[Duel]:
    """Every two stacks of these records (of one table), the reference among them, in their order. The pairs for which
    nothing was measured are left out; so is the least work, which is no stack."""
    timed = [r for r in records if r.is_candidate and not r.is_noise_floor and analysis.contrasts.of(r)]
    if not timed:
        return []
    base = _common([frozenset(r.reference) for r in timed])
    own = {analysis.row(r)["toggles"]: r for r in timed if frozenset(r.reference) == base}
    stacks = {REFERENCE: base, **{name: frozenset(r.candidate) for name, r in own.items()}}
    measured = _measured(timed[0], analysis)
    found = []
    for first, second in itertools.combinations(stacks, 2):
        duel = _shared(first, second, own, analysis) or _direct(first, second, stacks, measured, analysis)
        duel = duel or _indirect(first, second, own, analysis)
        found += [duel] if duel else []
    return found


def _common(stacks: Sequence[Stack]) -> Stack:
    return max(stacks, key=stacks.count)


def _measured(like: Record, analysis: Analysis) -> dict[tuple[Stack, Stack], Record]:
    """(reference, candidate) → record, of the model, workload and kind of `like`."""
    place = like.model, like.workload, like.kind
    return {
        (frozenset(r.reference), frozenset(r.candidate)): r
        for r in analysis.records
        if (r.model, r.workload, r.kind) == place and not r.is_noise_floor and analysis.contrasts.of(r)
    }


def _shared(first: str, second: str, own: dict[str, Record], analysis: Analysis) -> Duel | None:
    """Of two candidates that were measured together; None of the reference, which is in every record."""
    found = analysis.contrasts.beside(own[first], own[second]) if first in own else None
    return found and Duel(first, second, found.contrast.speedup, found.how)


def _direct(
    first: str,
    second: str,
    stacks: dict[str, Stack],
    measured: dict[tuple[Stack, Stack], Record],
    analysis: Analysis,
) -> Duel | None:
    a, b = stacks[first], stacks[second]
    if record := measured.get((b, a)):
        ratio = analysis.speedup(record)
        return ratio and Duel(first, second, ratio, how(record) or DIRECT)
    if record := measured.get((a, b)):
        ratio = analysis.speedup(record)
        return ratio and Duel(first, second, inverse(ratio), how(record) or DIRECT)
    return None


def _indirect(first: str, second: str, own: dict[str, Record], analysis: Analysis) -> Duel | None:
    waits = any(analysis.row(own[name])[f"{ARMS[0]}_host_share"] >= HOST_BOUND for name in (first, second))
    share = of_two(own[first], own[second], WHOLE, analysis.contrasts, waits)
    if share is None:
        return None
    return Duel(first, second, Speedup(*share[:3]), INDIRECT if share.paired else UNPAIRED)


def inverse(ratio: Speedup) -> Speedup:
    """The same comparison the other way round."""
    return Speedup(1 / ratio.centre, 1 / ratio.high, 1 / ratio.low)


def matrix(duels: Sequence[Duel]) -> Figure | None:
    """A line a stack: how many times as fast as that of the column, which has its number. None of no pair."""
    if not duels:
        return None
    names = list(dict.fromkeys(name for duel in duels for name in duel[:2]))
    columns = {name: str(n) for n, name in enumerate(names, start=1)}
    rows = {name: f"{n}: {name}" for name, n in columns.items()}
    cells = {}
    for duel in duels:
        cells[rows[duel.first], columns[duel.second]] = _cell(duel.ratio, duel.how)
        cells[rows[duel.second], columns[duel.first]] = _cell(inverse(duel.ratio), duel.how)
    farthest = max(0.05, *(abs(cell.value) for cell in cells.values()))
    together = {duel.how for duel in duels} <= {WITHIN, BETWEEN}
    marks = "bold: within one process, else between processes" if together else "bold: direct, ~: unpaired"
    said = f"above 1 the line's stack is faster than the column's; ±: 95 % interval; {marks}"
    return grid([*rows.values()], [*columns.values()], cells, said, MAP, TwoSlopeNorm(0, -farthest, farthest))


def _cell(ratio: Speedup, met: str) -> Cell:
    half = 100 * (ratio.high / ratio.low - 1) / 2
    mark = "~" if met == UNPAIRED else ""
    return Cell(math.log(ratio.centre), f"{mark}{ratio.centre:.2f}\n±{number(half, 2)} %", met in (DIRECT, WITHIN))
