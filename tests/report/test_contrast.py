"""The contrast against known truths: a ratio put in comes out, intervals cover, combinations are what they say."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lorabench.record.contrast import combined, contrast, mean, over_sessions


def trials(ratio=1.0, n=30, sd=0.02, drift=0.0, seed=0):
    """(reference, candidate) in ms; the drift is shared, as in one process."""
    rng = np.random.default_rng(seed)
    shared = np.exp(np.linspace(0, drift, n))
    return 50 * shared * np.exp(rng.normal(0, sd, n)), 50 / ratio * shared * np.exp(rng.normal(0, sd, n))


@pytest.mark.parametrize("paired", [True, False])
def test_recovers_a_known_ratio(paired):
    found = contrast(*trials(1.37, sd=0.01), paired=paired)
    assert found.low < 1.37 < found.high
    assert found.centre == pytest.approx(1.37, rel=0.01)
    assert found.high / found.low < 1.02


def test_pairing_removes_a_shared_drift():
    slow = trials(1.05, sd=0.003, drift=0.5)
    paired, unpaired = contrast(*slow, paired=True), contrast(*slow, paired=False)
    assert math.log(paired.high / paired.low) < 0.1 * math.log(unpaired.high / unpaired.low)
    assert paired.low < 1.05 < paired.high


def test_one_outlier_moves_the_centre_little():
    reference, candidate = trials(1.2, sd=0.005)
    candidate[7] *= 20
    assert contrast(reference, candidate, paired=True).centre == pytest.approx(1.2, rel=0.01)


def test_swapping_the_arms_inverts_the_speedup():
    reference, candidate = trials(1.3)
    there, back = (contrast(*x, paired=True) for x in ((reference, candidate), (candidate, reference)))
    assert there.centre * back.centre == pytest.approx(1)
    assert there.low * back.high == pytest.approx(1)


def test_the_order_of_rounds_counts_in_the_interval_and_not_in_the_centre():
    reference, candidate = trials(1.3)
    order = np.argsort(reference / candidate)  # a drift of the ratio: neighbours are alike
    mixed, sorted_ = (contrast(reference[o], candidate[o], paired=True) for o in (slice(None), order))
    assert sorted_.centre == pytest.approx(mixed.centre)
    assert math.log(sorted_.high / sorted_.low) > 2 * math.log(mixed.high / mixed.low)


def test_hodges_lehmann_by_hand():
    # log2 ratios 0, 1, 3: Walsh averages 0, 0.5, 1, 1.5, 2, 3; their median is 1.25
    assert contrast([1, 2, 8], [1, 1, 1], paired=True).centre == pytest.approx(2**1.25)
    # log2 of the reference 0, 1, 2: centre 1; of the candidate 0, 0, 1: averages 0 0 0 0.5 0.5 1, centre 0.25
    assert contrast([1, 2, 4], [1, 1, 2], paired=False).centre == pytest.approx(2**0.75)


@pytest.mark.parametrize("paired", [True, False])
def test_equal_values_have_a_point_interval_and_p_one(paired):
    assert contrast([5.0] * 9, [5.0] * 9, paired).speedup == pytest.approx((1, 1, 1))
    assert contrast([5.0] * 9, [5.0] * 9, paired).p_value() == 1
    assert contrast([6.0] * 9, [5.0] * 9, paired).p_value() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_refused(bad):
    with pytest.raises(ValueError, match="finite times above 0"):
        contrast([1.0, bad, 2.0], [1.0, 2, 3], True)


def test_too_few_trials_and_unequal_lists():
    assert contrast([1.0, 2], [1.0, 2], paired=True) is None
    with pytest.raises(ValueError, match="3 and 4"):
        contrast([1.0, 2, 3], [1.0, 2, 3, 4], paired=True)


def test_processes_by_hand():
    """Two processes of two trials each: the centres of their logarithms, then Welch's t of two against two."""
    reference, candidate = np.exp([0.0, 0.2, 0.4, 0.4]), np.exp([0.1, 0.1, 0.3, 0.3])
    estimate = contrast(reference, candidate, False, processes=([2, 2], [2, 2])).estimate
    assert estimate.log == pytest.approx((0.1 + 0.4) / 2 - (0.1 + 0.3) / 2)
    by_scipy = scipy_stats.ttest_ind([0.1, 0.4], [0.1, 0.3], equal_var=False)
    assert (estimate.log / estimate.error, estimate.freedom) == pytest.approx((by_scipy.statistic, by_scipy.df))
    with pytest.raises(ValueError, match="4 trials do not make"):
        contrast(reference, candidate, False, processes=([2, 3], [2, 2]))


def test_rounds_between_processes_by_hand():
    """Two processes of two rounds and one of one: the centres of their log ratios, then Student's t of the three."""
    ratios, sizes = [0.1, 0.3, 0.4, 0.4, 0.9], [2, 2, 1]
    reference, candidate = np.exp(np.add(ratios, 2.0)), np.exp([2.0] * 5)
    both = contrast(reference, candidate, True, processes=(sizes, sizes)).estimate
    values = np.array([0.2, 0.4, 0.9])
    by_scipy = scipy_stats.ttest_1samp(values, 0)
    assert (both.log, both.freedom) == (pytest.approx(0.5), 2)
    assert both.log / both.error == pytest.approx(by_scipy.statistic)
    for single in (([5], sizes), (sizes, [5])):
        found = contrast(reference, candidate, True, processes=single).estimate
        assert found.log == pytest.approx(0.5) and found.freedom == 2
        assert found.error == pytest.approx(values.std(ddof=1) * math.sqrt(1 / 3 + 1))


def test_of_one_pair_of_processes_there_is_the_error_within_it():
    reference, candidate = trials(1.3)
    within, between = (contrast(reference, candidate, True, processes=own) for own in (None, ([30], [30])))
    assert between.estimate == within.estimate
    with pytest.raises(ValueError, match="one number each"):
        contrast(reference, candidate, True, processes=([10, 20], [20, 10]))


def test_the_interval_leaves_one_out_where_p_is_below_five_per_cent():
    for seed in range(40):
        reference, candidate = trials(1.008, seed=seed)
        sizes = [8, 8, 7, 7]
        for found in (contrast(reference, candidate, True), contrast(reference, candidate, False, 0, (sizes, sizes))):
            assert (found.p_value() < 0.05) == (not found.low <= 1 <= found.high)


def test_the_replicates_are_of_the_interval_and_independent_by_their_seeds():
    one, other = (contrast(*trials(1.3), paired=True, seed=seed) for seed in (1, 2))
    assert np.exp(np.quantile(one.replicates, (0.025, 0.975))) == pytest.approx(one.speedup[1:], rel=1e-4)
    assert abs(np.corrcoef(one.replicates, other.replicates)[0, 1]) < 0.08


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


def test_sessions_that_differ_widen_the_interval_and_sessions_that_agree_do_not_narrow_it():
    apart = [contrast(*trials(r, seed=n), paired=True) for n, r in enumerate((1.2, 1.3, 1.4))]
    together = over_sessions(apart)
    logs = [math.log(c.centre) for c in apart]
    low, high = scipy_stats.ttest_1samp(logs, 0).confidence_interval()
    assert together.speedup[1:] == pytest.approx((math.exp(low), math.exp(high)))
    alike = [apart[0]] * 3
    assert over_sessions(alike).speedup[1:] == pytest.approx(mean(alike).speedup[1:])
    assert over_sessions(apart[:1]) is apart[0]
