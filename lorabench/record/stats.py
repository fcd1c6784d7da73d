"""Statistics of paired trials: speed-up with an interval, significance, noise floor, verdict. Numbers in, numbers out.

Times are milliseconds, one a trial, in the order of the rounds. Everything is done on logarithms: a ratio and its
inverse are then equally far from 1, and one slow trial moves nothing much. NaN, infinite and non-positive times are
refused with a ValueError: a trial that did not happen has no place in a list of trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Verdict = Literal["faster", "slower", "same", "unclear"]
Times = Sequence[float] | NDArray[np.float64]

RESAMPLES = 2000
MIN_TRIALS = 3
MIN_TRIALS_FOR_VERDICT = 6  # below it even the most extreme signed-rank outcome has p > 0.05
MIN_FLOOR = 0.01  # clocks and allocator alone move a step by about this much between two processes
MAX_SAME = 0.05  # a wider band than this is no statement of equality, however wide the noise
ALPHA = 0.05
_CHUNK = 4_000_000  # elements of one bootstrap slab: 32 MB, whatever the number of trials


class Speedup(NamedTuple):
    """Reference / candidate: 2 is twice as fast. `low` and `high` bound it with 95 % confidence."""

    centre: float
    low: float
    high: float


class Median(NamedTuple):
    """A median in the unit of the samples, with its 95 % interval."""

    centre: float
    low: float
    high: float


def log_times(ms: Times, name: str = "ms") -> NDArray[np.float64]:
    """Natural logarithms of a list of times; ValueError unless one-dimensional, finite and positive."""
    times = np.asarray(ms, dtype=np.float64)
    if times.ndim != 1 or not np.all(np.isfinite(times)) or np.any(times <= 0):
        raise ValueError(f"{name}: expected a list of finite times above 0 ms, got {_excerpt(times)}")
    return np.log(times)


def _excerpt(times: NDArray[np.float64]) -> str:
    if times.ndim != 1:
        return f"an array of shape {times.shape}"
    bad = times[~(np.isfinite(times) & (times > 0))]
    return f"{bad[0]} among {times.size} values"


def _samples(reference_ms: Times, candidate_ms: Times, paired: bool) -> list[NDArray[np.float64]]:
    """[log ratios] when paired, [log reference, log candidate] otherwise."""
    reference, candidate = log_times(reference_ms, "reference_ms"), log_times(candidate_ms, "candidate_ms")
    if not paired:
        return [reference, candidate]
    if reference.size != candidate.size:
        raise ValueError(f"paired trials need lists of one length, got {reference.size} and {candidate.size}")
    return [reference - candidate]


def _hodges_lehmann(samples: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Centre of every row. samples: one (rows, n) array → median of the n(n+1)/2 Walsh averages; two → of the n·m
    differences."""
    if len(samples) == 1:
        i, j = np.triu_indices(samples[0].shape[1])
        pairs = (samples[0][:, i] + samples[0][:, j]) / 2
    else:
        pairs = (samples[0][:, :, None] - samples[1][:, None, :]).reshape(len(samples[0]), -1)
    return np.median(pairs, axis=1, overwrite_input=True)


def replicates(
    reference_ms: Times, candidate_ms: Times, paired: bool, seed: int = 0, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Bootstrap replicates of the log speed-up, shape (resamples,): resampled by round when paired, by trial within
    each arm otherwise. Two cells' replicates may be subtracted if they were drawn with different seeds."""
    samples = _samples(reference_ms, candidate_ms, paired)
    rng = np.random.default_rng(seed)
    drawn = [x[rng.integers(0, x.size, (resamples, x.size))] for x in samples]
    pairs = math.prod(x.size for x in samples) if len(samples) == 2 else samples[0].size * (samples[0].size + 1) // 2
    rows = max(1, _CHUNK // pairs)
    slabs = [_hodges_lehmann([x[k : k + rows] for x in drawn]) for k in range(0, resamples, rows)]
    return np.concatenate(slabs)


def tails(trials: int) -> tuple[float, float]:
    """Quantiles of the bootstrap distribution that make a 95 % interval from this many trials.

    The plain percentile interval is too narrow for few samples; this is the expanded one (Hesterberg 2015): the
    normal tail beyond t·sqrt(n/(n-1)). At 30 trials it cuts 1.9 % a side instead of 2.5 %.
    """
    t = stats.t.ppf(1 - ALPHA / 2, trials - 1) * math.sqrt(trials / (trials - 1))
    tail = float(stats.norm.cdf(-t))
    return tail, 1 - tail


def speedup(reference_ms: Times, candidate_ms: Times, paired: bool, seed: int = 0) -> Speedup | None:
    """Speed-up of the candidate with a 95 % bootstrap interval; None with fewer than three trials in an arm.

    paired: both lists are of one process, trial by trial in one round: Hodges–Lehmann centre of the log ratios.
    Not paired (A B B A blocks in separate processes): two-sample Hodges–Lehmann shift of the logarithms. Its interval
    knows the spread of the trials, not that between processes: two blocks an arm are too few to estimate it.
    """
    samples = _samples(reference_ms, candidate_ms, paired)
    trials = min(x.size for x in samples)
    if trials < MIN_TRIALS:
        return None
    centre = float(_hodges_lehmann([x[None] for x in samples])[0])
    low, high = np.quantile(replicates(reference_ms, candidate_ms, paired, seed), tails(trials))
    return Speedup(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)))


def median_interval(ms: Times) -> Median | None:
    """Median with the distribution-free 95 % interval of its order statistics; None for an empty list.

    Below six trials no order statistics reach 95 %: the interval is then the range, the widest that there is.
    """
    ordered = np.sort(np.exp(log_times(ms)))
    if not ordered.size:
        return None
    k = max(int(stats.binom.ppf(ALPHA / 2, ordered.size, 0.5)) - 1, 0)
    return Median(float(np.median(ordered)), float(ordered[k]), float(ordered[-1 - k]))


def p_value(reference_ms: Times, candidate_ms: Times, paired: bool) -> float:
    """Two-sided p that the arms are equally fast: Wilcoxon signed rank on log ratios, or Mann–Whitney. 1 if equal."""
    samples = _samples(reference_ms, candidate_ms, paired)
    if paired:
        return _p(stats.wilcoxon(samples[0])) if samples[0].any() else 1.0
    if min(x.size for x in samples) == 0 or np.ptp(np.concatenate(samples)) == 0:
        return 1.0
    return _p(stats.mannwhitneyu(samples[0], samples[1]))


def _p(result: Any) -> float:  # scipy's result classes are made at run time: type checkers cannot see into them
    return float(result.pvalue)


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
    error = math.log(same.high / same.low) / (2 * stats.norm.ppf(1 - ALPHA / 2))
    return math.expm1(
        math.log1p(noise_floor(same)) + float(stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(0.8)) * error
    )


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
