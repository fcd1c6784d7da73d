"""The tables: summary.csv (everything), summary.md and summary.tex (for reading), and one for the console.

A group a model @ workload, in parts where the references of its rows took times that differ by over a tenth: the
reference against itself first, then the toggles from the fastest, then the rows that failed, with status and reason,
then the least work that there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich.table import Table
from rich.text import Text

from lorabench.report.cells import HOST, TIME, TOGGLE, VERDICT, WHOLE
from lorabench.report.shown import Shown


def markdown(shown: Shown) -> str:
    """summary.md as text."""
    parts = [] if shown.groups else ["No records."]
    for group in shown.groups:
        _, headings, rows = group.table()
        parts += [f"## {md(group.title)}", _md_table(headings, rows)]
        for caption, headings, more in group.tables:
            parts += [f"### {md(caption)}", _md_table(headings, more)]
    for caption, headings, rows in [*shown.predicted, *shown.claims]:
        parts += [f"## {md(caption)}", _md_table(list(map(md, headings)), rows)]
    return "\n\n".join([*parts, *([md(shown.trials)] if shown.trials else [])]) + "\n"


def md(text: str) -> str:
    """Text for one cell of a Markdown table: nothing in it is read as markup, and it stays on one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text).replace("&", "&amp;").replace("<", "&lt;")
    return " ".join(escaped.replace(">", "&gt;").split())


def _md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([md(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "→": r"$\to$", "×": r"$\times$", "±": r"$\pm$", "·": r"$\cdot$", "–": "--", "[": "{[}", "]": "{]}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}",
}  # fmt: skip


def tex(text: str) -> str:
    """Text for one LaTeX cell. [ and ] are braced: after a line's `\\\\` a bracket would be read as its argument."""
    return " ".join("".join(_TEX.get(c, c) for c in text).split())


def latex(shown: Shown) -> str:
    """summary.tex: one booktabs table a group, to be put into a document that loads booktabs and graphicx."""
    parts = ["% needs \\usepackage{booktabs,graphicx}", *([] if shown.groups else ["% no records"])]
    for group in shown.groups:
        for caption, headings, rows in [group.table(), *group.tables]:
            title = f"{group.title}: {caption}" if caption else group.title
            parts.append(_tex_table(title, headings, rows))
    parts += [_tex_table(*table) for table in [*shown.predicted, *shown.claims]]
    return "\n\n".join(parts) + "\n"


def _tex_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = lambda cells: " & ".join(map(tex, cells)) + r" \\"  # noqa: E731
    return "\n".join([
        r"\begin{table}", rf"\caption{{{tex(caption)}}}", r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{'l' * len(headings)}}}", r"\toprule", line(headings), r"\midrule",
        *map(line, rows), r"\bottomrule", r"\end{tabular}}", r"\end{table}",
    ])  # fmt: skip


def csv(table: pd.DataFrame) -> str:
    """summary.csv: every column of such a table, full precision."""
    return table.to_csv(index=False, lineterminator="\n")


_STYLE = {"faster": "green", "slower": "red", "same": "dim", "unclear": "yellow", "noise": "dim"}


def terminal_table(shown: Shown, width: int = 120) -> Table:
    """The table for a terminal `width` columns wide: less important columns give way, long reasons are shortened."""
    longest = max(36, width // 3)
    groups = [(group.title, [_narrow(row, longest) for row in group.rows]) for group in shown.groups]
    columns = _that_fit(shown, [row for _, rows in groups for row in rows], width)
    table = Table(show_lines=False, caption=shown.trials or None, caption_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold", no_wrap=column == WHOLE)
    for title, rows in groups:
        table.add_section()
        table.add_row(Text(title, style="bold"), *[""] * (len(columns) - 1))
        for row in rows:
            table.add_row(*(Text(row.get(c, ""), style=_style(row) if c == VERDICT else "") for c in columns))
    return table


def _narrow(row: dict[str, str], longest: int) -> dict[str, str]:
    """A row for a terminal: long reasons shortened, and a host's share beside the milliseconds that it is of."""
    made = {c: x if c == TOGGLE else _short(x, longest) for c, x in row.items()}
    return made | {TIME: f"host-bound: {made[HOST]}"} if made.get(HOST) else made


def _that_fit(shown: Shown, rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns of all groups, without those that a narrow terminal has no room for."""
    wants = {c: max([len(c) // 2, *(len(row.get(c, "")) for row in rows)]) for c in shown.columns}
    wants[TOGGLE] = min(wants[TOGGLE], 32)
    kept = [c for c in shown.columns if c != HOST]
    for column in shown.giving_way:
        if sum(wants[c] + 3 for c in kept) + 1 > width and column in kept:
            kept.remove(column)
    return kept


def _style(row: dict[str, str]) -> str:
    """Of a verdict; what is no candidate has none, and what failed is red."""
    word = row[VERDICT].split()[0].rstrip(",")
    return "cyan" if word.endswith(":") and row[WHOLE] else _STYLE.get(word, "red")


def _short(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
