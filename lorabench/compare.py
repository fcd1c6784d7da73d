"""Two results folders against each other, cell by cell.

    python -m lorabench.compare results/before results/after
    python -m lorabench.compare results/before results/after --fail-on-regression
    python -m lorabench.compare results/before results/after against=packing

Cells are matched by content: model, workload, and the toggles of both arms. What is compared is the ratio that each
run measured in pairs, never milliseconds of one run with those of another: between them lie a reboot, a driver, a
different GPU. It is judged by the rules of a report's verdict, with the noise floors of both runs together. Where the
two runs are of different hardware, that is a row of its own: how long the same reference took on either, of the same
model and workload. Exit code 0; 1 with --fail-on-regression where a cell got slower, fails now or is gone, or A has
none; 2 for bad input. against=NAME compares every arm's ratio to the arm of that name in place of the reference.
"""

from __future__ import annotations

from lorabench.cli import complain, entry

if __name__ == "__main__":  # as in sweep.py
    entry("compare")

import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

from lorabench.report import against

if TYPE_CHECKING:  # scipy and pandas take seconds to import, which --help does not need
    from lorabench.record.contrast import Contrast, Speedup
    from lorabench.record.schema import Record
    from lorabench.record.stats import Verdict
    from lorabench.report.analysis import Analysis, Session

Outcome = Literal[
    "better", "worse", "same", "unclear", "fails now", "works now", "fails in both", "appeared", "vanished"
]  # fmt: skip
REGRESSIONS = ("worse", "fails now")
ROOMY = 30  # characters of a table's last column, where the others fold to leave it some room
_WORDS: dict[str, Outcome] = {"faster": "better", "slower": "worse", "same": "same", "unclear": "unclear"}


