"""The contrast of two arms: reference / candidate with its interval, and what can be made of several. The one place.

Times are milliseconds, one a trial, in the order of the rounds. Everything is done on logarithms: a ratio and its
inverse are then equally far from 1, and one slow trial moves nothing much. NaN, infinite and non-positive times are
refused with a ValueError: a trial that did not happen has no place in a list of trials.

Every interval is Student's t about an estimate with a standard error and degrees of freedom. What these count is what
is independent: rounds in one process, as many as their autocorrelation leaves; processes; sessions. How often each
covers the truth is simulated in docs/intervals.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

if TYPE_CHECKING:
    from lorabench.record.schema import Record

Times = Sequence[float] | NDArray[np.float64]
Logs = NDArray[np.float64]

RESAMPLES = 2000
MIN_TRIALS = 3
ALPHA = 0.05
LEAST_CORRELATION = -0.2  # what is estimated below it is noise more often than not, and would narrow the interval
MOST_CORRELATION = 0.9  # beyond it some thirty rounds hold one or two independent ones, and no estimate is left
LEAST_FREEDOM = 2.0  # degrees: of fewer the interval would say only that nothing is known


class Speedup(NamedTuple):
    """Reference / candidate: 2 is twice as fast. `low` and `high` bound it with 95 % confidence."""

    centre: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A logarithm with its standard error and the degrees of freedom that the error has."""

    log: float
    error: float
    freedom: float

    @property
    def reach(self) -> float:
        """From the logarithm to either end of its 95 % interval."""
        return float(special.stdtrit(self.freedom, 1 - ALPHA / 2)) * self.error if self.error else 0.0


class Contrast:
    """A ratio of two times, or what ratios of independent cells were combined to.

    `trials` is the number in the smallest arm that went into it.
    """

    def __init__(self, estimate: Estimate, trials: int, seed: int = 0, replicates: Logs | None = None) -> None:
        """`seed` of the replicates; or the `replicates` themselves, whose percentiles are then the interval."""
        self.estimate, self.trials = estimate, trials
        self._seed, self._given = seed, replicates

    @property
    def centre(self) -> float:
        """The ratio: 2 is twice as fast."""
        return math.exp(self.estimate.log)

    @cached_property
    def replicates(self) -> Logs:
        """Draws from the ratio's confidence distribution, Student's t, as logarithms, shape (RESAMPLES,).

        One from each RESAMPLES-th part of the distribution, in random order: its percentiles are exact, and draws of
        different seeds are independent.
        """
        if self._given is not None:
            return self._given
        drawn = np.random.default_rng(self._seed).permutation(_quantiles_of_t(self.estimate.freedom))
        return self.estimate.log + self.estimate.error * drawn

    @cached_property
    def speedup(self) -> Speedup:
        """The ratio with its 95 % interval."""
        log, reach = self.estimate.log, self.estimate.reach
        low, high = log - reach, log + reach
        if self._given is not None:
            low, high = np.quantile(self._given, (ALPHA / 2, 1 - ALPHA / 2))
        return Speedup(math.exp(log), math.exp(min(low, log)), math.exp(max(high, log)))

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
        return np.concatenate([[self.estimate.log], self.replicates])

    def difference(self, other: Contrast) -> Contrast:
        """How many times the other's ratio this one is. The two are of independent cells."""
        seed = hash((self._seed, other._seed)) % 2**32
        return Contrast(_minus(self.estimate, other.estimate), min(self.trials, other.trials), seed)

    def p_value(self) -> float:
        """Two-sided p that the ratio is 1: below 0.05 where the 95 % interval leaves 1 out, by the same Student's t."""
        log, error, freedom = self.estimate
        return 2 * float(special.stdtr(freedom, -abs(log) / error)) if error else float(log == 0)


