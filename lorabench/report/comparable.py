"""Which rows of a group compare: those of one family, which shared their rounds; and those over one reference which
took as long, within a tenth. Where it took longer in one row than in another, the hosts or clocks were not the same,
and no milliseconds rank them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lorabench.record.older import REFERENCES_APART
from lorabench.record.pairs import AGAINST
from lorabench.record.schema import TOTAL, Record
from lorabench.report.words import number

# Rows whose references have toggles of their own, by their design.
OWN_REFERENCES = {"steps": "each over what stands below it", "leave_one_out": "each added to all the others"}
OTHER_REFERENCES = "each over a reference of its own"


def parts(records: Sequence[Record], took: Sequence[float]) -> list[tuple[str, list[int]]]:
    """What is said of each part of a table, and the places of its rows. One part without words where all compare.

    First the rows over the reference that the table is about, by what it took, from the shortest; what has no time
    stands apart only where there are several. Last those of `steps` and of leave-one-out, whose references have toggles
    of their own and are to differ.
    """
    base = base_of(records)
    over_base = [n for n, record in enumerate(records) if set(record.reference) == base]
    apart: dict[str, list[int]] = {}
    for n in sorted({*range(len(records))} - {*over_base}, key=lambda n: (records[n].rung or 0, n)):
        apart.setdefault(OWN_REFERENCES.get(records[n].design, OTHER_REFERENCES), []).append(n)
    return [*_by_time(took, over_base), *apart.items()]


def references(rows: Sequence[Mapping[Any, Any]]) -> list[float]:
    """How long each row's reference took, in milliseconds; in all rows of a family what it took in the first."""
    took = [float(row[f"{TOTAL}_reference_ms"]) for row in rows]
    families = [row.get("family") for row in rows]
    first: dict[Any, float] = {}
    for family, ms in zip(families, took, strict=True):
        if isinstance(family, str) and math.isfinite(ms):  # pandas holds None as NaN
            first.setdefault(family, ms)
    return [first.get(family, ms) for family, ms in zip(families, took, strict=True)]


def base_of(records: Sequence[Record]) -> frozenset[str]:
    """The stack that a table is over: the arm that was chosen on reading; else the reference of the row that has it
    against itself, or of most rows."""
    every = [frozenset(r.reference) for r in records]
    own = [base for base, r in zip(every, records, strict=True) if r.design == AGAINST]
    own = own or [base for base, r in zip(every, records, strict=True) if r.is_noise_floor]
    return own[0] if own else max(every, key=every.count)


def _by_time(took: Sequence[float], places: Sequence[int]) -> list[tuple[str, list[int]]]:
    alike = spans(took[n] for n in places)
    if len(alike) < 2:
        return [("", list(places))] if places else []
    found = [(f"references of {_span(*ends)} ms", [n for n in places if ends[0] <= took[n] <= ends[1]])
             for ends in alike]  # fmt: skip
    untimed = [n for n in places if not math.isfinite(took[n])]
    return [*found, ("without times", untimed)] if untimed else found


def spans(took: Iterable[float]) -> list[tuple[float, float]]:
    """(shortest, longest) of each set of times that lie within a tenth of its shortest, from the shortest."""
    found: list[tuple[float, float]] = []
    for ms in sorted(ms for ms in took if math.isfinite(ms)):
        if found and ms <= found[-1][0] * (1 + REFERENCES_APART):
            found[-1] = found[-1][0], ms
        else:
            found.append((ms, ms))
    return found


def _span(low: float, high: float) -> str:
    return "–".join(dict.fromkeys((number(low), number(high))))
