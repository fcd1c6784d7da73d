"""Wrong names: one line with the nearest right one, wherever a name is looked up."""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

MOST_SHOWN = 60  # names, where none is near
LONGEST_NAME, LONGEST_LINE = 100, 2000  # characters of what a user wrote that are shown again, and of a complaint


class NameUnknown(ValueError):
    """A wrong name (or parameter) in a configuration; the message holds the nearest right one."""


def nearest(what: str, name: str, known: Iterable[str], where: str = "", or_else: str = "") -> NameUnknown:
    """The error for a wrong name: one line, with the nearest right name. `what` is the sort of thing it names,
    `or_else` what is no name and would do as well."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    shown = ", ".join(known[:MOST_SHOWN]) + (f" and {len(known) - MOST_SHOWN} more" if len(known) > MOST_SHOWN else "")
    hint = f"did you mean {close[0]}?" if close else f"known: {shown}"
    return NameUnknown(f"no {what} named {_cut(name)!r}{where}; {hint}{or_else and f' (or {or_else})'}")


def counted(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def complaint(finding: Mapping[str, Any]) -> str:
    """One of a ValidationError's `errors()` in words: what was expected, and what is there."""
    said = finding["msg"].partition(" after validation")[0].replace("Input should be", "should be")
    if finding["type"] == "value_error":  # a validator of ours, which says all
        return said.removeprefix("Value error, ")
    if finding["type"] == "missing":
        return "it is missing"
    if finding["type"] == "too_short":
        least = finding["ctx"]["min_length"]
        return f"expected at least {'one' if least == 1 else least}, not {finding['ctx']['actual_length']}"
    return said if isinstance(finding["input"], dict | list) else f"{said}, not {reprlib.repr(finding['input'])}"


def one_line(error: object) -> str:
    """A complaint as one line, which says at its end what was expected: whatever of a user's text it repeats is cut in
    the middle."""
    return _cut(" ".join(str(error).split()), LONGEST_LINE)


def complain(error: object, code: int = 2) -> int:
    """One line for the user; returns the exit code."""
    print(f"lorabench: {one_line(error)}", file=sys.stderr)
    return code


def _cut(text: str, longest: int = LONGEST_NAME) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"
