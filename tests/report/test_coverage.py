"""The 95 % intervals, simulated: each holds the truth in 93 to 97 of 100 runs. The large table: docs/intervals.md."""

import numpy as np
import pytest
from helpers import benchmark

RUNS = 1200
NOISE = 0.0125  # two standard errors of a coverage of 0.95 in so many runs
BAND = (0.93 - NOISE, 0.97 + NOISE)


@pytest.fixture(scope="module")
def simulation():
    with benchmark("interval_coverage") as module:
        yield module


@pytest.mark.parametrize(
    "case",
    [
        "independent",
        "drift of both arms by half",
        "heteroscedastic arms (1 : 6, growing)",
        "5 % slow trials",
        "10 % slow trials",
        "autocorrelation 0.3",
        "autocorrelation 0.5",
        "autocorrelation 0.7",
    ],
)
def test_thirty_rounds(simulation, case):
    random = np.random.default_rng(1)
    assert BAND[0] <= simulation.covered(lambda: simulation.paired(case, 30, random), RUNS) <= BAND[1]


def test_p_is_below_five_per_cent_as_often_as_the_interval_misses(simulation):
    random = np.random.default_rng(2)
    found = [simulation.paired("autocorrelation 0.5", 30, random) for _ in range(RUNS)]
    assert 0.03 - NOISE <= np.mean([c.p_value() < 0.05 for c in found]) <= 0.07 + NOISE


@pytest.mark.parametrize("between", [0.0, 1.0])
def test_four_processes_an_arm(simulation, between):
    random = np.random.default_rng(3)
    share = simulation.covered(lambda: simulation.separate(4, 8, between, random), RUNS)
    assert BAND[0] <= share <= BAND[1]


@pytest.mark.parametrize("single", [False, True])
def test_thirty_rounds_between_four_seats_that_differ_by_a_tenth(simulation, single):
    random = np.random.default_rng(6)
    share = simulation.covered(lambda: simulation.between_seats(4, 0.1, single, random), RUNS)
    assert BAND[0] <= share <= BAND[1]


def test_the_reference_in_one_seat_would_be_trusted_too_much_without_its_own_spread(simulation):
    """As if all of four seats' differences were independent."""
    random, held = np.random.default_rng(7), 0
    for _ in range(300):
        estimate = simulation.between_seats(4, 0.1, True, random).estimate
        held += abs(estimate.log) <= estimate._replace(error=estimate.error / np.sqrt(5)).reach
    assert held / 300 < 0.8


def test_a_family_of_separate_cells_of_the_reference_against_itself_rarely_differs(simulation):
    assert simulation.false_families(8, 1.0, 100, np.random.default_rng(4)) <= 0.1


def test_three_sessions_that_differ(simulation):
    random = np.random.default_rng(5)
    share = simulation.covered(lambda: simulation.sessions(3, 1.0, random), RUNS)
    assert BAND[0] <= share <= BAND[1]
