"""A price of tokens: by hand, for arrays, and for what is unknown."""

import math

import numpy as np
import pytest

from lorabench.report.cost import usd_per_million_tokens


def test_a_million_tokens_in_an_hour_cost_an_hour():
    assert usd_per_million_tokens(1e6 / 3600, 2.5) == pytest.approx(2.5)
    assert usd_per_million_tokens(1e6 / 3600, 2.5, gpus=4) == pytest.approx(10)
    assert usd_per_million_tokens(2e6 / 3600, 2.5) == pytest.approx(1.25)


def test_arrays_go_element_by_element_and_unknown_stays_unknown():
    found = usd_per_million_tokens(np.array([1e6 / 3600, math.nan]), 1.0)
    assert found[0] == pytest.approx(1) and math.isnan(found[1])


@pytest.mark.parametrize(("price", "gpus"), [(-1.0, 1), (math.nan, 1), (1.0, 0)])
def test_a_price_that_is_none_is_an_error(price, gpus):
    with pytest.raises(ValueError, match="expected a price"):
        usd_per_million_tokens(100.0, price, gpus)
