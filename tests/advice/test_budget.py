"""The budget: what a cell is expected to take, and what ends one that takes longer."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from advice.simulated import toggle
from helpers import cells

from lorabench.advice.budget import LEAST_S, Budget, StoppedInTime
from lorabench.contract.cell import PROCESSES
from lorabench.record.schema import Cost
from lorabench.run.process import Workers
from lorabench.run.runner import record_of


@pytest.fixture
def itself():
    return cells("ablations=[]")[0]


def took(budget, cell, seconds):
    budget.learn(cell, record_of(cell, "s", status="crash", reason="x", cost=Cost(wall=seconds) if seconds else None))


def test_the_estimate_is_what_others_took(itself):
    budget = Budget(10, guess=lambda cell: 77.0)
    assert budget.estimate(itself) == 77.0
    took(budget, itself, None)  # refused beforehand: it says nothing
    assert budget.estimate(itself) == 77.0
    for seconds in (8, 10, 40):
        took(budget, itself, seconds)
    assert budget.estimate(itself) == 1.25 * 10


def test_processes_of_their_own_take_longer(itself):
    apart = replace(itself, floor_of=(toggle("global"),))
    assert apart.separate and not itself.separate
    budget = Budget(10, guess=lambda cell: 77.0)
    took(budget, itself, 10)
    assert budget.estimate(apart) == 1.25 * 10 * PROCESSES
    took(budget, apart, 30)
    assert budget.estimate(apart) == 1.25 * 30


def test_no_cell_may_take_more_than_its_share(itself):
    slow = replace(itself, toggles=(toggle("slow"),))
    budget = Budget(10, guess=lambda cell: 10.0)
    assert budget.limit(slow) == pytest.approx(150, abs=1)
    assert budget.limit(itself) == pytest.approx(600, abs=1)
    took(budget, slow, 100)
    assert budget.limit(slow) == pytest.approx(250, abs=1)


def test_workers_end_with_the_deadline_and_it_is_known_which_ended_so(monkeypatch):
    given = []
    monkeypatch.setattr(Workers, "__init__", lambda self: None)
    monkeypatch.setattr(Workers, "run", lambda self, task, timeout_s, tell, log: given.append(timeout_s))
    workers = StoppedInTime()
    for deadline in (math.inf, time.monotonic() + 5, time.monotonic() - 5):
        workers.deadline = deadline
        workers.run(None, 900.0, None, None)  # type: ignore[arg-type]
    assert given == [900.0, pytest.approx(5, abs=1), LEAST_S]
    timeout, crash = SimpleNamespace(status="timeout"), SimpleNamespace(status="crash")
    assert workers.stopped(timeout) and not workers.stopped(crash)  # type: ignore[arg-type]
    workers.deadline = time.monotonic() + 100
    assert not workers.stopped(timeout)  # type: ignore[arg-type]
