"""The contrast of two arms: reference / candidate with its interval, and what can be made of several. The one place.

Times are milliseconds, one a trial, in the order of the rounds. Everything is done on logarithms: a ratio and its
inverse are then equally far from 1, and one slow trial moves nothing much. NaN, infinite and non-positive times are
refused with a ValueError: a trial that did not happen has no place in a list of trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Times = Sequence[float] | NDArray[np.float64]
Logs = NDArray[np.float64]

RESAMPLES = 2000
MIN_TRIALS = 3
ALPHA = 0.05


class Speedup(NamedTuple):
    """Reference / candidate: 2 is twice as fast. `low` and `high` bound it with 95 % confidence."""

    centre: float
    low: float
    high: float


class Contrast:
    """A ratio of two times, or what ratios of independent cells were combined to. Only asked for is it bootstrapped.

    `centre` is the ratio (2 is twice as fast), `trials` the number in the smallest arm that went into it.
    """

    def __init__(
        self, centre: float, trials: int, draw: Callable[[], Logs], interval: Callable[[], tuple[float, float]]
    ) -> None:
        """`draw` makes the bootstrap replicates of log(centre), `interval` the 95 % bounds of the centre."""
        self.centre, self.trials = centre, trials
        self._draw, self._interval = draw, interval

    @cached_property
    def replicates(self) -> Logs:
        """Bootstrap replicates of the logarithm of the ratio, shape (RESAMPLES,)."""
        return self._draw()

    @cached_property
    def speedup(self) -> Speedup:
        """The ratio with its 95 % interval."""
        return Speedup(self.centre, *self._interval())

    @property
    def low(self) -> float:
        """Lower 95 % bound of the ratio."""
        return self.speedup.low

    @property
    def high(self) -> float:
        """Upper 95 % bound of the ratio."""
        return self.speedup.high

    @property
    def logs(self) -> Logs:
        """Logarithm of the ratio, then its replicates, shape (1 + RESAMPLES,): what combinations are made of."""
        return np.concatenate([[math.log(self.centre)], self.replicates])

    def difference(self, other: Contrast) -> Contrast:
        """How many times the other's ratio this one is. The two are of independent cells."""
        return combined(self.logs - other.logs, min(self.trials, other.trials))

    def p_value(self) -> float:
        """Two-sided p that the ratio is 1: Student's t on the bootstrap's error."""
        centre = math.log(self.centre)
        error = float(np.std(self.replicates)) * math.sqrt(self.trials / (self.trials - 1))
        return 2 * float(stats.t.sf(abs(centre) / error, self.trials - 1)) if error else float(centre == 0)


def contrast(
    reference_ms: Times, candidate_ms: Times, paired: bool, seed: int = 0, known: Speedup | None = None
) -> Contrast | None:
    """The contrast of two lists of trials; None with fewer than three trials in an arm.

    paired: both lists are of one process, trial by trial in one round: Hodges–Lehmann centre of the log ratios.
    Not paired (A B B A blocks in separate processes): two-sample Hodges–Lehmann shift of the logarithms. Its interval
    knows the spread of the trials, not that between processes: two blocks an arm are too few to estimate it.

    seed: of the replicates; contrasts that are combined need seeds of their own, or their draws would be correlated.
    The contrast's own interval is always drawn with seed 0, so that it is the one that stands in a record. known: that
    one, where it is at hand.
    """
    samples = _samples(reference_ms, candidate_ms, paired)
    trials = min(x.size for x in samples)
    if known is None and trials < MIN_TRIALS:
        return None
    centre = known.centre if known else math.exp(_hodges_lehmann(samples))

    def interval() -> tuple[float, float]:
        return known[1:] if known else _bounds(math.log(centre), _replicates(samples, 0), trials)

    return Contrast(centre, trials, lambda: _replicates(samples, seed), interval)


def speedup(reference_ms: Times, candidate_ms: Times, paired: bool) -> Speedup | None:
    """Ratio and 95 % interval of two lists of trials, see `contrast`; None with fewer than three trials in an arm."""
    found = contrast(reference_ms, candidate_ms, paired)
    return found and found.speedup


def combined(logs: Logs, trials: int) -> Contrast:
    """A contrast from a combination of several contrasts' `logs`: those of independent cells are combined one by one.
    trials: of the smallest of them."""
    centre = float(logs[0])
    return Contrast(math.exp(centre), trials, lambda: logs[1:], lambda: _bounds(centre, logs[1:], trials))


