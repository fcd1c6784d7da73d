"""Timing a form: how often it goes into its graph, and on a GPU that a slow host changes nothing."""

import time
from types import SimpleNamespace

import pytest
import torch
from lorakernels import trial_timing
from lorakernels.trial_timing import LONG_ENOUGH, MOST_RUNS, power_load, runs_for, trial_timers


def test_short_forms_run_often_and_long_ones_once():
    assert runs_for(0.0) == runs_for(0.001) == MOST_RUNS
    assert runs_for(5.0) == runs_for(LONG_ENOUGH) == 1
    assert runs_for(LONG_ENOUGH / 4) == 4


def test_loading_the_gpu_draws_none_of_the_users_random_numbers(device):
    def state():
        return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()

    before = state()
    power_load(torch.device(device))
    assert torch.equal(state(), before)


@pytest.fixture
def pretended(monkeypatch):
    """A GPU without one: a form's milliseconds are what it returns, a graph's what its runs return."""
    replayed = []

    def captured(run, runs, device):
        def replay():
            replayed.append(runs)
            return runs * run()

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(trial_timing, "power_load", lambda device: None)
    monkeypatch.setattr(trial_timing, "between_events", lambda load, run: run())
    monkeypatch.setattr(trial_timing, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return replayed


def test_all_forms_go_into_their_graphs_equally_often(pretended):
    timers = trial_timers({"slow": lambda: 1.0, "fast": lambda: LONG_ENOUGH / 8}, torch.device("cuda", 0))
    assert pretended == [8, 8], "as often as the fastest needs; the first replay is no measurement"
    assert timers["slow"]() == 1.0 and timers["fast"]() == LONG_ENOUGH / 8, "of one run"


def test_without_a_graph_all_forms_are_timed_by_events(pretended, monkeypatch):
    whole = trial_timing.captured

    def refuses_the_second(run, runs, device):
        if run() > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return whole(run, runs, device)

    monkeypatch.setattr(trial_timing, "captured", refuses_the_second)
    timers = trial_timers({"one": lambda: 1.0, "two": lambda: 2.0}, torch.device("cuda", 0))
    assert (timers["one"](), timers["two"]()) == (1.0, 2.0)
    assert pretended == [], "a form by its graph beside one by events would compare two clocks"


@pytest.mark.gpu
def test_a_slow_host_does_not_make_many_launches_slow():
    """Eight tiny launches, each of which the host takes a millisecond for, beside one kernel of 100 µs or more."""
    device = torch.device("cuda", 0)
    small, big = torch.ones(1024, device=device), torch.ones(2**26, device=device)

    def many():
        for _ in range(8):
            time.sleep(0.001)
            small.add_(1)

    forms = {"many": many, "one": lambda: big.add_(1)}
    for run in forms.values():
        run()
    timers = trial_timers(forms, device)
    assert timers["many"]() < 0.06 < timers["one"]()


@pytest.mark.gpu
def test_measuring_leaves_random_numbers_memory_and_results_alone():
    device = torch.device("cuda", 0)
    x = torch.randn(512, 512, device=device)
    power_load(device)()  # the library's workspace for the default stream
    trial_timers({"a": lambda: x @ x}, device)["a"]()  # and for the side stream
    trial_timing.give_memory_back(device)
    before, reserved = torch.cuda.get_rng_state(), torch.cuda.memory_reserved()
    wanted = x @ x
    timers = trial_timers({"a": lambda: x @ x, "b": lambda: torch.mm(x, x) + 1}, device)
    assert all(timer() > 0 for timer in timers.values())
    del timers
    trial_timing.give_memory_back(device)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.memory_reserved() <= reserved + 2**21
    assert torch.equal(x @ x, wanted)


@pytest.mark.gpu
def test_a_form_that_cannot_be_captured_is_timed_by_events(monkeypatch):
    device = torch.device("cuda", 0)
    x = torch.ones(2**20, device=device)

    def refuse(*_):
        raise RuntimeError("this form synchronizes")

    monkeypatch.setattr(trial_timing, "captured", refuse)
    timers = trial_timers({"a": lambda: x + 1}, device)
    assert timers["a"]() > 0
    assert torch.equal(x + 1, torch.full_like(x, 2)), "the device still works"