def contrast(
    reference_ms: Times,
    candidate_ms: Times,
    paired: bool,
    seed: int = 0,
    processes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Contrast | None:
    """The contrast of two lists of trials; None with fewer than three trials in an arm.

    paired: the lists are of the same rounds, in their order. In one process: Hodges–Lehmann centre of the log ratios,
    with the error of as many independent rounds as their autocorrelation leaves. With `processes`, round by round
    between processes: how many rounds each pair of processes had; one number is an arm in a single process throughout.
    The ratio is then the mean of the processes' centres, with the error between them.
    Not paired: the difference of the arms, with the errors of both (Welch). `processes` says how many trials each
    process of the reference and of the candidate made, in their order: an arm is then the mean of its processes'
    centres, and its error is that between processes. Without it each list is of one process, and what differs between
    two processes is in no interval.

    seed: of the replicates; contrasts that are combined need seeds of their own, or their draws would be correlated.
    """
    reference, candidate = log_times(reference_ms, "reference_ms"), log_times(candidate_ms, "candidate_ms")
    if paired and reference.size != candidate.size:
        raise ValueError(f"paired trials need lists of one length, got {reference.size} and {candidate.size}")
    trials = min(reference.size, candidate.size)
    if trials < MIN_TRIALS:
        return None
    of_reference, of_candidate = processes or ((), ())
    if paired:
        return Contrast(_of_turns(reference - candidate, of_reference, of_candidate), trials, seed)
    return Contrast(_minus(_of_arm(reference, of_reference), _of_arm(candidate, of_candidate)), trials, seed)


def contrast_of(record: Record, phases: Sequence[str], seed: int = 0) -> Contrast | None:
    """The contrast of a record's two arms over these phases; None where an arm has no time, or too few trials."""
    reference, candidate = record.ms("reference", phases), record.ms("candidate", phases)
    if not reference or not candidate:
        return None
    return contrast(reference, candidate, record.pairing != "abba", seed, record.trials_by_process)


def combined(logs: Logs, trials: int) -> Contrast:
    """A contrast from a combination of several contrasts' `logs`: those of independent cells are combined one by one.
    trials: of the smallest of them."""
    low, high = np.quantile(logs[1:], (ALPHA / 2, 1 - ALPHA / 2))
    error = float(high - low) / (2 * float(stats.norm.ppf(1 - ALPHA / 2)))
    return Contrast(Estimate(float(logs[0]), error, math.inf), trials, replicates=logs[1:])


def mean(contrasts: Sequence[Contrast]) -> Contrast:
    """The geometric mean of several cells' ratios."""
    seed = hash(tuple(c._seed for c in contrasts)) % 2**32
    return Contrast(_mean([c.estimate for c in contrasts]), min(c.trials for c in contrasts), seed)


def over_sessions(contrasts: Sequence[Contrast]) -> Contrast:
    """What several sessions say of one cell: the geometric mean of their ratios.

    Its error is that between sessions, sd / √n with n - 1 degrees of freedom. Where few sessions happen to agree more
    closely than the error within each allows, it is the error within.
    """
    if len(contrasts) == 1:
        return contrasts[0]
    together = mean(contrasts)
    between = _student(np.array([c.estimate.log for c in contrasts]))
    widest = max(together.estimate, between, key=lambda estimate: estimate.reach)
    return Contrast(widest, together.trials, together._seed)


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


def _of_rounds(logs: Logs) -> Estimate:
    """The Hodges–Lehmann centre (median of the Walsh averages) of one process's rounds, in their order."""
    n = logs.size
    averages = _walsh_averages(logs)
    independent = n / _inflation(logs)
    error = _scale(averages, n) / math.sqrt(independent)
    # Half of the degrees pay for the autocorrelation, which is itself an estimate.
    return Estimate(_middle(averages), error, max((independent - 1) / 2, LEAST_FREEDOM))


def _of_turns(logs: Logs, of_reference: Sequence[int], of_candidate: Sequence[int]) -> Estimate:
    """Rounds between processes; of one pair of processes there is only the error within it."""
    fewer, sizes = sorted((of_reference, of_candidate), key=len)
    if len(sizes) < 2:
        return _of_rounds(logs)
    if len(fewer) > 1 and list(fewer) != list(sizes):
        raise ValueError(f"rounds between processes need one number each, got {list(fewer)} and {list(sizes)}")
    found = _of_processes(logs, sizes)
    if len(fewer) > 1:
        return found
    # What is particular to the single process is in every difference alike: sd √(1/n + 1) in place of sd / √n.
    return found._replace(error=found.error * math.sqrt(len(sizes) + 1))


def _walsh_averages(logs: Logs) -> Logs:
    """Of n values the n(n+1)/2 means of two, in ascending order."""
    i, j = _upper_triangle(logs.size)
    return np.sort((logs[i] + logs[j]) / 2)


@cache
def _upper_triangle(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    i, j = np.triu_indices(n)
    return i, j


def _middle(ordered: Logs) -> float:
    """The median of values in ascending order."""
    return float(ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2


def _scale(averages: Logs, n: int) -> float:
    """√n times the standard error of the Hodges–Lehmann centre, were the n values independent: from the width of the
    signed-rank test's 80 % interval (Lehmann 1963), which outliers do not reach."""
    rank, normal = _signed_rank_bound(n)
    return float(averages[-1 - rank] - averages[rank]) / (2 * normal) * math.sqrt(n)


@cache
def _signed_rank_bound(n: int) -> tuple[int, float]:
    """(the Walsh average at which the 80 % interval begins, how many standard errors of the rank sum that is)."""
    middle, deviation = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    rank = max(round(middle - float(stats.norm.ppf(0.9)) * deviation), 0)
    return rank, (middle - rank) / deviation


def _inflation(logs: Logs) -> float:
    """How many times the variance of a mean of independent rounds that of these is, were they autoregressive:
    1 + 2 Σ (1 - k/n) ρᵏ. Of the ranks, so that a slow trial weighs no more in it than in the centre."""
    n = logs.size
    centred = stats.rankdata(logs) - (n + 1) / 2
    whole = float(centred @ centred)
    if not whole:
        return 1.0
    found = float(centred[1:] @ centred[:-1]) / whole
    # It comes out too small by (1 + 4 ρ) / n (Marriott & Pope 1954). The other 1 / n is there because ρ missed by as
    # much costs more coverage than ρ overstated: the inflation bends upwards.
    rho = min(max(found + (2 + 4 * found) / n, LEAST_CORRELATION), MOST_CORRELATION)
    lags = np.arange(1, n)
    return 1 + 2 * float((1 - lags / n) @ rho**lags)


def _of_arm(logs: Logs, sizes: Sequence[int]) -> Estimate:
    """An arm that was measured apart; of one process there is only the error within it."""
    return _of_processes(logs, sizes) if len(sizes) > 1 else _of_rounds(logs)


def _of_processes(logs: Logs, sizes: Sequence[int]) -> Estimate:
    """The mean of several processes' centres, with the error that they show between them."""
    if sum(sizes) != logs.size:
        raise ValueError(f"{logs.size} trials do not make processes of {list(sizes)}")
    parts = np.split(logs, np.cumsum(sizes)[:-1])
    return _student(np.array([_middle(_walsh_averages(part)) for part in parts]))


def _student(values: Logs) -> Estimate:
    """Mean of independent values, sd / √n, n - 1 degrees."""
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(values.size), values.size - 1)


def _minus(first: Estimate, second: Estimate) -> Estimate:
    """The difference of two independent estimates."""
    return _summed([first, second], first.log - second.log)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates."""
    n = len(estimates)
    total = _summed(estimates, sum(e.log for e in estimates))
    return Estimate(total.log / n, total.error / n, total.freedom)


def _summed(parts: Sequence[Estimate], log: float) -> Estimate:
    """Errors add in quadrature, and the degrees of freedom are Welch's and Satterthwaite's."""
    variances = np.array([e.error**2 for e in parts])
    whole = float(variances.sum())
    if not whole:
        return Estimate(log, 0.0, min(e.freedom for e in parts))
    freedom = whole**2 / float((variances**2 / np.array([e.freedom for e in parts])).sum())
    return Estimate(log, math.sqrt(whole), freedom)


def _quantiles_of_t(freedom: float) -> Logs:
    return special.stdtrit(freedom, (np.arange(RESAMPLES) + 0.5) / RESAMPLES)
