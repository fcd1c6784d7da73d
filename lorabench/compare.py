"""Two results folders against each other: python -m lorabench.compare RUN_A RUN_B [--fail-on-regression]

Cells are matched by content: model, workload, and the toggles of both arms. What is compared is the ratio that each
run measured in pairs, never milliseconds of one run with those of another: between them lie a reboot, a driver, a
different GPU. Exit code 0; 1 with --fail-on-regression where a cell got slower or fails now; 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.stats import t as student

from lorabench.record import stats
from lorabench.report.analysis import Session, noise_interval, phase_speedup, read_sessions, toggles
from lorabench.record.stats import Speedup
from lorabench.report.tables import ratio
from lorabench.record.schema import Record
from lorabench.record.store import read_records

Outcome = Literal[
    "better", "worse", "same", "unclear", "fails now", "works now", "fails in both", "appeared", "vanished"
]  # fmt: skip
REGRESSIONS = ("worse", "fails now")
_WORDS: dict[str | None, Outcome] = {"faster": "better", "slower": "worse", "same": "same", "unclear": "unclear"}


class Change(NamedTuple):
    """One cell in two runs. change: speed-up in B / speed-up in A with its 95 % interval, where both have one."""

    before: Record | None
    after: Record | None
    change: Speedup | None
    outcome: Outcome


class Raw(NamedTuple):
    """A change before the correction over all cells."""

    change: Speedup
    p: float
    trials: int


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Every cell of either run, A/A left out; regressions first.

    A content that stands twice in a run (two designs share cells) counts as its last `ok` record.
    """
    first, second = _cells(before), _cells(after)
    both = [k for k in first if k in second]
    raw = {k: r for k in both if (r := _raw(first[k], second[k]))}
    adjusted = dict(zip(raw, stats.holm([r.p for r in raw.values()]), strict=True))
    changes = []
    for content in [*first, *(k for k in second if k not in first)]:
        a, b, found = first.get(content), second.get(content), raw.get(content)
        if found is None:
            changes.append(Change(a, b, None, _without_ratio(a, b)))
            continue
        # The two runs' noise is independent: their floors add like standard errors.
        floors = [stats.noise_floor(noise_interval(r, run)) for r, run in ((a, before), (b, after)) if r]
        logs = [math.log1p(floor) for floor in floors]
        verdict = stats.verdict(found.change, adjusted[content], math.expm1(math.hypot(*logs)), found.trials)
        changes.append(Change(a, b, found.change, _WORDS[verdict or "unclear"]))
    return sorted(changes, key=lambda c: (c.outcome not in REGRESSIONS, c.outcome))


def _cells(records: Sequence[Record]) -> dict[tuple[Any, ...], Record]:
    found: dict[tuple[Any, ...], Record] = {}
    for r in records:
        content = (r.model, r.workload, frozenset(r.reference), frozenset(r.candidate))
        if not r.is_noise_floor and (r.status == "ok" or content not in found):
            found[content] = r
    return found


def _raw(before: Record, after: Record) -> Raw | None:
    """The change of one cell's ratio, with the p-value that there is none (Student's t on the bootstrap's error)."""
    ratios = [phase_speedup(r, "total") if r.status == "ok" else None for r in (before, after)]
    if ratios[0] is None or ratios[1] is None:
        return None
    centre = math.log(ratios[1].centre / ratios[0].centre)
    drawn = _draw(after, "b") - _draw(before, "a")
    trials = min(len(ms) for r in (before, after) for ms in _times(r))
    low, high = np.quantile(drawn, stats.tails(trials))
    error = float(np.std(drawn)) * math.sqrt(trials / (trials - 1))
    p = 2 * float(student.sf(abs(centre) / error, trials - 1)) if error else float(centre == 0)
    return Raw(Speedup(*(math.exp(x) for x in (centre, min(low, centre), max(high, centre)))), p, trials)


def _times(record: Record) -> tuple[list[float], list[float]]:
    total = record.phases["total"] if record.phases else None
    assert total and total.reference_ms and total.candidate_ms  # phase_speedup found a ratio in them
    return total.reference_ms, total.candidate_ms


def _draw(record: Record, run: str) -> np.ndarray:
    seed = zlib.crc32(f"{run}{record.key}".encode())  # one key in two runs must not draw the same rounds
    return stats.replicates(*_times(record), record.pairing != "abba", seed)


def _without_ratio(before: Record | None, after: Record | None) -> Outcome:
    if before is None or after is None:
        return "appeared" if before is None else "vanished"
    if before.status == "ok" or after.status == "ok":
        return "unclear" if before.status == after.status else "fails now" if before.status == "ok" else "works now"
    return "fails in both"


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


def table(changes: Sequence[Change]) -> Table:
    """For the console: regressions first."""
    made = Table("model @ workload", "toggle", "A × [95 %]", "B × [95 %]", "B / A [95 %]", "outcome")
    for c in changes:
        record = c.after or c.before
        assert record is not None
        cells = [f"{record.model} @ {record.workload}", toggles(record), _shown(c.before), _shown(c.after)]
        cells += [ratio(*c.change) if c.change else "", c.outcome]
        style = "red" if c.outcome in REGRESSIONS else "green" if c.outcome in ("better", "works now") else ""
        made.add_row(*(Text(cell) for cell in cells), style=style)
    return made


def _shown(record: Record | None) -> str:
    if record is None:
        return ""
    found = phase_speedup(record, "total") if record.status == "ok" else None
    return ratio(*found) if found else record.status


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lorabench.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="the results folder to compare with")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the results folder in question")
    parser.add_argument("--fail-on-regression", action="store_true", help="exit 1 where a cell is slower or fails now")
    asked = parser.parse_args(arguments)
    try:
        runs = [(read_records(path), read_sessions(path)) for path in (asked.run_a, asked.run_b)]
        changes = compare(runs[0][0], runs[1][0])
    except (OSError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    console = Console()
    for what, a, b in machine_changes(runs[0][1], runs[1][1]):
        console.print(Text(f"differs: {what}: {a} → {b}"))
    console.print(table(changes))
    counts = [c.outcome for c in changes]
    console.print(Text(", ".join(f"{counts.count(o)} {o}" for o in dict.fromkeys(counts)) or "no cells to compare"))
    return 1 if asked.fail_on_regression and any(o in REGRESSIONS for o in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
