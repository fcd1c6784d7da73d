"""A grid of coloured cells with a text in each: what depends on two things at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.colors import Normalize, TwoSlopeNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lorabench.report.figure import SMALL, WIDTH, short, widest

LINE = 0.15  # inches of one line of text
SMALLEST = 4.5  # points: below it text is cut off rather than shrunk
WIDEST = 0.9  # inches of a column: few of them need not fill the figure
DARK = 0.45  # luminance below which black text would not be read


class Cell(NamedTuple):
    """`value` decides the colour, `text` is what stands there."""

    value: float
    text: str
    bold: bool = False


def grid(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], Cell],
    said: str,
    colours: str,
    norm: Normalize | TwoSlopeNorm,
) -> Figure:
    """A line a row, a column a column, both by name; a pair without a cell stays empty. Text shrinks until it fits its
    column; a column's name is broken at its spaces. `said`, at the foot, explains the cells; `colours` names one of
    matplotlib's colour maps."""
    labels, heads = [short(name) for name in rows], [name.replace(" ", "\n") for name in columns]
    left, foot = widest(labels), 0.35
    width = min(WIDEST, (WIDTH - left - 0.1) / len(columns))
    head = 0.12 + LINE * max(name.count("\n") + 1 for name in heads)
    lines = max(text.count("\n") + 1 for text in (*labels, *(cell.text for cell in cells.values())))
    body = len(rows) * (0.1 + LINE * lines)
    height = head + body + foot
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    ax = figure.add_axes((left / WIDTH, foot / height, width * len(columns) / WIDTH, body / height))
    size = _that_fits((cell.text for cell in cells.values()), width)
    for (row, column), cell in cells.items():
        _draw(ax, columns.index(column), rows.index(row), cell, colormaps[colours](float(norm(cell.value))), size)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(columns)), heads, fontsize=_that_fits(heads, width))
    ax.set_yticks(range(len(rows)), labels, fontsize=7.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    figure.text(0.5, 0.08 / height, said, ha="center", va="bottom", fontsize=SMALL)
    return figure


def _draw(ax: Any, x: int, y: int, cell: Cell, background: Any, size: float) -> None:
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=background, edgecolor="white"))
    ink = "#fefefe" if _luminance(background) < DARK else "#222222"
    weight = "bold" if cell.bold else "normal"
    ax.text(x, y, cell.text, ha="center", va="center", fontsize=size, color=ink, weight=weight, linespacing=1.1)


def _that_fits(texts: Iterable[str], inches: float) -> float:
    """The size in points, SMALL at most, at which every line of these texts is no wider than that."""
    wide = widest(line for text in texts for line in text.split("\n")) - 0.2
    return max(SMALLEST, min(SMALL - 0.5, SMALL * 0.85 * inches / wide)) if wide > 0 else SMALL


def _luminance(colour: Any) -> float:
    red, green, blue = to_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
