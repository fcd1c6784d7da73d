"""The command that measures one cell again, and nothing else but the reference against itself that goes with it.

It is the sweep's own command with what is measured named after it: the last word on a key counts. Trials, seeds, dtype
and all else that the sweep was told stay as they were.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from lorabench.record.pairs import AGAINST
from lorabench.record.schema import Record

# What a single cell says for itself, and what is of the whole sweep.
OWN = ("kind", "models", "workload", "ablations", "reference", "design", "output", "resume", "repeat", "part",
       "queue", "report", "list", "dry_run", "budget_minutes")  # fmt: skip
COMMANDS = ("lorabench.sweep", "lorabench.recommend")  # that measure cells, and take the same keys
CHANGED = re.compile(r"(?P<name>.*)\((?P<values>[^()]*=[^()]*)\)")
KEY, NONE = re.compile(r"'(\w+)':"), re.compile(r"(?<=: )None\b")
PLAIN = re.compile(r"[\w.+-]+")


def rerun(record: Record, command: Sequence[object]) -> str:
    """As a line for a shell. command: that of the record's session; [] where it is not known."""
    words = [str(word) for word in command]
    module = next((word for word in words if word in COMMANDS), None)
    given = words[words.index(module) + 1 :] if module else []
    if record.design == AGAINST:  # no sweep measures such a cell alone: its two arms were measured with their family
        kept = [word for word in given if word.lstrip("+~").partition("=")[0] not in ("output", "resume")]
        return shlex.join(["python", "-m", "lorabench.sweep", *kept, "output=output/rerun"])
    # The least work of a kind is planned as one of that kind's cells: then what the sweep was told of the kind stands.
    named = set(OWN)
    if not record.is_candidate:
        named.remove("kind")
    kept = [word for word in given if word.lstrip("+~").partition("=")[0] not in named]
    together = f"[{in_hydra(record.ablations)}]" if record.ablations else ""  # one candidate; none: the reference again
    own = [
        *([f"kind={record.kind}"] if record.is_candidate else []),
        f"models=[{_named(record.model)}]",
        f"workload={_named(record.workload)}",
        f"reference=[{in_hydra(record.reference)}]",
        f"ablations=[{together}]",
        "design=solo",
        "output=output/rerun",
    ]
    return shlex.join(["python", "-m", "lorabench.sweep", *kept, *own])


def in_hydra(names: Sequence[str]) -> str:
    """Labels of toggles as the members of a list on a command line."""
    return ", ".join(map(_named, names))


def _named(label: str) -> str:
    """A label in Hydra's grammar: NAME, or {NAME: {field: value}} of `NAME(field=value)`; quoted where neither."""
    if found := CHANGED.fullmatch(label):
        values = ", ".join(pair.replace("=", ": ", 1) for pair in found["values"].split(", "))
        values = KEY.sub(r"\1:", NONE.sub("null", values))  # of a value as Python writes it
        return f"{{{_quoted(found['name'])}: {{{values}}}}}"
    return _quoted(label)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return text if PLAIN.fullmatch(text) else f"'{escaped}'"
