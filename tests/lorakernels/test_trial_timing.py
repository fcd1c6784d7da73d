"""Timing a form: how often it goes into its graph, and on a GPU that a slow host changes nothing."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from lorakernels.tuning import trial_timing
from lorakernels.tuning.trial_timing import LONG_ENOUGH, MOST_RUNS, power_load, runs_for, trial_on, trial_timers


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
    replayed, pools = [], set()

    def captured(run, runs, device, pool):
        pools.add(pool)

        def replay():
            replayed.append(runs)
            return runs * run()

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(trial_timing, "power_load", lambda device: None)
    monkeypatch.setattr(trial_timing, "between_events", lambda load, run: run())
    monkeypatch.setattr(trial_timing, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    yield replayed
    assert len(pools) <= 1, "forms that have pools of their own are all in memory at once"


def test_all_forms_go_into_their_graphs_equally_often(pretended):
    timers = trial_timers({"slow": lambda: 1.0, "fast": lambda: LONG_ENOUGH / 8}, torch.device("cuda", 0))
    assert pretended == [8, 8], "as often as the fastest needs; the first replay is no measurement"
    assert timers["slow"]() == 1.0 and timers["fast"]() == LONG_ENOUGH / 8, "of one run"


def test_without_a_graph_all_forms_are_timed_by_events(pretended, monkeypatch):
    whole = trial_timing.captured

    def refuses_the_second(run, runs, device, pool):
        if run() > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return whole(run, runs, device, pool)

    monkeypatch.setattr(trial_timing, "captured", refuses_the_second)
    timers = trial_timers({"one": lambda: 1.0, "two": lambda: 2.0}, torch.device("cuda", 0))
    assert (timers["one"](), timers["two"]()) == (1.0, 2.0)
    assert pretended == [], "a form by its graph beside one by events would compare two clocks"


def test_a_trial_is_on_its_gpu_and_leaves_the_peak_as_it_was(monkeypatch):
    """A pretended allocator, whose second GPU had 100 bytes of which 40 are left."""
    allocator, current, emptied = SimpleNamespace(now=40, peak=100), [], []

    class Device(contextlib.AbstractContextManager):
        def __init__(self, device):
            current.append(device.index)

        def __exit__(self, *error):
            current.append("as before")

    def allocate(count, **_):
        allocator.peak = max(allocator.peak, allocator.now + count)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocator.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocator.now)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(allocator, "peak", allocator.now))
    monkeypatch.setattr(torch, "empty", allocate)
    with trial_on(torch.device("cuda", 1)):
        assert current == [1]
        allocate(500)
    assert allocator.peak == 100 and current == [1, "as before"] and emptied


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
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.get_rng_state(), torch.cuda.memory_reserved()
    wanted, peak = x @ x, torch.cuda.max_memory_allocated()
    with trial_on(device):
        timers = trial_timers({"a": lambda: x @ x, "b": lambda: x.repeat(64, 1) + 1}, device)
        assert all(timer() > 0 for timer in timers.values())
        del timers
    assert 0 <= torch.cuda.max_memory_allocated() - peak <= 2**20, "the allocator splits off no less than that"
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