class Change(NamedTuple):
    """One cell in two runs. change: speed-up in B / speed-up in A with its 95 % interval, where both have one. verdict
    and doubt: what may be said of it, and in brackets why not more. shown: what the report of either run shows of the
    cell, its status where it has no ratio."""

    before: Record | None
    after: Record | None
    change: Speedup | None
    outcome: Outcome
    shown: tuple[str, str]
    verdict: Verdict | None = None
    doubt: str = ""


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Every cell of either run, A/A and the least work left out, which have no verdict; regressions first.

    A content that stands twice in a run (two designs share cells) counts as its last `ok` record.
    """
    from lorabench.report.analysis import Analysis

    return compared(Analysis(before, salt="a"), Analysis(after, salt="b"))


def compared(before: Analysis, after: Analysis) -> list[Change]:
    """`compare` of two runs that are analysed already, each with a salt of its own."""
    from lorabench.record import stats
    from lorabench.report.words import doubt

    first, second = _cells(before.records), _cells(after.records)
    raw = {k: c for k in first if k in second and (c := _change(before, first[k], after, second[k]))}
    adjusted = dict(zip(raw, stats.holm([c.p_value() for c in raw.values()]), strict=True))
    changes = []
    for content in [*first, *(k for k in second if k not in first)]:
        a, b, found = first.get(content), second.get(content), raw.get(content)
        shown = _shown(before, a), _shown(after, b)
        if a is None or b is None or found is None:
            outcome = _without_ratio(a, b)
            why = " (too few trials)" if outcome == "unclear" else ""
            changes.append(Change(a, b, None, outcome, shown, doubt=why))
            continue
        # The two runs' noise is independent: their floors add like standard errors.
        floors = [math.log1p(stats.noise_floor(run.floors.same(r))) for r, run in ((a, before), (b, after))]
        floor, p = math.expm1(math.hypot(*floors)), adjusted[content]
        verdict = stats.verdict(found.speedup, p, floor, found.trials) or "unclear"
        why = doubt(verdict, found.low, found.high, floor, p, found.trials)
        changes.append(Change(a, b, found.speedup, _WORDS[stats.direction(verdict)], shown, verdict, why))
    return sorted(changes, key=lambda c: (c.outcome not in REGRESSIONS, c.outcome))


def _change(before: Analysis, first: Record, after: Analysis, second: Record) -> Contrast | None:
    """The ratio in the second run / the ratio in the first; None where one of them has none."""
    a, b = before.contrasts.of(first), after.contrasts.of(second)
    return b.difference(a) if a and b else None


def _shown(run: Analysis, record: Record | None) -> str:
    from lorabench.report.cells import whole

    return (whole(run.row(record)) or record.status) if record else ""


def _cells(records: Sequence[Record]) -> dict[tuple[Any, ...], Record]:
    found: dict[tuple[Any, ...], Record] = {}
    for r in records:
        content = (r.kind, r.model, r.workload, frozenset(r.reference), frozenset(r.candidate))
        if r.is_candidate and not r.is_noise_floor and (r.status == "ok" or content not in found):
            found[content] = r
    return found


def _without_ratio(before: Record | None, after: Record | None) -> Outcome:
    if before is None or after is None:
        return "appeared" if before is None else "vanished"
    if before.status == "ok" or after.status == "ok":
        return "unclear" if before.status == after.status else "fails now" if before.status == "ok" else "works now"
    return "fails in both"


class Hardware(NamedTuple):
    """One reference on two machines: the median of its medians beside all candidates, in milliseconds."""

    title: str
    reference: str
    before_ms: float
    after_ms: float


def hardware(before: Analysis, after: Analysis) -> list[Hardware]:
    """The references that both runs have times of; [] where they name the same devices, or do not name them."""
    names = [{name for name in run.devices if name} for run in (before, after)]
    if not all(names) or names[0] == names[1]:
        return []
    took = [_references(run.records) for run in (before, after)]
    return [
        Hardware(f"{model} @ {workload}", " + ".join(sorted(base)), ms, took[1][kind, model, workload, base])
        for (kind, model, workload, base), ms in took[0].items() if (kind, model, workload, base) in took[1]
    ]  # fmt: skip


def _references(records: Sequence[Record]) -> dict[tuple[Any, ...], float]:
    """(kind, model, workload, reference) → milliseconds."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for r in records:
        if ms := r.ms("reference"):
            found.setdefault((r.kind, r.model, r.workload, frozenset(r.reference)), []).append(median(ms))
    return {at: median(every) for at, every in found.items()}


def machine_changes(before: Sequence[Session], after: Sequence[Session]) -> list[tuple[str, str, str]]:
    """(what, in A, in B) for whatever differs between the machines, versions and commits of two runs."""
    a, b = _facts(before), _facts(after)
    return [(k, a.get(k, "unknown"), b.get(k, "unknown")) for k in sorted({*a, *b}) if a.get(k) != b.get(k)]


def _facts(sessions: Sequence[Session]) -> dict[str, str]:
    values: dict[str, set[str]] = {}
    for session in sessions:
        machine = session.get("machine") or {}
        flat = {k: session.get(k) for k in ("lorabench", "commit", "dirty")}
        flat |= {
            k: machine.get(k) for k in ("device", "name", "gpus", "driver", "cores", "memory_bytes", "os", "python")
        }
        flat |= {f"package {k}": v for k, v in (machine.get("packages") or {}).items()}
        for name, value in flat.items():
            if value is not None:
                values.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(found)) for name, found in values.items()}


def hardware_table(rows: Sequence[Hardware]) -> Table:
    """For the console. No interval: nothing pairs the two."""
    from lorabench.report.words import number

    made = Table("model @ workload", "reference", "A, ms", "B, ms", "A / B", title="The same step on other hardware")
    for row in rows:
        cells = [row.title, row.reference, number(row.before_ms), number(row.after_ms)]
        made.add_row(*(Text(cell) for cell in [*cells, number(row.before_ms / row.after_ms)]))
    return made


