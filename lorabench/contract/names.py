"""Wrong names: one line with the nearest right one, wherever a name is looked up."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_SHOWN = 60  # names, where none is near


class NameUnknown(ValueError):
    """A wrong name (or parameter) in a configuration; the message holds the nearest right one."""


def nearest(what: str, name: str, known: Iterable[str], where: str = "", or_else: str = "") -> NameUnknown:
    """The error for a wrong name: one line, with the nearest right name. `what` is the sort of thing it names,
    `or_else` what is no name and would do as well."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    shown = ", ".join(known[:MOST_SHOWN]) + (f" and {len(known) - MOST_SHOWN} more" if len(known) > MOST_SHOWN else "")
    hint = f"did you mean {close[0]}?" if close else f"known: {shown}"
    return NameUnknown(f"no {what} named {name!r}{where}; {hint}{or_else and f' (or {or_else})'}")
