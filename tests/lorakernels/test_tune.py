"""Picking a form: forced, first on a CPU, measured on a GPU, and forms that do not fit are no candidates."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lorakernels import tune
from lorakernels.tuning.choice_cache import ChoiceCache


class OutOfResources(Exception):
    pass


def test_cpu_takes_the_first_and_force_decides():
    forms = {"one": lambda: 1, "addmm": lambda: 2}
    assert tune.pick("x", (1,), forms, torch.device("cpu")) == "one"
    with tune.forced("addmm"):
        assert tune.pick("x", (1,), forms, torch.device("cpu")) == "addmm"
        assert tune.pick("x", (1,), {"fused": print}, torch.device("cpu")) == "fused", (
            "a name it does not know is ignored"
        )


def test_forms_that_do_not_fit_are_skipped_and_errors_are_errors():
    def too_large():
        raise OutOfResources

    def broken():
        raise RuntimeError("broken")

    assert not tune._runs(too_large) and tune._runs(lambda: None)
    with pytest.raises(RuntimeError, match="broken"):
        tune._runs(broken)


def clock(*readings):
    """A timer that gives these, one after another."""
    left = list(readings)
    return lambda: left.pop(0)


def test_the_least_median_wins_and_outliers_do_not():
    timers = {"steady": clock(2, 2, 2, 2, 2), "fast": clock(9, 1, 1, 1, 9), "slow": clock(1, 3, 3, 3, 1)}
    assert tune.fastest(timers).form == "fast"


def test_forms_are_timed_in_turns():
    order = []
    timers = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert tune.fastest(timers) == ("a", True), "of equals the first"
    assert order == ["a", "b"] * tune.ROUNDS


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A device of type cuda, with timers that read `times`, a cache on disk, and nothing known yet."""
    times, measured = {}, []

    def timers(forms, device):
        measured.append(list(forms))
        return {name: times[name] if callable(times[name]) else lambda name=name: times[name] for name in forms}

    state = SimpleNamespace(device=torch.device("cuda", 0), times=times, measured=measured, capturing=False)
    state.disk = lambda: ChoiceCache(tmp_path, {"gpu": "pretended"})
    state.process = state.disk()
    monkeypatch.setattr(tune, "_chosen", {})
    monkeypatch.setattr(tune, "trial_timers", timers)
    monkeypatch.setattr(tune, "trial_on", nullcontext)
    monkeypatch.setattr(tune.choice_cache, "of_device", lambda device: state.process)
    monkeypatch.setattr(tune.compile_ahead, "kernels_of", list)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def forms(*names):
    return {name: lambda: None for name in names}


def test_a_choice_is_measured_once_and_kept_for_the_next_process(gpu, monkeypatch):
    gpu.times.update(one=2.0, addmm=1.0)
    for _ in range(2):
        assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "addmm"
    assert gpu.measured == [["one", "addmm"]]
    monkeypatch.setattr(tune, "_chosen", {})
    gpu.process, gpu.times["addmm"] = gpu.disk(), 9.0
    assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "addmm", "read from the disk"
    assert tune.pick("x", (2,), forms("one", "addmm"), gpu.device) == "one"
    assert len(gpu.measured) == 2
    assert tune.choices() == {("x", 1, "cuda:0"): "addmm", ("x", 2, "cuda:0"): "one"}


def test_a_form_on_disk_that_is_no_candidate_is_measured_anew(gpu):
    gpu.process.put(("x", 1), "removed since")
    gpu.times.update(one=2.0, addmm=1.0)
    assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "addmm"
    assert gpu.disk().get(("x", 1)) == "addmm"


def test_a_form_that_does_not_fit_is_not_timed(gpu):
    def too_large():
        raise OutOfResources

    gpu.times.update(large=0.1, one=2.0, addmm=1.0)
    assert tune.pick("x", (1,), {"large": too_large} | forms("one", "addmm"), gpu.device) == "addmm"
    assert gpu.measured == [["one", "addmm"]]
    assert tune.pick("x", (2,), {"large": too_large} | forms("one"), gpu.device) == "one"
    assert len(gpu.measured) == 1, "nothing is left to compare"


def out_of_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate")


