"""The leaderboard: of every results folder below another, what is fastest on each GPU for each model and workload.

Made for the first page of the site (docs/site_hooks.py). A number is a family's own: two folders shared no rounds, and
so their rows stand beside one another without a ratio between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lorabench.contract.kind import kind
from lorabench.record.schema import TOTAL
from lorabench.report.analysis import Analysis
from lorabench.report.answers import fastest
from lorabench.report.groups import Group
from lorabench.report.opening import reference_name, times
from lorabench.report.tables import md, md_table
from lorabench.report.words import number

MOST = 3  # stacks of one model and workload
HEADINGS = ("model @ workload", "fastest stacks", "ms", "× its reference", "peak GiB", "measured", "commit", "sessions")


class Entry(NamedTuple):
    """The fastest stack of one family; `asked` is its model and workload. `ms` of its total. `page`: from the results
    folder's root, with the place of the family in that page."""

    device: str
    kind: str
    asked: str
    stack: str
    ms: float
    ratio: str
    gib: float
    date: str
    commit: str
    sessions: int
    page: str


def entries(found: Mapping[str, Analysis]) -> list[Entry]:
    """Of families in which anything was clearly faster than its reference, in the order of the folders, which have
    names as `folders.analyses` gives them."""
    made = [
        _entry(group, n, folder, analysis)
        for folder, analysis in found.items() for n, group in enumerate(analysis.groups)
    ]  # fmt: skip
    return [entry for entry in made if entry]


def _entry(group: Group, place: int, folder: str, analysis: Analysis) -> Entry | None:
    faster = [r for r in group.records if str(analysis.row(r)["verdict"]).startswith("faster")]
    if not faster:
        return None
    best = fastest(faster, analysis)[0]
    row = analysis.row(best)
    session = next((s for s in analysis.sessions if s["id"] == best.session), {})
    device = analysis.device(best)
    return Entry(
        device or "an unknown machine", group.kind.name, f"{best.model} @ {best.workload}", row["toggles"],
        row[f"{TOTAL}_candidate_ms"], f"{times(row)} × {reference_name(best.reference)}", row["candidate_peak_gib"],
        str(session.get("started") or "")[:10], str(session.get("commit") or "")[:7], row["sessions"],
        f"{folder}/report.html#of={place}",
    )  # fmt: skip


def markdown(made: Sequence[Entry], pages: str = "results/") -> str:
    """A table a GPU and kind, and before them, where there are several machines, one with a column for each. `pages`:
    where the results folders lie, from the page that this is."""
    devices = list(dict.fromkeys(entry.device for entry in made))
    parts = ["---\nhide: [toc]\n---", "# What is fastest", INTRODUCTION]
    if len(devices) > 1:
        parts += ["## Every machine", _side_by_side(made, devices, pages)]
    for device in devices:
        own = [entry for entry in made if entry.device == device]
        for name in dict.fromkeys(entry.kind for entry in own):
            parts.append(f"## {md(device)}: {kind(name).summary}")
            parts.append(_table([entry for entry in own if entry.kind == name], pages))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = (
    "For each GPU and model the fastest stacks that were measured and judged, each with the page of its family: the "
    "race, time against memory, every trial, and the command that measures it again. Two rows of one model and "
    "workload come from families that shared no rounds. `lorabench gather` adds somebody else's machine."
)


def _table(own: Sequence[Entry], pages: str) -> str:
    rows = []
    for asked in sorted({entry.asked for entry in own}):
        ranked: dict[tuple[str, str], Entry] = {}
        for entry in sorted(own, key=lambda entry: entry.ms):
            if entry.asked == asked:
                ranked.setdefault((entry.stack, entry.ratio.partition("×")[2]), entry)
        rows += [_row(entry, asked, pages) for entry in [*ranked.values()][:MOST]]
    return md_table(HEADINGS, rows)


def _row(entry: Entry, asked: str, pages: str) -> list[str]:
    stack = f"[{md(entry.stack)}]({pages}{entry.page})"
    gib = number(entry.gib) if math.isfinite(entry.gib) else ""
    return [md(asked), stack, number(entry.ms), md(entry.ratio), gib, entry.date, entry.commit, str(entry.sessions)]


def _side_by_side(made: Sequence[Entry], devices: Sequence[str], pages: str) -> str:
    """The fastest of each machine, a column a machine."""
    rows = []
    for asked in sorted({entry.asked for entry in made}):
        best: dict[str, Entry] = {}
        for entry in sorted(made, key=lambda entry: entry.ms):
            if entry.asked == asked:
                best.setdefault(entry.device, entry)
        cells = [
            f"{number(one.ms)} ms, [{md(one.stack)}]({pages}{one.page})" if (one := best.get(device)) else ""
            for device in devices
        ]
        rows.append([md(asked), *cells])
    return md_table(("model @ workload", *map(md, devices)), rows)
