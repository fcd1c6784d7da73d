"""What all plots share: panels one under the other, row names, logarithmic axes, PNG and SVG bytes.

Drawn without pyplot's global state. All margins are known beforehand, from the widths of the texts: matplotlib's own
layout engine draws each figure three times to find them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, NullLocator
from PIL import Image

WIDTH, ROW = 9.5, 0.27  # inches: figure, one row
TITLE, AXIS = 0.38, 0.57  # inches above a panel and below it
SMALL = 8.5
FONTS = ["DejaVu Sans", "Arial"]  # the first is what widths are known of; the second is narrower
TWO_LINES = 0.8 * SMALL  # two lines have to fit a row
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)


class Strip(NamedTuple):
    """A panel of rows from the top: each with its label on the left and a note on the right, (text, colour). headings:
    what stands on a line of its own above a row, by the row's place."""

    title: str
    labels: list[str]
    notes: list[tuple[str, str]]
    axis: str
    headings: Mapping[int, str] = MappingProxyType({})


def lines(rows: int, headings: Mapping[int, str]) -> list[int]:
    """The line of each of so many rows, where some have a heading above them."""
    return [n + sum(at <= n for at in headings) for n in range(rows)]


def rows_figure(strips: Sequence[Strip], said: str) -> tuple[Figure, list[Axes]]:
    """A figure of panels of rows, to be drawn into at y = 0, 1, 2 …, or at their `lines`; said: what it leaves out."""
    labels = [[label if "\n" in label else short(label) for label in strip.labels] for strip in strips]
    left = widest([*(label for names in labels for label in names), *(h for s in strips for h in s.headings.values())])
    right = widest(text for strip in strips for text, _ in strip.notes)
    figure, axes = stack([len(strip.labels) + len(strip.headings) for strip in strips], left, right, said)
    for ax, strip, names in zip(axes, strips, labels, strict=True):
        ys = lines(len(names), strip.headings)
        _name_rows(ax, ys, names)
        size = 10.5 * min(1, 80 / max(1, len(strip.title)))  # a long one is as wide as the figure
        ax.set_title(strip.title, loc="left", fontsize=size, fontweight="bold")
        ax.set_xlabel(strip.axis, fontsize=SMALL)
        for y, (text, colour) in zip(ys, strip.notes, strict=True):
            _beside(ax, y, text, 0.08, ha="left", color=colour)
        for row, heading in strip.headings.items():
            y = ys[row] - 1
            _beside(ax, y, heading, -0.08, ha="right", color="#777777", fontstyle="italic")
            if row:
                beyond = left / (ax.get_position().width * WIDTH)
                ax.axhline(y - 0.5, -beyond, 1, color="#999999", lw=0.6, clip_on=False)
    return figure, axes


def stack(rows: Sequence[int], left: float, right: float, said: str = "") -> tuple[Figure, list[Axes]]:
    """A figure with one panel under the other, each as high as its number of rows, and room for a legend on top.

    left, right: inches beside the panels. said: what the figure leaves out, at its foot.
    """
    heights = [max(n, 2) * ROW for n in rows]
    top, foot = 0.4, 0.25 if said else 0.0
    whole = sum(heights) + len(rows) * (TITLE + AXIS) + top + foot
    figure = Figure(figsize=(WIDTH, whole), dpi=110)
    at = whole - top
    axes = []
    for height in heights:
        at -= TITLE + height
        axes.append(figure.add_axes((left / WIDTH, at / whole, (WIDTH - left - right) / WIDTH, height / whole)))
        at -= AXIS
    if said:
        figure.text(0.5, 0.06 / whole, said, ha="center", va="bottom", fontsize=SMALL, color="#D55E00")
    return figure, axes


