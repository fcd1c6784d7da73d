"""How far one reference moves between sessions: what no interval of a single session knows of."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lorabench.record.stats import median_intervals
from lorabench.report.analysis import Analysis

COLUMNS = ("group", "reference", "session", "started", "toggles", "ms", "ms_low", "ms_high")


def references(analysis: Analysis) -> pd.DataFrame:
    """A row a record whose reference was timed: the median of its total in ms with its 95 % interval, in which session
    that was and when it began ('' where environment.json does not say). In the order of the groups."""
    began = {s["id"]: str(s.get("started") or "") for s in analysis.sessions}
    members = {id(row.shown): row.measured for row in analysis.rows}
    found: list[dict[str, Any]] = []
    for group in analysis.groups:
        for shown in group.records:
            for record in members[id(shown)]:
                times = record.ms("reference")
                if not times:
                    continue
                median, low, high = map(float, median_intervals([times])[0])
                found.append({
                    "group": group.title, "reference": " + ".join(record.reference), "session": record.session,
                    "started": began.get(record.session, ""), "toggles": analysis.row(shown)["toggles"],
                    "ms": median, "ms_low": low, "ms_high": high,
                })  # fmt: skip
    return pd.DataFrame(found, columns=pd.Index(COLUMNS))


def moved(table: pd.DataFrame) -> pd.DataFrame:
    """A row a group and reference of `references`: in how many sessions it was timed, the medians in ms of the fastest
    and of the slowest of them, and how much longer the latter took, as a share (NaN of one session)."""
    sessions = table.groupby(["group", "reference", "session"], sort=False)["ms"].median()
    found = sessions.groupby(level=["group", "reference"], sort=False).agg(["count", "min", "max"])
    found.columns = pd.Index(["sessions", "fastest_ms", "slowest_ms"])
    found["moved"] = (found["slowest_ms"] / found["fastest_ms"] - 1).where(found["sessions"] > 1)
    return found.reset_index()
