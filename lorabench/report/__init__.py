"""What the records mean: statistics, tables, plots and a page, all from records.jsonl and environment.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# What is imported inside the functions (pandas, matplotlib, jinja2) takes seconds that a sweep's runner, which needs
# only report.stats, should not wait for.


def load_results(folder: str | Path) -> pd.DataFrame:
    """The tidy table of one results folder, a row a cell: see report.analysis. Raises RecordError (a ValueError)."""
    from lorabench.report.analysis import load_results

    return load_results(folder)


def write_report(folder: str | Path) -> list[Path]:
    """Write summary.csv, .md, .tex, plots/*.png and report.html into a results folder; returns their paths.

    Any records will do, none included. Each file is replaced at once or not at all; a plot that these records no
    longer have is removed, so that none is stale. Raises RecordError (ValueError) for records that cannot be read,
    OSError where the folder cannot be written.
    """
    from lorabench.report import page, plots, tables
    from lorabench.report.analysis import frame, read_sessions
    from lorabench.record.store import read_records, write_atomically

    folder = Path(folder)
    records, sessions = read_records(folder), read_sessions(folder)
    images = plots.plots(records, sessions)
    files = {
        "summary.csv": tables.csv(frame(records, sessions)).encode(),
        "summary.md": tables.markdown(records, sessions).encode(),
        "summary.tex": tables.latex(records, sessions).encode(),
        **{f"plots/{name}": png for name, png in images.items()},
        "report.html": page.page(records, sessions, images).encode(),
    }
    for name in set(plots.NAMES) - set(images):
        (folder / "plots" / name).unlink(missing_ok=True)
    return [write_atomically(folder / name, content) for name, content in files.items()]
