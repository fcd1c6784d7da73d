"""Which records make one row: those of one cell, measured in several sessions.

Sessions are combined where they measured the same code. Of several codes the newest that measured the cell stands, and
the row says how many records it left out. No record hides another: a cell that failed in one session and was measured
in another is a row of what was measured, with the number of those that failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lorabench.record.schema import Record

Session = Mapping[str, Any]
Code = tuple[Any, Any]  # commit and whether there were uncommitted changes, as far as environment.json says


class Row(NamedTuple):
    """`shown`: the record whose fields the row has, the last that was measured. `measured`: those with status ok, whose
    ratios are combined; the shown one alone where there is none. `tried`: how many records of this code there are.
    `other_code`: how many of another."""

    shown: Record
    measured: list[Record]
    tried: int
    other_code: int


def device_of(session: Session) -> str:
    """Of a session of environment.json; '' where it does not say."""
    machine = session.get("machine") or {}
    return str(machine.get("name") or machine.get("device") or "")


def rows(records: Sequence[Record], sessions: Sequence[Session]) -> list[Row]:
    """A row a kind, key and device, in the order of first appearance: two machines are no two sessions of one."""
    codes = {s["id"]: (s.get("commit"), s.get("dirty")) for s in sessions}
    devices = {s["id"]: device_of(s) for s in sessions}
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.kind, record.key, devices.get(record.session, "")), []).append(record)
    return [_row(same, codes) for same in found.values()]


def _row(records: Sequence[Record], codes: Mapping[str, Code]) -> Row:
    by_code: dict[Code, list[Record]] = {}
    for record in records:
        code = codes.get(record.session, (None, None))
        by_code[code] = [*by_code.pop(code, []), record]  # the newest code comes last
    newest = list(by_code.values())[::-1]
    stands = next((own for own in newest if any(r.status == "ok" for r in own)), newest[0])
    measured = [r for r in stands if r.status == "ok"] or stands[-1:]
    return Row(measured[-1], measured, len(stands), len(records) - len(stands))
