"""What a row is called: by its toggles, and where rows of one table would else be called the same, by what differs.

Records of two seeds, of two designs, or of the reference against itself in one process and in several, are rows of
their own, and stand in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lorabench.record.schema import Record
from lorabench.report.contrasts import toggles
from lorabench.report.replicates import device_of


def labels(records: Sequence[Record], sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The label of each record, in their order."""
    names = [toggles(record) for record in records]
    devices = {session["id"]: device_of(session) for session in sessions}
    seeds = {session["id"]: _seed(session.get("command") or []) for session in sessions}
    differences: list[Callable[[Record], str]] = [
        lambda r: "separate processes" if r.separate else "",
        lambda r: seeds.get(r.session, ""),
        lambda r: r.design,
        lambda r: f"cell {r.key[:6]}",
    ]
    for said in differences:
        for same in _alike(records, names, devices):
            words = {n: said(records[n]) for n in same}
            if len(set(words.values())) > 1:
                for n, word in words.items():
                    names[n] += f", {word}" if word else ""
    return names


def _alike(records: Sequence[Record], names: Sequence[str], devices: Mapping[str, str]) -> list[list[int]]:
    """Places of the records of one table that have one name."""
    found: dict[Any, list[int]] = {}
    for n, (record, name) in enumerate(zip(records, names, strict=True)):
        device = devices.get(record.session, "")
        table = record.kind, record.model, record.workload, device, frozenset(record.reference)
        found.setdefault((table, name), []).append(n)
    return list(found.values())


def _seed(command: Sequence[object]) -> str:
    """As the sweep was told, the last word counting; 0 unless it was."""
    given = [str(word).partition("=")[2] for word in command if str(word).startswith("seed=")]
    return f"seed {given[-1] if given else 0}"