def mean(contrasts: Sequence[Contrast]) -> Contrast:
    """The geometric mean of several cells' ratios."""
    return combined(np.mean([c.logs for c in contrasts], axis=0), min(c.trials for c in contrasts))


def _bounds(centre: float, replicates: Logs, trials: int) -> tuple[float, float]:
    """95 % bounds of a ratio from the logarithms of its centre and replicates; the centre lies within."""
    low, high = np.quantile(replicates, tails(trials))
    return math.exp(min(low, centre)), math.exp(max(high, centre))


@cache
def tails(trials: int) -> tuple[float, float]:
    """Quantiles of the bootstrap distribution that make a 95 % interval from this many trials.

    The plain percentile interval is too narrow for few samples; this is the expanded one (Hesterberg 2015): the
    normal tail beyond t·sqrt(n/(n-1)). At 30 trials it cuts 1.9 % a side instead of 2.5 %.
    """
    t = stats.t.ppf(1 - ALPHA / 2, trials - 1) * math.sqrt(trials / (trials - 1))
    tail = float(stats.norm.cdf(-t))
    return tail, 1 - tail


def log_times(ms: Times, name: str = "ms") -> Logs:
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


def _samples(reference_ms: Times, candidate_ms: Times, paired: bool) -> list[Logs]:
    """[log ratios] when paired, [log reference, log candidate] otherwise."""
    reference, candidate = log_times(reference_ms, "reference_ms"), log_times(candidate_ms, "candidate_ms")
    if not paired:
        return [reference, candidate]
    if reference.size != candidate.size:
        raise ValueError(f"paired trials need lists of one length, got {reference.size} and {candidate.size}")
    return [reference - candidate]


def _pairs(samples: list[Logs]) -> tuple[NDArray[np.intp], NDArray[np.intp], Logs]:
    """The values whose median is the Hodges–Lehmann centre, in ascending order, with the indices that each is made of.

    Of one sample the n(n+1)/2 Walsh averages, of two the n·m differences.
    """
    first, second = samples[0], samples[-1]
    if len(samples) == 1:
        i, j = np.triu_indices(first.size)
        values = (first[i] + first[j]) / 2
    else:
        i, j = (x.ravel() for x in np.indices((first.size, second.size)))
        values = first[i] - second[j]
    order = np.argsort(values)
    return i[order], j[order], values[order]


def _hodges_lehmann(samples: list[Logs]) -> float:
    return float(np.median(_pairs(samples)[2]))


def _replicates(samples: list[Logs], seed: int) -> Logs:
    """Hodges–Lehmann centres of RESAMPLES resamples: by round when paired, by trial within each arm otherwise.

    A resample has the same Walsh averages as the sample, only not equally often. So they are sorted once, and the
    median of a resample is the value at which its weights have added up to half: for all resamples at once, and some
    fifteen times as fast as a median of each.
    """
    i, j, values = _pairs(samples)
    rng = np.random.default_rng(seed)
    counts = [_how_often(rng.integers(0, x.size, (RESAMPLES, x.size)), x.size) for x in samples]
    ranks = sorted({(values.size - 1) // 2, values.size // 2})  # the middle one, or the two about the middle
    reached = np.zeros(RESAMPLES, np.int32)
    places = np.zeros((len(ranks), RESAMPLES), np.int32)
    for n, (a, b) in enumerate(zip(i.tolist(), j.tolist(), strict=True)):
        if n % 32 == 0 and reached.min() > ranks[-1]:
            break  # beyond the middle of every resample
        reached += _weights(counts, a, b)
        for place, rank in zip(places, ranks, strict=True):
            place += reached <= rank
    return np.mean(values[places], axis=0)


def _weights(counts: list[NDArray[np.int32]], a: int, b: int) -> NDArray[np.int32]:
    """How often the pair of trials a and b stands in each resample. A trial drawn c times from one sample has c(c+1)/2
    averages with itself."""
    if len(counts) == 1 and a == b:
        return counts[0][a] * (counts[0][a] + 1) // 2
    return counts[0][a] * counts[-1][b]


def _how_often(drawn: NDArray[np.int64], size: int) -> NDArray[np.int32]:
    """Shape (size, resamples): how often each trial was drawn into each resample."""
    flat = (drawn + size * np.arange(len(drawn))[:, None]).ravel()
    counts = np.bincount(flat, minlength=size * len(drawn)).reshape(len(drawn), size)
    return np.ascontiguousarray(counts.T, dtype=np.int32)
