"""Numbers as text, the same wherever one is said."""

from __future__ import annotations

import math
from typing import Any

TOO_NOISY = 1.0  # a noise floor: what may be twice off says nothing of a speed-up


def number(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits, never in scientific notation above 1e-4; '' for what is unknown."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def ratio(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """`1.31 [1.29, 1.33]`; without interval where there is none."""
    if not math.isfinite(value):
        return ""
    digits = 2 if max(value, high if math.isfinite(high) else 0) >= 10 or high - low > 0.05 else 3
    shown = f"{value:.{digits}f}"
    return f"{shown} [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) and math.isfinite(high) else shown


def percent(value: Any) -> str:
    """A share as `12.3 %`; '' for what is unknown."""
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def noise(floor: float) -> str:
    """A noise floor, given as a share: `±1.2 %`. One that is no measure of anything is no number."""
    return f"±{percent(floor)}" if floor <= TOO_NOISY else "too noisy, stop what else runs on this machine"
