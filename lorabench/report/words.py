"""Numbers as text, the same in every table and on the page: what is made of record/words.py's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lorabench.record.contrast import Speedup
from lorabench.record.stats import MIN_TRIALS_FOR_VERDICT, direction, without_figure
from lorabench.record.words import noise as noise
from lorabench.record.words import number as number
from lorabench.record.words import percent as percent
from lorabench.record.words import ratio


def speedup(found: Speedup | None) -> str:
    return ratio(*found) if found else ""


def bounds(low: float, high: float) -> str:
    """`[0.98, 1.05]`."""
    shown = ratio(high, low, high)
    return shown[shown.index("[") :]


def interval(low: float, high: float, verdict: str = "unclear") -> str:
    """`unclear [0.98, 1.05]`, `faster [25, 44]`: without a figure, an interval is shown without a centre."""
    return f"{direction(verdict)} {bounds(low, high)}"


def is_clear(found: Speedup, trials: int, verdict: str | None = None) -> bool:
    """Whether a ratio shows a direction, or none: by its `verdict`. What was made of several cells has no verdict: it
    is unclear where its interval holds 1, or where it is of too few trials."""
    if verdict:
        return not without_figure(verdict)
    return trials >= MIN_TRIALS_FOR_VERDICT and not found.low <= 1 <= found.high


def told(found: Speedup | None, trials: int, verdict: str | None = None) -> str:
    """A ratio with its interval, where it is clear; else the interval with its word, and the number of trials where it
    is that which leaves no figure."""
    if found is None:
        return ""
    if is_clear(found, trials, verdict):
        return speedup(found)
    if not too_few(found, trials) or verdict == "unclear":
        return interval(found.low, found.high)
    return interval(found.low, found.high, "faster" if found.low > 1 else "slower") + f", {trials} trials"


def too_few(found: Speedup, trials: int) -> bool:
    """Whether an interval shows a direction, and only the trials are too few for a verdict."""
    return trials < MIN_TRIALS_FOR_VERDICT and not found.low <= 1 <= found.high


def span(low: float, high: float) -> str:
    """`1.31–1.52`."""
    digits = 2 if high >= 10 or high - low > 0.05 else 3
    return f"{low:.{digits}f}–{high:.{digits}f}"


def arrow(before: Any, after: Any, show: Callable[[Any], str] = number) -> str:
    """`before → after`, reference and candidate; '' where neither is known."""
    first, second = show(before), show(after)
    return f"{first or 'none'} → {second or 'none'}" if first or second else ""


def doubt(verdict: str | None, low: float, high: float, floor: float, p_holm: float, trials: int) -> str:
    """In brackets, which condition of a figure a row of so many trials does not meet; '' where it meets all."""
    if 0 < trials < MIN_TRIALS_FOR_VERDICT:
        return f" ({trials} trials, a figure needs {MIN_TRIALS_FOR_VERDICT})"
    if verdict != "unclear":
        return ""
    if low <= 1 <= high:
        return " (its interval holds 1)"
    if low <= 1 + floor and high >= 1 / (1 + floor):
        return f" (its interval meets the noise floor of {noise(floor)})"
    return f" (p {number(p_holm, 2)} after Holm's correction)"
