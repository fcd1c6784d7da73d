"""What the notebooks show: a sentence, a table, a figure; and which panels of an analysis they draw."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import PIL.Image
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from lorabench.report.analysis import Analysis
from lorabench.report.figure import png
from lorabench.report.panels import Mark, Panel, panels_of
from lorabench.report.plots import figures
from lorabench.report.tables import md
from lorabench.report.words import number

COLOURS = 16  # of a figure, edges of letters included


def say(text: str) -> None:
    """Markdown, for sentences with numbers that the cell has computed."""
    display(Markdown(text))


def table(frame: pd.DataFrame, digits: int = 3) -> None:
    """A frame as a Markdown table; what is unknown is an empty cell."""
    rows = [[_text(value, digits) for value in row] for row in frame.itertuples(index=False)]
    lines = [[md(str(name)) for name in frame.columns], ["---"] * len(frame.columns), *rows]
    say("\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "*No row.*")


def figure(drawn: Figure | None, otherwise: str = "Nothing to draw: no record here has it.") -> None:
    """A figure as PNG; without one the sentence that says why."""
    if drawn is None:
        say(otherwise)
    else:
        with PIL.Image.open(io.BytesIO(png(drawn))) as image:
            few = image.convert("RGB").quantize(COLOURS, PIL.Image.Quantize.FASTOCTREE)  # half of the bytes
        buffer = io.BytesIO()
        few.save(buffer, format="PNG", optimize=True)
        display(Image(buffer.getvalue()))


def sweep_named(runs: Mapping[str, Analysis], suite: str) -> Analysis | None:
    """The sweep in the folder of this name, wherever it lies below results/."""
    return next((run for name, run in runs.items() if name.rpartition("/")[2] == suite), None)


def measured_figure(runs: Mapping[str, Analysis], suite: str, name: str) -> None:
    """A suite's figure by its name; where nothing of it was measured, the sentence that says so."""
    run = sweep_named(runs, suite)
    drawn = figures(run).get(name) if run else None
    command = f"`python -m lorabench.sweep suite={suite}` would measure it."
    figure(drawn[0] if drawn else None, f"**Not measured yet**: `results/` has no times of this. {command}")


def panels_that(analysis: Analysis, wanted: Callable[[Mark], bool]) -> list[Panel]:
    """The panels of an analysis with the rows that are wanted; a panel without any is left out."""
    kept = [panel._replace(marks=[mark for mark in panel.marks if wanted(mark)]) for panel in panels_of(analysis)]
    return [panel for panel in kept if panel.marks]


def _text(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return number(value, digits)
    return "" if value is None or value is pd.NaT else md(str(value))
