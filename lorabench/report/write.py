"""A results folder's report: analysed once, then written, or shown on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lorabench.record.store import write_atomically
from lorabench.report import page, plots, recommendation, tables, terminal
from lorabench.report.analysis import Analysis, collector_paused
from lorabench.report.shown import Shown, in_groups, show


class Report:
    """All outputs of one folder. Raises RecordError (ValueError) for records that cannot be read."""

    def __init__(self, folder: Path, analysis: Analysis, shown: Shown) -> None:
        self.folder, self.analysis, self.shown = folder, analysis, shown

    @classmethod
    def of(cls, folder: str | Path, against: str | None = None) -> Report:
        """against: the name of the arm that all others are shown over; the reference, unless one is named."""
        with collector_paused():
            analysis = Analysis.read(folder, against=against)
            return cls(Path(folder), analysis, show(analysis))

    def write(self) -> list[Path]:
        """See `lorabench.report.write_report`."""
        with collector_paused():
            images = plots.plots(self.analysis)
            files = {
                "summary.csv": tables.csv(in_groups(self.shown, self.analysis)).encode(),
                "summary.md": tables.markdown(self.shown).encode(),
                "summary.tex": tables.latex(self.shown).encode(),
                **{f"plots/{name}.png": drawn.png for name, drawn in images.items()},
                **{f"plots/{name}.svg": drawn.svg for name, drawn in images.items()},
                "report.html": page.page(self.analysis, self.shown, recommendation.read(self.folder)).encode(),
            }
        for name in set(plots.NAMES) - set(images):
            for suffix in plots.SUFFIXES:
                (self.folder / "plots" / f"{name}{suffix}").unlink(missing_ok=True)
        return [write_atomically(self.folder / name, content) for name, content in files.items()]

    def show(self, console: Console) -> None:
        """The table on a terminal, or in a pipe."""
        terminal.print_table(self.shown, console)
