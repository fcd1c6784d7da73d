"""Which rows of a group compare: those whose references took as long, within a tenth. Where they took longer in one row
than in another, their hosts or clocks were not the same, and no milliseconds rank them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lorabench.report.shares import REFERENCES_APART
from lorabench.report.words import number


def parts(took: Sequence[float]) -> list[tuple[str, list[int]]]:
    """What the references of each part took, in words, and the places of its rows, from the shortest. One part without
    words where all compare: what has no time stands apart only where there are several."""
    alike = spans(took)
    if len(alike) < 2:
        return [("", list(range(len(took))))]
    found = [(f"references of {_span(*ends)} ms", [n for n, ms in enumerate(took) if ends[0] <= ms <= ends[1]])
             for ends in alike]  # fmt: skip
    untimed = [n for n, ms in enumerate(took) if not math.isfinite(ms)]
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