def png(figure: Figure) -> bytes:
    """The same bytes from the same records."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return small_png(Image.fromarray(np.asarray(canvas.buffer_rgba())))


def small_png(image: Image.Image) -> bytes:
    """Of a picture of few colours: a palette, in a third of the bytes of all colours that smooth edges have."""
    buffer = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> bytes:
    """Text stays text, in whatever sans-serif font there is: it can be searched, and copied. `name` makes the ids
    differ from those of another figure in the same page, and the same in every run."""
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.sans-serif": FONTS}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def widest(texts: Iterable[str]) -> float:
    """Inches that the longest of these texts takes beside a panel."""
    return max((extent(text, size_of(text))[0] for text in set(texts)), default=0.0) + 0.2


def extent(text: str, size: float) -> tuple[float, float]:
    """Inches that a text of one or more lines takes in this size: width and height."""
    font, lines = FontProperties(size=size), text.split("\n")
    wide = max(text_to_path.get_text_width_height_descent(line, font, False)[0] for line in lines)
    return wide / 72, len(lines) * 1.25 * size / 72


def size_of(text: str) -> float:
    return TWO_LINES if "\n" in text else SMALL


def scales(ax: Axes) -> None:
    """The look of a panel in which both axes are numbers."""
    ax.tick_params(labelsize=SMALL - 1)
    ax.grid(color="#e6e6e6", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """At the top, in as many rows as its width needs."""
    rows = legend_rows([handle.get_label() for handle in handles], figure.get_figwidth())
    columns = math.ceil(len(handles) / rows)
    figure.legend(
        handles=list(handles), loc="upper center", ncols=columns, frameon=False, fontsize=SMALL, borderaxespad=0.2
    )


def legend_rows(labels: Sequence[str], width: float) -> int:
    """How many a legend needs on so many inches."""
    return math.ceil(sum(widest([label]) + 0.45 for label in labels) / width)


def _name_rows(ax: Axes, ys: Sequence[int], labels: Sequence[str]) -> None:
    ax.set_yticks([])
    for y, label in zip(ys, labels, strict=True):
        _beside(ax, y, label, -0.08, size_of(label), ha="right", linespacing=0.95)
    ax.set_ylim((ys[-1] if ys else -1) + 0.6, -0.6)
    ax.tick_params(axis="x", labelsize=SMALL)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)


def _beside(ax: Axes, y: float, text: str, inches: float, size: float = SMALL, **style: Any) -> None:
    """Text at the height of a row, so many inches right of its panel, or left of it where negative."""
    x = inches / (ax.get_position().width * WIDTH) + (1 if inches > 0 else 0)
    ax.text(x, y, text, transform=ax.get_yaxis_transform(), va="center", fontsize=size, **style)


def short(label: str, longest: int = 40) -> str:
    """A row's name that fits beside the axis, on two lines if need be; of too many toggles the last one, which
    tells a ladder's rungs apart."""
    names = label.split(" + ")
    filled = [names[0]]
    for i, name in enumerate(names[1:], start=2):
        behind = 2 if i < len(names) else 0  # for the " +" at the end of a line
        if len(filled[-1]) + 3 + len(name) + behind <= longest:
            filled[-1] += f" + {name}"
        else:
            filled[-1] += " +"
            filled.append(name)
    if len(filled) <= 2 and all(len(line) <= longest for line in filled):
        return "\n".join(filled)
    if len(names) > 1:
        label = f"{len(names) - 1} more + {names[-1]}"
    return label if len(label) <= longest else label[: longest - 1] + "…"


def log_axis(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis of ratios, its ticks round numbers with room between them; 1 always."""
    low, high = min([*values, 0.95]), max([*values, 1.05])
    margin = (high / low) ** 0.06
    span = math.log(high / low)
    kept: list[float] = []
    inside = [t for t in TICKS if low / margin <= t <= high * margin]
    # Neighbours are a fourteenth of the axis apart, and two of more than six digits and points together farther.
    for tick in sorted(inside, key=lambda t: (t != 1, t not in (0.5, 2, 5, 10), t)):
        if all(abs(math.log(tick / k)) > span * max(1 / 14, len(f"{tick:g}{k:g}") / 91) for k in kept):
            kept.append(tick)
    ax.set(xscale="log", xlim=(low / margin, high * margin))
    ax.xaxis.set_major_locator(FixedLocator(sorted(kept)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
