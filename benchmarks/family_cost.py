"""Where a sweep's wall time went: seconds by arm and by part, from the records of a results folder.

    python benchmarks/family_cost.py results/h200/peers

A table a family and session. What belongs to all of its arms (processes, gold, judging) stands with its reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lorabench.record.costs import trials_share
from lorabench.record.pairs import by_place
from lorabench.record.schema import ArmRecord, Cost
from lorabench.record.store import RecordError, read_arms
from lorabench.report.terminal import unbroken

PARTS = [name for name in Cost.model_fields if name != "wall"]


def tables(arms: Sequence[ArmRecord]) -> list[Table]:
    """One for each family and session."""
    return [_table(siblings.arms) for siblings in by_place(arms).values()]


def _table(arms: Sequence[ArmRecord]) -> Table:
    first = arms[0]
    title = f"{first.model} @ {first.workload}, session {first.session}"
    table = Table("arm", "status", "wall, s", *PARTS, "trials, share", title=title, title_justify="left")
    for arm in arms:
        table.add_row(Text(arm.arm), arm.status, *_row([arm]))
    table.add_section()
    table.add_row("all", "", *_row(arms))
    return table


def _row(arms: Sequence[ArmRecord]) -> list[str]:
    costs = [arm.cost for arm in arms if arm.cost]
    seconds = [sum(getattr(cost, part) for cost in costs) for part in ("wall", *PARTS)]
    share, wall = trials_share(arms)
    return [*(f"{s:.1f}" if s else "" for s in seconds), f"{share:.0%}" if wall else ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the output of a sweep")
    folder = parser.parse_args(arguments).folder
    try:
        arms = read_arms(folder)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    if not arms:
        print(f"{folder}: its records are of schemas 1 and 2, which do not tell arms apart", file=sys.stderr)
        return 2
    console = unbroken(Console())
    for table in tables(arms):
        console.print(table)
    share, wall = trials_share(arms)
    print(f"trials: {share:.0%} of {wall:.1f} s" if wall else "no record says what it cost")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