@pytest.mark.parametrize("where", ["spare", "form", "timer"])
def test_a_trial_that_does_not_fit_ends_no_step_and_is_not_kept(gpu, where):
    tried = forms("one", "addmm") if where != "form" else {"one": out_of_memory, "addmm": lambda: None}
    gpu.times.update(one=2.0, addmm=out_of_memory if where == "timer" else 1.0)
    spare = out_of_memory if where == "spare" else tuple
    for _ in range(2):
        assert tune.pick("x", (8, 64), tried, gpu.device, spare) == "one", "the first form"
    assert gpu.disk().get(("x", 8, 64)) is None, "the next process may have room"
    assert len(gpu.measured) == (where == "timer"), "this one does not try it again"


def test_where_a_trial_does_not_fit_the_choice_of_fewer_rows_is_taken(gpu):
    gpu.times.update(one=2.0, addmm=1.0)
    assert tune.pick("x", (4, 64), forms("one", "addmm"), gpu.device) == "addmm"
    assert tune.pick("x", (16, 64), forms("one", "addmm"), gpu.device, out_of_memory) == "addmm"
    assert tune.pick("x", (16, 128), forms("one", "addmm"), gpu.device, out_of_memory) == "one", "of another width"
    assert gpu.disk().get(("x", 16, 64)) is None


def test_spare_tensors_are_made_once_and_are_gone_when_the_choice_is_made(gpu):
    made, given = [], []

    def spare():
        x = torch.zeros(4)
        made.append(weakref.ref(x))
        return (x,)

    gpu.times.update(one=2.0, addmm=1.0)
    noting = {name: lambda x: given.append(x.shape) for name in ("one", "addmm")}
    assert tune.pick("x", (1,), noting, gpu.device, spare) == "addmm"
    assert len(given) == 2 and len(made) == 1 and made[0]() is None
    assert tune.pick("x", (1,), noting, gpu.device, out_of_memory) == "addmm", "and not made for a known choice"


def test_what_was_chosen_beside_somebody_else_is_not_kept_for_others(gpu):
    """Another process takes its turn in one of the rounds."""
    gpu.times.update(one=clock(2, 2, 9, 2, 2), addmm=clock(1, 1, 1, 1, 1))
    assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "addmm"
    assert tune.choices() == {("x", 1, "cuda:0"): "addmm"} and gpu.disk().get(("x", 1)) is None
    gpu.times.update(one=clock(2, 2, 2.8, 2, 2), addmm=clock(1, 1, 1.4, 1, 1))  # another clock, alone
    assert tune.pick("x", (2,), forms("one", "addmm"), gpu.device) == "addmm"
    assert gpu.disk().get(("x", 2)) == "addmm"


def test_where_torch_is_deterministic_the_last_form_is_taken_unmeasured(gpu):
    torch.use_deterministic_algorithms(True)
    try:
        assert tune.pick("x", (1,), forms("atomic", "plain"), gpu.device) == "plain"
        assert tune.pick("x", (1,), forms("atomic", "plain"), torch.device("cpu")) == "plain"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not gpu.measured and not tune.choices()


def test_while_a_graph_is_captured_only_what_is_known_is_taken(gpu):
    gpu.capturing = True
    assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "one"
    assert not gpu.measured and not tune.choices(), "and it is measured later"
    gpu.process.put(("x", 1), "addmm")
    assert tune.pick("x", (1,), forms("one", "addmm"), gpu.device) == "addmm"


def test_a_choice_inside_a_form_that_is_compiled_ahead_waits(gpu, monkeypatch):
    """The inner forms' kernels are compiled with the outer ones'; nothing is timed or remembered yet."""
    ran = []
    inner = {name: lambda name=name: ran.append(name) for name in ("one", "addmm")}
    monkeypatch.setattr(tune.compile_ahead, "collecting", lambda: True)
    assert tune.pick("x", (1,), inner, gpu.device) == "one"
    assert ran == ["one", "addmm"] and not gpu.measured and not tune.choices()


@pytest.mark.gpu
def test_the_faster_form_is_picked_once():
    x, calls = torch.randn(4096, 4096, device="cuda"), []
    forms = {"slow": lambda: [x @ x for _ in range(8)], "fast": lambda: calls.append(x + 1)}
    key = ("test", 7)
    assert tune.pick("t", key, forms, x.device) == "fast"
    seen = len(calls)
    assert tune.pick("t", key, forms, x.device) == "fast" and len(calls) == seen
