"""The table on a console: as wide as it is in a pipe, and on a terminal with every name whole.

Where a terminal has no room for the names beside the numbers, each name has a line of its own, above its numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lorabench.report.cells import HOST, MEMORY, TIME, TOGGLE, VERDICT, WHOLE
from lorabench.report.shown import Shown

IN_A_PIPE = 10_000  # columns: nothing there has an edge at which a name would have to be broken
INDENT, GAP = 4, 2
_STYLE = {"faster": "green", "slower": "red", "same": "dim", "unclear": "yellow", "noise": "dim"}

Rows = Sequence[dict[str, str]]


def print_table(shown: Shown, console: Console) -> None:
    wide = unbroken(console)
    wide.print(terminal_table(shown, wide.width))


def unbroken(console: Console) -> Console:
    """The console, where it is a pipe as wide as whatever is printed; `COLUMNS` says how wide a pipe is taken for."""
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else IN_A_PIPE
    return Console(file=console.file, width=width, force_terminal=console.is_terminal)


def terminal_table(shown: Shown, width: int = 120) -> RenderableType:
    """For `width` columns: less important columns give way, long reasons are shortened, names never."""
    longest = max(36, width // 3)
    groups = [(group.title, [_narrow(row, longest) for row in group.rows]) for group in shown.groups]
    every = [row for _, rows in groups for row in rows]
    columns, fits = _that_fit(shown, every, width)
    if fits:
        return _boxed(groups, columns, shown.trials)
    widths = _widths([c for c in columns if c != TOGGLE], every, width - INDENT)
    lines = [line for title, rows in groups for line in (Text(title, style="bold"), *_stacked(rows, widths))]
    return Group(*lines, *([Text(shown.trials, style="italic")] if shown.trials else []))


def _boxed(groups: Sequence[tuple[str, Rows]], columns: Sequence[str], caption: str) -> Table:
    table = Table(show_lines=False, caption=caption or None, caption_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold", no_wrap=column in (TOGGLE, WHOLE))
    for title, rows in groups:
        table.add_section()
        table.add_row(Text(title, style="bold"), *[""] * (len(columns) - 1))
        for row in rows:
            table.add_row(*(_cell(row, column) for column in columns))
    return table


def _stacked(rows: Rows, widths: dict[str, int]) -> Iterator[RenderableType]:
    """A name, and below it its numbers, one under the other in all rows."""
    yield Padding(_line([Text(c, style="dim") for c in widths], widths), (0, 0, 0, INDENT), expand=False)
    for row in rows:
        yield Text(row[TOGGLE])
        yield Padding(_line([_cell(row, c) for c in widths], widths), (0, 0, 0, INDENT), expand=False)


def _line(cells: Sequence[Text], widths: dict[str, int]) -> Table:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths.values():
        grid.add_column(width=width, overflow="fold")
    grid.add_row(*cells)
    return grid


def _cell(row: dict[str, str], column: str) -> Text:
    return Text(row.get(column, ""), style=_style(row) if column == VERDICT else "")


def _narrow(row: dict[str, str], longest: int) -> dict[str, str]:
    """A row for a terminal: long reasons shortened, and a host's share beside the milliseconds that it is of."""
    made = {c: x if c == TOGGLE else _short(x, longest) for c, x in row.items()}
    return made | {TIME: f"host-bound: {made[HOST]}"} if made.get(HOST) else made


def _that_fit(shown: Shown, rows: Rows, width: int) -> tuple[list[str], bool]:
    """(the columns of all groups, without those that a narrow terminal has no room for; whether the others have their
    room beside the names and the titles)."""
    wants = {c: max([len(c) // 2, *(len(row.get(c, "")) for row in rows)]) for c in shown.columns}
    wants[TOGGLE] = max([wants[TOGGLE], *(len(group.title) for group in shown.groups)])
    kept = [c for c in shown.columns if c != HOST]
    for column in shown.giving_way:
        if sum(wants[c] + 3 for c in kept) + 1 > width and column in kept:
            kept.remove(column)
    wrapped = {c: wants[c] if c in (TOGGLE, WHOLE) else min(wants[c], 2 * _longest_word(c, rows)) for c in kept}
    return kept, sum(wrapped[c] + 3 for c in kept) + 1 <= width


def _widths(columns: Sequence[str], rows: Rows, room: int) -> dict[str, int]:
    """Of each column without names: all that it wants, but for what does not fit; the words of the verdict and of
    the milliseconds then go to the next line. A column for which there is no room at all goes."""
    kept = list(columns)
    least = {c: max(map(len, _column(c, rows))) if c == WHOLE else _longest_word(c, rows) for c in kept}
    for column in (MEMORY, TIME):
        if sum(least[c] + GAP for c in kept) > room and column in kept:
            kept.remove(column)
    widths = {c: max(map(len, _column(c, rows))) for c in kept}
    over = sum(widths.values()) + GAP * len(kept) - room
    for column in sorted(kept, key=lambda c: (c != VERDICT, c != TIME)):
        cut = max(0, min(over, widths[column] - least[column]))
        widths[column], over = widths[column] - cut, over - cut
    return widths


def _column(column: str, rows: Rows) -> list[str]:
    return [column, *(row.get(column, "") for row in rows)]


def _longest_word(column: str, rows: Rows) -> int:
    return max(len(word) for text in _column(column, rows) for word in text.split() or [""])


def _style(row: dict[str, str]) -> str:
    """Of a verdict; what is no candidate has none, and what failed is red."""
    word = row[VERDICT].split()[0].rstrip(",")
    return "cyan" if word.endswith(":") and row[WHOLE] else _STYLE.get(word, "red")


def _short(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
