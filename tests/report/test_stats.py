"""Statistics against known truths: a ratio put in comes out, intervals cover, errors stay at their rate."""

import math
import time

import numpy as np
import pytest

from lorabench.record import stats
from lorabench.record.stats import Speedup


def trials(ratio=1.0, n=30, sd=0.02, drift=0.0, seed=0):
    """(reference, candidate) in ms; the drift is shared, as in one process."""
    rng = np.random.default_rng(seed)
    shared = np.exp(np.linspace(0, drift, n))
    return 50 * shared * np.exp(rng.normal(0, sd, n)), 50 / ratio * shared * np.exp(rng.normal(0, sd, n))


@pytest.mark.parametrize("paired", [True, False])
def test_recovers_a_known_ratio(paired):
    found = stats.speedup(*trials(1.37, sd=0.01), paired=paired)
    assert found.low < 1.37 < found.high
    assert found.centre == pytest.approx(1.37, rel=0.01)
    assert found.high / found.low < 1.02


def test_pairing_removes_a_shared_drift():
    slow = trials(1.05, sd=0.003, drift=0.5)
    paired, unpaired = stats.speedup(*slow, paired=True), stats.speedup(*slow, paired=False)
    assert math.log(paired.high / paired.low) < 0.1 * math.log(unpaired.high / unpaired.low)
    assert paired.low < 1.05 < paired.high


def test_one_outlier_moves_the_centre_little():
    reference, candidate = trials(1.2, sd=0.005)
    candidate[7] *= 20
    assert stats.speedup(reference, candidate, paired=True).centre == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(("paired", "n"), [(True, 20), (True, 8), (False, 12)])
def test_interval_covers_the_truth_19_times_in_20(paired, n):
    runs, covered = 200, 0
    for seed in range(runs):
        found = stats.speedup(*trials(1.0, n=n, seed=seed), paired=paired, seed=seed)
        covered += found.low <= 1 <= found.high
    # Three standard errors of a rate of 0.95 in 200 are 0.046; wider than asked is no fault, but by little.
    assert 0.905 <= covered / runs <= 0.995


def test_swapping_the_arms_inverts_the_speedup_and_order_of_rounds_is_irrelevant():
    reference, candidate = trials(1.3)
    there, back = (stats.speedup(*x, paired=True) for x in ((reference, candidate), (candidate, reference)))
    assert there.centre * back.centre == pytest.approx(1)
    shuffled = np.random.default_rng(1).permutation(30)
    again = stats.speedup(reference[shuffled], candidate[shuffled], paired=True)
    assert again.centre == pytest.approx(there.centre)
    assert math.log(again.low / there.low) == pytest.approx(0, abs=2e-3)


def test_hodges_lehmann_by_hand():
    # log2 ratios 0, 1, 3: Walsh averages 0, 0.5, 1, 1.5, 2, 3; their median is 1.25
    assert stats.speedup([1, 2, 8], [1, 1, 1], paired=True).centre == pytest.approx(2**1.25)
    # differences of logs 0..: reference {0, 1, 2}, candidate {0, 0, 1}: sorted -1 0 0 0 1 1 1 2 2, median 1
    assert stats.speedup([1, 2, 4], [1, 1, 2], paired=False).centre == pytest.approx(2)


@pytest.mark.parametrize("paired", [True, False])
def test_equal_values_have_a_point_interval_and_p_one(paired):
    assert stats.speedup([5.0] * 9, [5.0] * 9, paired) == pytest.approx((1, 1, 1))
    assert stats.p_value([5.0] * 9, [5.0] * 9, paired) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_refused(bad):
    for call in (lambda ms: stats.speedup(ms, [1.0, 2, 3], True), stats.median_interval):
        with pytest.raises(ValueError, match="finite times above 0"):
            call([1.0, bad, 2.0])


def test_too_few_trials_and_unequal_lists():
    assert stats.speedup([1.0, 2], [1.0, 2], paired=True) is None
    with pytest.raises(ValueError, match="3 and 4"):
        stats.speedup([1.0, 2, 3], [1.0, 2, 3, 4], paired=True)


def test_median_interval_is_of_order_statistics():
    # For 10 samples the 2nd and 9th order statistics cover the median with 97.9 %.
    assert stats.median_interval(range(1, 11)) == pytest.approx((5.5, 2, 9))
    assert stats.median_interval([3.0]) == pytest.approx((3, 3, 3))


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == []
    with pytest.raises(ValueError, match=r"0\.\.1"):
        stats.holm([0.5, math.nan])


def test_holm_keeps_the_family_error_at_five_per_cent():
    p = np.random.default_rng(0).uniform(size=(2000, 20))
    wrong = np.mean([min(stats.holm(row)) < 0.05 for row in p])
    assert 0.03 < wrong < 0.07


@pytest.mark.parametrize(
    ("found", "p", "floor", "expected"),
    [
        (Speedup(1.2, 1.1, 1.3), 0.001, 0.01, "faster"),
        (Speedup(0.8, 0.7, 0.9), 0.001, 0.01, "slower"),
        (Speedup(1.2, 1.1, 1.3), 0.06, 0.01, "unclear"),  # not after Holm
        (Speedup(1.02, 1.005, 1.04), 0.001, 0.01, "unclear"),  # significant, but reaches into the noise
        (Speedup(1.2, 1.1, 1.3), 0.001, 0.15, "unclear"),
        (Speedup(1.004, 1.001, 1.007), 0.001, 0.01, "same"),  # significant, and too small to matter
        (Speedup(1.0, 0.98, 1.02), 0.9, 0.01, "unclear"),  # no evidence of a difference is no evidence of none
        (None, 1.0, 0.01, None),
    ],
)
def test_verdicts(found, p, floor, expected):
    assert stats.verdict(found, p, floor, trials=30) == expected


def test_five_trials_never_give_a_verdict():
    assert stats.verdict(Speedup(2.0, 1.9, 2.1), 0.001, 0.01, trials=5) == "unclear"


def test_noise_floor_is_the_far_end_of_the_interval_and_at_least_one_per_cent():
    assert stats.noise_floor(None) == 0.01
    assert stats.noise_floor(Speedup(1.0, 0.999, 1.001)) == 0.01
    assert stats.noise_floor(Speedup(0.99, 0.95, 1.02)) == pytest.approx(1 / 0.95 - 1)


def test_minimum_detectable_effect_is_found_four_times_in_five():
    same = stats.speedup(*trials(1.0, sd=0.05, seed=3), paired=True)
    effect, floor = stats.detectable(same), stats.noise_floor(same)
    runs = [trials(1 + effect, sd=0.05, seed=s) for s in range(100, 190)]
    found = [stats.verdict(stats.speedup(*r, True), stats.p_value(*r, True), floor, 30) == "faster" for r in runs]
    assert 0.65 < np.mean(found) < 0.95  # the A/A interval is itself an estimate
    assert stats.detectable(None) is None


def test_a_bootstrap_takes_well_under_50_ms():
    reference, candidate = trials()
    took = []
    for paired in (True, False) * 3:
        start = time.perf_counter()
        stats.speedup(reference, candidate, paired)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05
