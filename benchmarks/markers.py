"""Tables that scripts make stand in Markdown between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re


def filled(text: str, name: str, table: str) -> str:
    """The text with this table between its markers. Raises ValueError where they do not stand in it once."""
    marked = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
    made, count = marked.subn(lambda _: f"\n{table}\n\n", text)
    if count != 1:
        raise ValueError(f"expected the markers of {name!r} once, found them {count} times")
    return made
