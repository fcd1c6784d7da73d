"""The tables: summary.csv (everything), summary.md and summary.tex (for reading). `terminal.py` has one for a console.

A group a model @ workload, in parts where the references of its rows took times that differ by over a tenth: the
reference against itself first, then the toggles from the fastest, then the rows that failed, with status and reason,
then the least work that there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

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


def md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return md_table(headings, [list(map(md, row)) for row in rows])


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
