"""What the records of a folder mean: one analysis, and the tables, plots, page and console table drawn from it.

Belongs here: whatever takes more than one record to say, published numbers to hold them against, and how all is shown.
May import: contract, plan, record, measure, run; only advice and the commands import it.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# What is imported inside the functions (pandas, matplotlib, jinja2) takes seconds that a sweep should not wait for
# before its first cell.


def load_results(folder: str | Path, against: str | None = None) -> pd.DataFrame:
    """The tidy table of one results folder, a row a contrast: see report/tidy. against: the name of an arm that all
    others of its family are held against, in place of what the designs show. Raises RecordError (a ValueError). A
    folder without a record, as a sweep that was stopped early leaves it, gives an empty table and a UserWarning."""
    from lorabench.report.analysis import Analysis, collector_paused

    with collector_paused():  # until the records are gone again
        table = Analysis.read(folder, against=against).table
    if table.empty:
        warnings.warn(f"the table of {folder} is empty: there is no record to make a row of", stacklevel=2)
    return table


def write_report(folder: str | Path) -> list[Path]:
    """Write summary.csv, .md, .tex, plots/*.png and *.svg and report.html into a results folder; returns their paths.

    Any records will do, none included. Each file is replaced at once or not at all; a plot that these records no
    longer have is removed, so that none is stale. Raises RecordError (ValueError) for records that cannot be read,
    OSError where the folder cannot be written.
    """
    from lorabench.report.write import Report

    return Report.of(folder).write()


def against(word: str) -> str:
    """The name in the argument `against=NAME`. Raises ArgumentTypeError for any other word."""
    key, _, name = word.partition("=")
    if key != "against" or not name:
        raise ArgumentTypeError(f"expected against=NAME, got {word!r}")
    return name
