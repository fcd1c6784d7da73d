"""What may be said of measured times: medians, Holm's correction, noise floor, verdict. Numbers in, numbers out.

The ratio of two arms, its interval and its p are in contrast.py. What is asked of every row of a table is answered for
many lists of trials at once: those of one length become one array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lorabench.record.contrast import ALPHA, Speedup

Verdict = Literal["faster", "slower", "same", "unclear", "faster, few trials", "slower, few trials"]
Rows = NDArray[np.float64]  # trials of one number each, shape (rows, trials)

MIN_TRIALS_FOR_VERDICT = 6  # fewer do not show their autocorrelation, nor whether one of them is an outlier
MIN_FLOOR = 0.01  # clocks and allocator alone move a step by about this much between two processes
MAX_SAME = 0.05  # a wider band than this is no statement of equality, however wide the noise
TWO_SIDED = float(stats.norm.ppf(1 - ALPHA / 2))  # standard errors to either end of a 95 % interval
POWER = float(stats.norm.ppf(0.8))  # and beyond it, for an effect that is found 4 times out of 5


def median_intervals(lists: Sequence[Sequence[float] | None]) -> Rows:
    """Shape (lists, 3): of each list the median, and low and high of the distribution-free 95 % interval of its order
    statistics; NaN without trials.

    Below six trials no order statistics reach 95 %: the interval is then the range, the widest that there is.
    """
    found = np.full((len(lists), 3), np.nan)
    alike: dict[int, list[int]] = {}
    for i, times in enumerate(lists):
        if times:
            alike.setdefault(len(times), []).append(i)
    for members in alike.values():
        found[members] = _medians(np.asarray([lists[i] for i in members], dtype=np.float64))
    return found


def _medians(rows: Rows) -> Rows:
    ordered, n = np.sort(rows, axis=1), rows.shape[1]
    k = _order_statistic(n)
    median = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    return np.stack([median, ordered[:, k], ordered[:, -1 - k]], axis=1)


@cache
def _order_statistic(trials: int) -> int:
    return max(int(stats.binom.ppf(ALPHA / 2, trials, 0.5)) - 1, 0)


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given: compare each with 0.05 to keep the family's error at 5 %."""
    p = np.asarray(pvalues, dtype=np.float64)
    if np.any(~((p >= 0) & (p <= 1))):
        raise ValueError(f"p-values must lie in 0..1, got {list(pvalues)}")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1.0)
    adjusted = np.empty_like(stepped)
    adjusted[order] = stepped
    return adjusted.tolist()


def noise_floor(same: Speedup | None) -> float:
    """Half width of the noise band as a share (0.01 = ±1 %): how far from 1 the A/A interval reaches, at least 1 %.

    same: the speed-up of the reference against itself; None where there is no such record.
    """
    if same is None:
        return MIN_FLOOR
    return max(MIN_FLOOR, math.expm1(max(abs(math.log(same.low)), abs(math.log(same.high)))))


def detectable(same: Speedup | None) -> float | None:
    """Minimum detectable effect as a share: a true speed-up of 1 + this gets the verdict `faster` 4 times out of 5.

    From the A/A record: its interval's width gives the standard error of a cell of as many trials, and the cell's own
    95 % interval has to clear the noise floor: log1p(floor) + (1.96 + 0.84) standard errors.
    """
    if same is None:
        return None
    error = math.log(same.high / same.low) / (2 * TWO_SIDED)
    return math.expm1(math.log1p(noise_floor(same)) + (TWO_SIDED + POWER) * error)


def verdict(
    found: Speedup | None, p_holm: float, floor: float = MIN_FLOOR, trials: int | None = None
) -> Verdict | None:
    """What may be said of a cell. None without a speed-up.

    'same' is an equivalence statement: the whole interval lies inside the noise band, 1/(1+floor) to 1+floor, and
    inside ±5 %.
    'faster' and 'slower' need both: p_holm (corrected over the sweep) below 0.05 and an interval beyond the band. From
    fewer than six trials they are 'faster, few trials' and 'slower, few trials': a direction, and no figure.
    Everything else is 'unclear'.
    """
    if found is None:
        return None
    top = 1 + floor
    few = trials is not None and trials < MIN_TRIALS_FOR_VERDICT
    band = min(top, 1 + MAX_SAME)  # a noisy machine must not make everything the same
    if not few and found.low >= 1 / band and found.high <= band:
        return "same"
    if p_holm < ALPHA and found.low > top:
        return "faster, few trials" if few else "faster"
    if p_holm < ALPHA and found.high < 1 / top:
        return "slower, few trials" if few else "slower"
    return "unclear"


def direction(verdict: str) -> str:
    """A verdict's first word: of `faster, few trials` it is `faster`."""
    return verdict.partition(",")[0]


def without_figure(verdict: object) -> bool:
    """Whether only the interval is shown: a centre would say more than was found. Not of what has no verdict, which is
    None or NaN in tables."""
    return isinstance(verdict, str) and verdict not in ("faster", "slower", "same")
