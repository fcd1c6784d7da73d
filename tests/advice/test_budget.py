"""How long a family is expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advice.simulated import OPENING_S, START_S, TURN_S, Simulation, toggle

from lorabench.advice.budget import MARGIN, Pace
from lorabench.advice.budget import OPENING_S as UNKNOWN_OPENING_S
from lorabench.advice.budget import START_S as UNKNOWN_START_S
from lorabench.contract.cell import PROCESSES


def test_a_family_is_expected_to_take_what_its_arms_took():
    one, other = toggle("one", 2.0), toggle("other", 1.5, start_s=6.0)
    done = Simulation(one, other, minutes=0.4)
    pace = Pace(replace(done.known, seated=frozenset()))
    arms, start = [(one,), (other,)], OPENING_S + 4 * START_S + 5.0
    a_round = TURN_S * (2 + 1 / 2 + 1 / 1.5)
    # The reference again is expected to start as the usual candidate does: here half way between the two.
    assert pace.seconds(arms, 10) == pytest.approx(MARGIN * (start + 2.5 - 1 + 10 * a_round), rel=0.15)
    assert pace.rounds(arms, start + 2.5 + 20 * a_round) == pytest.approx(20, abs=3)
    assert pace.rounds(arms, 3.0) == 0
    # Who sits, of the family before, is not prepared again.
    assert Pace(done.known).seconds(arms, 10) == pytest.approx(MARGIN * 10 * a_round, rel=0.05)
    both = (one, other)
    third = replace(done.known, seated=done.known.seated - {done.question.labels(both)})
    assert Pace(third).starts([*arms, both]) == pytest.approx(6.0, rel=0.1)
    without = replace(done.known, seated=done.known.seated - {done.question.labels(())})
    assert Pace(without).starts(arms) == pace.starts(arms), "another reference: all are prepared anew"


def test_a_stack_starts_as_its_slowest_toggle_and_steps_as_its_fastest():
    one, other = toggle("one", 2.0), toggle("other", 1.5, start_s=6.0)
    pace = Pace(replace(Simulation(one, other, minutes=0.3).known))
    assert pace.start((one, other)) == pytest.approx(6.0, rel=0.1)
    assert pace.turn((one, other)) == pytest.approx(TURN_S / 2, rel=0.05)


def test_what_sits_alone_starts_in_several_processes_and_so_does_the_reference_again(monkeypatch):
    one, alone = toggle("one"), toggle("alone")
    monkeypatch.setattr(type(alone), "global_patch", True)
    pace = Pace(Simulation(one, minutes=0.001).known)
    shared, apart = pace.seconds([(one,)], 0), pace.seconds([(alone,)], 0)
    assert shared == pytest.approx(MARGIN * (UNKNOWN_OPENING_S + 2 * UNKNOWN_START_S))
    assert apart == pytest.approx(MARGIN * (UNKNOWN_OPENING_S + (1 + 2 * PROCESSES) * UNKNOWN_START_S))
