"""The figure of the speed-up where there are too many groups for a panel each: a line a group, a column a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lorabench.record.schema import TOTAL
from lorabench.record.stats import without_figure
from lorabench.report.figure import ROW, SMALL, WIDTH, short, widest
from lorabench.report.panels import VERMILLION, Figured, Mark, Panel, that_fit
from lorabench.report.words import number

MAP = "PuOr"  # its ends are told apart by the colour-blind; its middle, a ratio of 1, is white
HEAD = 0.95  # inches for the columns' names
TEXT = 7.5
STRONG = 0.55  # of a colour's distance from the middle: beyond it black text would not be read


def heat_map(panels: Sequence[Panel]) -> Figured:
    """Each cell says its ratio; `?` is unclear, milliseconds are host-bound, a word is why there is none. One scale of
    colours for all."""
    shown, left_out = that_fit(panels)
    kinds = list(dict.fromkeys(panel.kind.name for panel in shown))
    blocks = [[panel for panel in shown if panel.kind.name == name] for name in kinds]
    left = widest(panel.title for panel in shown)
    foot = 0.5
    height = sum(HEAD + len(block) * ROW for block in blocks) + foot
    figure = Figure(figsize=(WIDTH, height), dpi=110)
    farthest = max(
        (abs(math.log(m.row[f"{TOTAL}_speedup"])) for p in shown for m in p.marks if _is_ratio(m)), default=0
    )
    norm = TwoSlopeNorm(0, -max(farthest, 0.05), max(farthest, 0.05))
    at = height
    for block in blocks:
        at -= HEAD + len(block) * ROW
        size = ((WIDTH - left - 0.1) / WIDTH, len(block) * ROW / height)
        _block(figure.add_axes((left / WIDTH, at / height, *size)), block, norm)
    said = "speed-up of the total; violet is faster, orange slower; [a, b]: no figure; ms: host-bound"
    figure.text(0.5, 0.26 / height, said, ha="center", va="bottom", fontsize=SMALL)
    if left_out:
        figure.text(0.5, 0.06 / height, left_out, ha="center", va="bottom", fontsize=SMALL, color=VERMILLION)
    return figure, left_out


def _is_ratio(mark: Mark) -> bool:
    return mark.has(f"{TOTAL}_speedup") and not without_figure(mark.row["verdict"]) and not mark.host_bound


def _block(ax: Axes, panels: Sequence[Panel], norm: TwoSlopeNorm) -> None:
    names = list(dict.fromkeys(mark.row["toggles"] for panel in panels for mark in panel.marks))
    for y, panel in enumerate(panels):
        for mark in panel.marks:
            x = names.index(mark.row["toggles"])
            background, dark = "#f2f2f2", False
            if _is_ratio(mark):
                scaled = float(norm(math.log(mark.row[f"{TOTAL}_speedup"])))
                background, dark = colormaps[MAP](scaled), abs(scaled - 0.5) * 2 > STRONG
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=background, edgecolor="white"))
            ax.text(x, y, _text(mark), ha="center", va="center", fontsize=TEXT, color=_ink(mark, dark))
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylim(len(panels) - 0.5, -0.5)
    ax.set_xticks(range(len(names)), [short(name, 24) for name in names], rotation=25, ha="left", fontsize=TEXT)
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(panels)), [panel.title for panel in panels], fontsize=SMALL)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _ink(mark: Mark, dark: bool) -> str:
    """Grey and white where the cell has a colour of its own, in a dark page too; black is the page's own."""
    if _is_ratio(mark):
        return "#fefefe" if dark else "#222222"
    return "black" if mark.has(f"{TOTAL}_speedup") else VERMILLION


def _text(mark: Mark) -> str:
    row = mark.row
    if mark.host_bound and mark.has(f"{TOTAL}_speedup"):
        return f"{number(row[f'{TOTAL}_candidate_ms'])} ms"
    if _is_ratio(mark):
        half = 100 * (row[f"{TOTAL}_high"] / row[f"{TOTAL}_low"] - 1) / 2
        return f"{row[f'{TOTAL}_speedup']:.2f} ±{number(half, 2)} %"
    if mark.has(f"{TOTAL}_speedup"):
        return f"[{row[f'{TOTAL}_low']:.2f}, {row[f'{TOTAL}_high']:.2f}]"
    return row["status"] if row["status"] != "ok" else "few trials"
