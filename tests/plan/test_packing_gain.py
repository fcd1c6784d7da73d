"""The formula: what is counted, what it predicts, and that fitted costs are the true ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabench.plan.packing_gain import BY_TOKENS, LEAST_SEEN, Batching, Costs, MicroBatch, fitted, gain, padded
from lorabench.plan.samples import draw_lengths

TRUE = Costs(step=3.0, micro_batch=2.0, token=1e-3, pair=1e-6)


def flat(lengths, knows_borders=False):
    return Batching((MicroBatch(1, sum(lengths), tuple(lengths)),), knows_borders)


def test_padded_batches_are_as_wide_as_their_longest_sample():
    found = padded([3, 5, 9], 2)
    assert found.batches == (MicroBatch(2, 5, (3, 5)), MicroBatch(1, 9, (9,)))
    assert found.efficiency == pytest.approx(17 / 19)
    assert found.amounts == (1, 2, 19, 2 * 25 + 81 / 2)  # the one without padding needs no mask: half of its square


def test_pairs_of_positions():
    packed = MicroBatch(1, 8, (3, 5))
    assert packed.pairs(knows_borders=False) == 64 and packed.pairs(knows_borders=True) == (9 + 25) / 2
    assert MicroBatch(2, 5, (5, 5)).pairs(knows_borders=False) == 25


def test_by_tokens_the_gain_is_the_inverse_of_the_efficiency():
    lengths = [3, 5, 9, 1]
    reference = padded(lengths, 2)
    found = gain(reference, flat(lengths)), gain(reference, flat(lengths), BY_TOKENS)
    assert found == pytest.approx((1 / reference.efficiency,) * 2)


def test_a_long_row_can_cost_more_than_its_padding_did():
    lengths = [100] * 15 + [200]
    reference = padded(lengths, 4)
    costs = Costs(token=1.0, pair=0.01)
    assert gain(reference, flat(lengths)) > 1 > gain(reference, flat(lengths), costs)
    assert gain(padded(lengths, 4, knows_borders=True), flat(lengths, knows_borders=True), costs) > 1


def test_micro_batches_of_one_sample_gain_by_their_number_alone():
    lengths = [10] * 8
    assert gain(padded(lengths, 1), flat(lengths)) == 1
    assert gain(padded(lengths, 1), flat(lengths), Costs(micro_batch=20.0)) == (8 * 20 + 80) / (20 + 80)


def pairs(seed=0, noise=0.0):
    """Eight pairs of a padded step and another, with the gain that would be measured."""
    rng = np.random.default_rng(seed)
    for distribution in ("gsm8k", "glue", "drop", "viggo"):
        lengths = draw_lengths(distribution, 32, rng).tolist()
        for other in (flat(lengths), padded(sorted(lengths), 8)):
            reference = padded(lengths, 8)
            yield reference, other, gain(reference, other, TRUE) * float(np.exp(rng.normal(0, noise)))


def test_fitted_costs_are_the_true_ones_in_units_of_a_token():
    found = fitted(list(pairs()))
    assert found is not None and found.token == 1
    assert np.array(found) * TRUE.token == pytest.approx(np.array(TRUE), rel=1e-3)


def test_fitted_costs_predict_a_distribution_that_they_have_not_seen():
    lengths = draw_lengths("alpaca", 32, np.random.default_rng(1)).tolist()
    both = padded(lengths, 8), flat(lengths)
    for seed in range(10):
        found = fitted(list(pairs(seed, noise=0.03)))
        assert found is not None and min(found) >= 0
        assert gain(*both, found) == pytest.approx(gain(*both, TRUE), rel=0.1)


def test_one_outlier_does_not_decide():
    seen = list(pairs())
    seen[0] = (*seen[0][:2], 3 * seen[0][2])
    lengths = draw_lengths("alpaca", 32, np.random.default_rng(1)).tolist()
    both = padded(lengths, 8), flat(lengths)
    found = fitted(seen)
    assert found is not None and gain(*both, found) == pytest.approx(gain(*both, TRUE), rel=0.15)


def test_too_few_pairs_are_not_fitted():
    assert fitted([]) is None
    assert fitted(list(pairs())[:1] * LEAST_SEEN) is None  # one shape, however often it was measured


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 9))
def test_nothing_that_is_computed_is_lost(lengths, batch_size):
    plain, packed = padded(lengths, batch_size), flat(lengths)
    assert sum(b.real for b in plain.batches) == sum(b.real for b in packed.batches) == sum(lengths)
    assert 0 < plain.efficiency <= packed.efficiency == 1
    assert gain(plain, packed) >= 1
