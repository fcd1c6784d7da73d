"""Predibase's ladder of several results folders, a data set or more each: their tables side by side. Each folder's
verdicts are its own, as its summary.md has them: what is corrected for many comparisons counts those of one folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lorabench.report.analysis import Analysis
from lorabench.report.attribution import Rung
from lorabench.report.attribution_tables import SHAPLEY, AnyTable, attribution_tables, increment_is_clear
from lorabench.report.ladder_summary import MUCH, ladders, start_to_end, steps_table
from lorabench.report.words import number, too_few


def ends(found: Sequence[Analysis]) -> AnyTable:
    """A row a workload and training set, see `start_to_end`."""
    made = [start_to_end(analysis) for analysis in found]
    title, headings, _ = made[0]
    return title, headings, [row for _, _, rows in made for row in rows]


def steps(found: Sequence[Analysis]) -> AnyTable:
    """A row a step, a column a workload, and what was published for the step, see `steps_table`."""
    made = [steps_table(analysis) for analysis in found]
    names = dict.fromkeys(row[0] for _, _, rows in made for row in rows)
    rows = []
    for name in names:
        its = [
            next((row for row in rows if row[0] == name), [name, *[""] * (len(heads) - 1)]) for _, heads, rows in made
        ]
        published = dict.fromkeys(row[-1] for row in its if row[-1])
        rows.append([name, *(cell for row in its for cell in row[1:-1]), "; ".join(published)])
    rung, *_, last = made[0][1]
    return made[0][0], [rung, *(title for _, heads, _ in made for title in heads[1:-1]), last], rows


def today(found: Sequence[Analysis]) -> Iterator[str]:
    """A sentence a step: on how many of the workloads it gained, cost or showed neither, and by how much."""
    every = [(rung, analysis) for analysis in found for own in ladders(analysis) for rung in own.rungs]
    published = {row[0]: row[-1] for row in steps(found)[2]}
    for name in dict.fromkeys(rung.added for rung, _ in every):
        yield _sentence(name, [(rung, a) for rung, a in every if rung.added == name], published[name])


def _sentence(name: str, rungs: Sequence[tuple[Rung, Analysis]], published: str) -> str:
    timed = [(rung.increment, rung.trials, increment_is_clear(rung, a)) for rung, a in rungs if rung.increment]
    if not timed:
        return f"`{name}` has no time here: {', '.join(dict.fromkeys(rung.record.status for rung, _ in rungs))}."
    centres = [gain.centre for gain, _, is_clear in timed if is_clear]
    gains, costs = (sum(holds(x) for x in centres) for holds in (lambda x: x >= MUCH, lambda x: x <= 1 / MUCH))
    few = sum(too_few(gain, trials) for gain, trials, _ in timed)
    rest = len(timed) - gains - costs - few
    verdicts = {"gains on": gains, "costs on": costs, "shows no clear change on": rest, "has too few trials on": few}
    counted = " and ".join(f"{verdict} {n}" for verdict, n in verdicts.items() if n)
    span = " to ".join(dict.fromkeys(f"×{number(end(centres))}" for end in (min, max))) if centres else ""
    notes = "; ".join(filter(None, (span, published)))
    return f"`{name}` {counted} of {len(timed)} workloads{f' ({notes})' if notes else ''}."


def split(found: Sequence[Analysis]) -> Iterator[tuple[str, AnyTable]]:
    """Shapley values, a table a model @ workload, with what it is called."""
    for analysis in found:
        for group in analysis.groups:
            for table in attribution_tables(group.records, analysis):
                if table[0].startswith(SHAPLEY):
                    yield f"{group.title}: {table[0]}", table