def table(changes: Sequence[Change]) -> Table:
    """For the console: regressions first."""
    from lorabench.report.contrasts import toggles

    made = Table("model @ workload", "toggle", "A × [95 %]", "B × [95 %]", "B / A [95 %]", "outcome")
    for c in changes:
        record = c.after or c.before
        assert record is not None
        cells = [f"{record.model} @ {record.workload}", toggles(record), *c.shown, _figure(c), c.outcome + c.doubt]
        style = "red" if c.outcome in REGRESSIONS else "green" if c.outcome in ("better", "works now") else ""
        made.add_row(*(Text(cell) for cell in cells), style=style)
    return made


def _print(made: Table, console: Console) -> None:
    """Names, then numbers, fold between words where there is no room for them. A name is whole, to be copied or
    searched for: what does not fit so is wider than the console."""
    wide = console.options.update(width=10 * console.width)
    for columns in (made.columns[:2], made.columns[2:-1]):
        if Measurement.get(console, wide, made).maximum > console.width:
            made.columns[-1].max_width = ROOMY
            for column in columns:
                column.width = measure_renderables(console, wide, [column.header, *column.cells]).minimum
    if (least := Measurement.get(console, wide, made).minimum) > console.width:
        made.width = least
    console.print(made, crop=False)


def _figure(found: Change) -> str:
    """The ratio of the two ratios, where the verdict permits a figure."""
    from lorabench.record.stats import without_figure
    from lorabench.report.words import interval, speedup

    if found.change and without_figure(found.verdict):
        return interval(found.change.low, found.change.high, found.outcome)
    return speedup(found.change)


def main(arguments: list[str]) -> int:
    parser = ArgumentParser("python -m lorabench.compare", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="the results folder to compare with")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the results folder in question")
    parser.add_argument("against", nargs="?", type=against, metavar="against=NAME", help="show every arm over this one")
    parser.add_argument(
        "--fail-on-regression", action="store_true", help="exit 1 where a cell is slower, failed or gone"
    )
    asked = parser.parse_intermixed_args(arguments)
    from lorabench.record.store import RecordError, check_folder

    try:
        check_folder(asked.run_a)
        check_folder(asked.run_b)
    except RecordError as error:
        return complain(error)
    console = Console()
    console.print("reading both …", style="dim")
    from lorabench.report.analysis import Analysis
    from lorabench.report.terminal import unbroken

    console = unbroken(console)
    runs = ((asked.run_a, "a"), (asked.run_b, "b"))
    try:
        before, after = (Analysis.read(run, salt, asked.against) for run, salt in runs)
        changes = compared(before, after)
    except (OSError, ValueError) as error:
        return complain(error)
    counts = [c.outcome for c in changes]
    console.print(Text(", ".join(f"{counts.count(o)} {o}" for o in dict.fromkeys(counts)) or "no cells to compare"))
    shown = changes
    if rows := hardware(before, after):
        _print(hardware_table(rows), console)
        shown = [c for c in changes if c.before and c.after]  # the two need not have measured the same
    _print(table(shown), console)
    for what, a, b in machine_changes(before.sessions, after.sessions):
        console.print(Text(f"differs: {what}: {a} → {b}"))
    return _regressions(changes, asked.run_a, asked.run_b) if asked.fail_on_regression else 0


def _regressions(changes: Sequence[Change], run_a: Path, run_b: Path) -> int:
    """The exit code. A cell that was measured once and is not any more may hide a regression."""
    from lorabench.report.contrasts import toggles

    before = [c.before for c in changes if c.before]
    if gone := [c.before for c in changes if c.before and not c.after]:
        cells = "; ".join(f"{r.model} @ {r.workload}: {toggles(r)}" for r in gone)
        return complain(f"{run_b} lacks {len(gone)} of the {len(before)} cells of {run_a}: {cells}", 1)
    if not before:
        return complain(f"{run_a} has no cells to compare {run_b} with", 1)
    return 1 if any(c.outcome in REGRESSIONS for c in changes) else 0
