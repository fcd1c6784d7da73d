"""Tables of the pipeline that was simulated, from results/cpu/bubbles: for docs/scheduling.md and beside open claims.

readme_tables.py writes them. Nothing in them is measured, and each says so, but for stages that really slept: see
benchmarks/pipeline_bubbles.py and docs/pipelines.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lorabench.report.claims import Tabled, tabled

TABLE = "cpu/bubbles/bubbles.csv"
SLEEPERS = "cpu/pipeline_bubbles/bubbles.csv"
# Of each table the column, a figure with its unit, and whether only a method's row of most adapters is shown.
SHOWN = {
    "bubbles, simulated": ("bubble_pct", "{:.1f} %", False),
    "tokens a second, simulated": ("tokens_s", "{:.0f}", True),
}


def of(results: Path, column: str, figure: str, most: bool) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): a row a method and number of adapters, a column a workload; of bubbles one more, published."""
    table = pd.read_csv(results / TABLE, keep_default_na=False)
    if most:
        table = table[table.adapters == table.groupby("method").adapters.transform("max")]
    workloads = list(dict.fromkeys(table.workload))
    bubbles = column == "bubble_pct"
    heads = ["schedule", "adapters", *(f"{name} ({_lengths(table, name)})" for name in workloads)]
    rows = []
    for (method, adapters), own in table.groupby(["method", "adapters"], sort=False):
        found = {row["workload"]: row for row in own.to_dict("records")}
        figures = [figure.format(float(found[name][column])) for name in workloads]
        rows.append([f"`{method}`", str(adapters), *figures, *([_published(found[workloads[0]])] if bubbles else [])])
    return [*heads, *(["published"] if bubbles else [])], rows


def of_sleepers(results: Path) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): bubbles as they are predicted of stages that sleep, and as they were measured."""
    heads = ["stages that sleep", "ranks", "stages", "micro-batches", "predicted", "measured"]
    found = pd.read_csv(results / SLEEPERS)
    ratios = [found[name].map("{:.2f} %".format) for name in ("predicted_pct", "measured_pct")]
    counts = [found[name].map(str) for name in ("ranks", "stages", "micro_batches")]
    return heads, [list(row) for row in zip(found["case"], *counts, *ratios, strict=True)]


def _published(row: Mapping[Hashable, Any]) -> str:
    if not row["published_pct"]:
        return ""
    return f"{float(row['published_pct']):.2f} %"


def _lengths(table: pd.DataFrame, workload: str) -> str:
    (said,) = set(table[table.workload == workload].lengths)
    return str(said)


def beside(found: Tabled, unit: str, results: Path) -> tuple[str, str]:
    """(the numbers and how they came to be, a link to them), as Markdown."""
    numbers, table = tabled(found, results), Path(found.table)
    span = " to ".join(dict.fromkeys(f"{n:.1f}" for n in (min(numbers), max(numbers))))
    return f"{span} {unit} ({found.how})", f"[{table.stem}](RESULTS/{table.with_suffix('.md').as_posix()})"
