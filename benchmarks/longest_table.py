"""How long one sample may be by arm and memory, from results/h200/longest_sample: for docs/checkpointing.md.

readme_tables.py writes it. The lengths lie on lines, see benchmarks/longest_sample.py; no step at such a length ran.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lorabench.report.words import number

TABLE = "h200/longest_sample/longest_sample.csv"
OURS = "lora_kernels + adapters_in_compute_dtype + transformers_loss + "


def of(results: Path) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): a row an arm, ours first and of each kind the longest first; a column a memory, in thousands of
    tokens."""
    wide = pd.read_csv(results / TABLE).pivot(index="arm", columns="memory_gib", values="tokens")
    wide = wide.sort_values(max(wide.columns), ascending=False)
    arms = sorted(wide.index, key=lambda arm: not arm.startswith(OURS))
    rows = [[_name(arm), *(number(tokens / 1000) for tokens in wide.loc[arm])] for arm in arms]
    return ["arm", *(f"{gib} GiB" for gib in wide.columns)], rows


def _name(arm: str) -> str:
    named = f"`{arm.removeprefix(OURS)}`" if arm != "reference" else "the reference"
    return f"{named} on our kernels" if arm.startswith(OURS) else named
