"""Tables that scripts make stand in Markdown between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path


def filled(text: str, name: str, table: str) -> str:
    """The text with this table between its markers. Raises ValueError where they do not stand in it once."""
    marked = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    made, count = marked.subn(lambda _: f"\n{table}\n\n", text)
    if count != 1:
        raise ValueError(f"expected the markers of {name!r} once, found them {count} times")
    return made


def all_filled(text: str, tables: Mapping[str, str]) -> str:
    """The text with each of these tables, by name, between its markers. Raises ValueError as `filled` does."""
    for name, table in tables.items():
        text = filled(text, name, table)
    return text


def main(doc: str | None, page: Path, tables: Callable[[], Mapping[str, str]]) -> int:
    """The command line of a script that makes all tables of one page."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="show the tables and write nothing")
    if parser.parse_args().print:
        print(*tables().values(), sep="\n\n")
    else:
        page.write_text(all_filled(page.read_text(encoding="utf-8"), tables()), encoding="utf-8")
        print(f"written: {page}")
    return 0
