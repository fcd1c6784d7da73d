"""What may be said of measured times: medians, significance, noise floor, verdict. Numbers in, numbers out.

The ratio of two arms and its interval are in contrast.py. What is asked of every row of a table is answered for many
lists of trials at once: those of one length become one array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lorabench.record.contrast import ALPHA, Speedup, Times, log_times

Verdict = Literal["faster", "slower", "same", "unclear"]
Rows = NDArray[np.float64]  # trials of one number each, shape (rows, trials)

MIN_TRIALS_FOR_VERDICT = 6  # below it even the most extreme signed-rank outcome has p > 0.05
MIN_FLOOR = 0.01  # clocks and allocator alone move a step by about this much between two processes
MAX_SAME = 0.05  # a wider band than this is no statement of equality, however wide the noise
TWO_SIDED = float(stats.norm.ppf(1 - ALPHA / 2))  # standard errors to either end of a 95 % interval
POWER = float(stats.norm.ppf(0.8))  # and beyond it, for an effect that is found 4 times out of 5


class Median(NamedTuple):
    """A median in the unit of the samples, with its 95 % interval."""

    centre: float
    low: float
    high: float


def median_interval(ms: Times) -> Median | None:
    """Median with the distribution-free 95 % interval of its order statistics; None for an empty list.

    Below six trials no order statistics reach 95 %: the interval is then the range, the widest that there is.
    """
    times = np.exp(log_times(ms))
    return Median(*map(float, _medians(times[None])[0])) if times.size else None


def median_intervals(lists: Sequence[Sequence[float] | None]) -> Rows:
    """Shape (lists, 3): centre, low and high of the median of each list, see `median_interval`; NaN without trials."""
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


def p_value(reference_ms: Times, candidate_ms: Times, paired: bool) -> float:
    """Two-sided p that the arms are equally fast: Wilcoxon signed rank on log ratios, or Mann–Whitney. 1 if equal."""
    return float(p_values([(reference_ms, candidate_ms)], [paired])[0])


def p_values(pairs: Sequence[tuple[Times, Times] | None], paired: Sequence[bool]) -> NDArray[np.float64]:
    """`p_value` of many cells, given as (reference, candidate) in ms; NaN for None."""
    found = np.full(len(pairs), np.nan)
    alike: dict[tuple[bool, int, int], list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair is not None:
            alike.setdefault((paired[i], len(pair[0]), len(pair[1])), []).append(i)
    for (of_rounds, *_), members in alike.items():
        arms = list(zip(*(pair for i in members if (pair := pairs[i]) is not None), strict=True))
        first, second = _logs(arms[0], "reference_ms"), _logs(arms[1], "candidate_ms")
        found[members] = _signed_rank(first - second) if of_rounds else _mann_whitney(first, second)
    return found


def _logs(lists: Sequence[Times], name: str) -> Rows:
    """Logarithms of lists of one length, shape (lists, length)."""
    rows = np.asarray(lists, dtype=np.float64)
    return log_times(rows.ravel(), name).reshape(rows.shape)


def _signed_rank(ratios: Rows) -> NDArray[np.float64]:
    """Of each row. Rows with ties or zeros go apart: scipy takes one method for all that it is given at once."""
    found = np.ones(len(ratios))
    odd = ~_all_different(np.abs(ratios)) | (ratios == 0).any(axis=1)
    for rows in (~odd, odd & ratios.any(axis=1)):
        if rows.any() and ratios.shape[1]:
            found[rows] = _p(stats.wilcoxon(ratios[rows], axis=1))
    return found


def _mann_whitney(reference: Rows, candidate: Rows) -> NDArray[np.float64]:
    """Of each row; rows with ties go apart, as above."""
    both = np.concatenate([reference, candidate], axis=1)
    found = np.ones(len(both))
    plain = _all_different(both)
    for rows in (plain, ~plain & (both != both[:, :1]).any(axis=1)):
        if rows.any() and reference.shape[1] and candidate.shape[1]:
            found[rows] = _p(stats.mannwhitneyu(reference[rows], candidate[rows], axis=1))
    return found


def _all_different(rows: Rows) -> NDArray[np.bool_]:
    return (np.diff(np.sort(rows, axis=1), axis=1) != 0).all(axis=1)


def _p(
    result: Any,
) -> NDArray[np.float64]:  # scipy's result classes are made at run time: type checkers do not see them
    return result.pvalue


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
    'faster' and 'slower' need both: p_holm (corrected over the sweep) below 0.05 and an interval beyond the band.
    Everything else, and anything from fewer than six trials, is 'unclear'.
    """
    if found is None:
        return None
    top = 1 + floor
    if trials is not None and trials < MIN_TRIALS_FOR_VERDICT:
        return "unclear"
    band = min(top, 1 + MAX_SAME)  # a noisy machine must not make everything the same
    if found.low >= 1 / band and found.high <= band:
        return "same"
    if p_holm < ALPHA and found.low > top:
        return "faster"
    if p_holm < ALPHA and found.high < 1 / top:
        return "slower"
    return "unclear"
