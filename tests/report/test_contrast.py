"""The contrast against known truths: a ratio put in comes out, intervals cover, combinations are what they say."""

import math

import numpy as np
import pytest

from lorabench.record import stats
from lorabench.record.contrast import Speedup, combined, contrast, mean, speedup, tails


def trials(ratio=1.0, n=30, sd=0.02, drift=0.0, seed=0):
    """(reference, candidate) in ms; the drift is shared, as in one process."""
    rng = np.random.default_rng(seed)
    shared = np.exp(np.linspace(0, drift, n))
    return 50 * shared * np.exp(rng.normal(0, sd, n)), 50 / ratio * shared * np.exp(rng.normal(0, sd, n))


@pytest.mark.parametrize("paired", [True, False])
def test_recovers_a_known_ratio(paired):
    found = speedup(*trials(1.37, sd=0.01), paired=paired)
    assert found.low < 1.37 < found.high
    assert found.centre == pytest.approx(1.37, rel=0.01)
    assert found.high / found.low < 1.02


def test_pairing_removes_a_shared_drift():
    slow = trials(1.05, sd=0.003, drift=0.5)
    paired, unpaired = speedup(*slow, paired=True), speedup(*slow, paired=False)
    assert math.log(paired.high / paired.low) < 0.1 * math.log(unpaired.high / unpaired.low)
    assert paired.low < 1.05 < paired.high


def test_one_outlier_moves_the_centre_little():
    reference, candidate = trials(1.2, sd=0.005)
    candidate[7] *= 20
    assert speedup(reference, candidate, paired=True).centre == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(("paired", "n"), [(True, 20), (True, 8), (False, 12)])
def test_interval_covers_the_truth_19_times_in_20(paired, n):
    runs, covered = 200, 0
    for seed in range(runs):
        found = speedup(*trials(1.0, n=n, seed=seed), paired=paired)
        covered += found.low <= 1 <= found.high
    # Three standard errors of a rate of 0.95 in 200 are 0.046; wider than asked is no fault, but by little.
    assert 0.905 <= covered / runs <= 0.995


def test_swapping_the_arms_inverts_the_speedup_and_order_of_rounds_is_irrelevant():
    reference, candidate = trials(1.3)
    there, back = (speedup(*x, paired=True) for x in ((reference, candidate), (candidate, reference)))
    assert there.centre * back.centre == pytest.approx(1)
    shuffled = np.random.default_rng(1).permutation(30)
    again = speedup(reference[shuffled], candidate[shuffled], paired=True)
    assert again.centre == pytest.approx(there.centre)
    assert math.log(again.low / there.low) == pytest.approx(0, abs=2e-3)


def test_hodges_lehmann_by_hand():
    # log2 ratios 0, 1, 3: Walsh averages 0, 0.5, 1, 1.5, 2, 3; their median is 1.25
    assert speedup([1, 2, 8], [1, 1, 1], paired=True).centre == pytest.approx(2**1.25)
    # differences of logs 0..: reference {0, 1, 2}, candidate {0, 0, 1}: sorted -1 0 0 0 1 1 1 2 2, median 1
    assert speedup([1, 2, 4], [1, 1, 2], paired=False).centre == pytest.approx(2)


@pytest.mark.parametrize("paired", [True, False])
def test_equal_values_have_a_point_interval_and_p_one(paired):
    assert speedup([5.0] * 9, [5.0] * 9, paired) == pytest.approx((1, 1, 1))
    assert stats.p_value([5.0] * 9, [5.0] * 9, paired) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_refused(bad):
    for call in (lambda ms: speedup(ms, [1.0, 2, 3], True), stats.median_interval):
        with pytest.raises(ValueError, match="finite times above 0"):
            call([1.0, bad, 2.0])


def test_too_few_trials_and_unequal_lists():
    assert speedup([1.0, 2], [1.0, 2], paired=True) is None
    with pytest.raises(ValueError, match="3 and 4"):
        speedup([1.0, 2, 3], [1.0, 2, 3, 4], paired=True)


def straightforward(samples, seed):
    """The replicates as they are defined: resample, then the median of all pairs."""
    rng = np.random.default_rng(seed)
    drawn = [x[rng.integers(0, x.size, (2000, x.size))] for x in samples]
    if len(drawn) == 1:
        i, j = np.triu_indices(samples[0].size)
        return np.median((drawn[0][:, i] + drawn[0][:, j]) / 2, axis=1)
    return np.median((drawn[0][:, :, None] - drawn[1][:, None, :]).reshape(2000, -1), axis=1)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 4), (9, 6), (30, 30)])
@pytest.mark.parametrize("decimals", [1, 6])
def test_the_replicates_are_those_of_the_definition(n, m, decimals):
    """With ties (one decimal) as without."""
    rng = np.random.default_rng(n)
    reference, candidate = (np.round(rng.normal(50, 1, size), decimals) for size in (n, m))
    apart = contrast(reference, candidate, paired=False, seed=7)
    expected = straightforward([np.log(reference), np.log(candidate)], 7)
    np.testing.assert_allclose(apart.replicates, expected, rtol=0, atol=1e-14)
    if n == m:
        paired = contrast(reference, candidate, paired=True, seed=7)
        expected = straightforward([np.log(reference) - np.log(candidate)], 7)
        np.testing.assert_allclose(paired.replicates, expected, rtol=0, atol=1e-14)
        found, (low, high) = paired.speedup, np.quantile(straightforward([np.log(reference / candidate)], 0), tails(n))
        assert found[1:] == pytest.approx((math.exp(low), math.exp(high)), abs=1e-12)


def test_a_difference_is_the_ratio_of_the_ratios_and_wider_than_either():
    one, other = (contrast(*trials(r, seed=s), paired=True, seed=s) for r, s in ((1.5, 1), (1.2, 2)))
    apart = one.difference(other)
    assert apart.centre == pytest.approx(one.centre / other.centre)
    assert apart.speedup.low < 1.25 < apart.speedup.high
    width = lambda c: math.log(c.speedup.high / c.speedup.low)  # noqa: E731
    assert max(width(one), width(other)) < width(apart) < width(one) + width(other)
    assert apart.p_value() < 1e-6 < one.difference(contrast(*trials(1.5, seed=9), paired=True, seed=9)).p_value()


def test_a_mean_is_geometric_and_a_combination_keeps_the_smallest_number_of_trials():
    cells = [contrast(*trials(r, n=n, seed=n), paired=True, seed=n) for r, n in ((1.2, 30), (1.5, 12), (2.0, 20))]
    together = mean(cells)
    assert together.centre == pytest.approx(math.prod(c.centre for c in cells) ** (1 / 3))
    assert together.trials == cells[0].difference(cells[1]).trials == 12
    twice = combined(2 * cells[0].logs, 30)
    assert twice.speedup == pytest.approx(tuple(x**2 for x in combined(cells[0].logs, 30).speedup))


def test_what_stands_in_a_record_is_not_computed_again():
    found = contrast(*trials(1.5), paired=True, known=Speedup(1.23, 1.2, 1.25))
    assert found.speedup == (1.23, 1.2, 1.25)
    assert found.logs[0] == pytest.approx(math.log(1.23))
