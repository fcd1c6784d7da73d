"""Medians, significance, noise floor and verdict against known truths; of many rows as of each alone."""

import math

import numpy as np
import pytest

from lorabench.record import stats
from lorabench.record.contrast import Speedup, contrast


def trials(ratio=1.0, n=30, sd=0.02, drift=0.0, seed=0):
    """(reference, candidate) in ms; the drift is shared, as in one process."""
    rng = np.random.default_rng(seed)
    shared = np.exp(np.linspace(0, drift, n))
    return 50 * shared * np.exp(rng.normal(0, sd, n)), 50 / ratio * shared * np.exp(rng.normal(0, sd, n))


def test_the_interval_of_a_median_is_of_order_statistics():
    # For 10 samples the 2nd and 9th order statistics cover the median with 97.9 %.
    ten, one = stats.median_intervals([range(1, 11), [3.0]])
    assert tuple(ten) == (5.5, 2, 9) and tuple(one) == (3, 3, 3)


def test_medians_of_many_lists_are_those_of_each():
    rng = np.random.default_rng(0)
    lists = [list(rng.normal(50, 1, n)) for n in (1, 4, 5, 6, 30, 30, 7)]
    found = stats.median_intervals([*lists, None, []])
    for row, times in zip(found, lists, strict=False):
        assert tuple(row) == tuple(stats.median_intervals([times])[0])
    assert np.isnan(found[-2:]).all()


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


@pytest.mark.parametrize(
    ("found", "p", "said"),
    [
        (Speedup(2.0, 1.9, 2.1), 0.001, "faster, few trials"),
        (Speedup(0.5, 0.4, 0.6), 0.001, "slower, few trials"),
        (Speedup(2.0, 1.9, 2.1), 0.06, "unclear"),
        (Speedup(1.0, 0.999, 1.001), 0.9, "unclear"),
        (Speedup(2.0, 0.9, 4.1), 0.001, "unclear"),
    ],
)
def test_five_trials_show_a_direction_at_most(found, p, said):
    assert stats.verdict(found, p, 0.01, trials=5) == said and stats.without_figure(said)


def test_what_has_no_verdict_and_a_clear_one_are_shown_with_their_figure():
    assert not any(stats.without_figure(said) for said in (None, float("nan"), "faster", "slower", "same"))


def test_noise_floor_is_the_far_end_of_the_interval_and_at_least_one_per_cent():
    assert stats.noise_floor(None) == 0.01
    assert stats.noise_floor(Speedup(1.0, 0.999, 1.001)) == 0.01
    assert stats.noise_floor(Speedup(0.99, 0.95, 1.02)) == pytest.approx(1 / 0.95 - 1)


def test_minimum_detectable_effect_is_found_four_times_in_five():
    found = []
    for seed in range(20):  # the A/A interval is itself an estimate: on average over several
        same = contrast(*trials(1.0, sd=0.05, seed=seed), paired=True).speedup
        effect, floor = stats.detectable(same), stats.noise_floor(same)
        runs = [
            contrast(*trials(1 + effect, sd=0.05, seed=s), paired=True) for s in range(100 + 30 * seed, 130 + 30 * seed)
        ]
        found += [stats.verdict(c.speedup, c.p_value(), floor, 30) == "faster" for c in runs]
    assert 0.7 < np.mean(found) < 0.9
    assert stats.detectable(None) is None
