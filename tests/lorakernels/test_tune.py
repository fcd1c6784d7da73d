"""Picking a form: forced, first on a CPU, measured on a GPU, and forms that do not fit are no candidates."""

import pytest
import torch
from lorakernels import tune


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


def test_measuring_draws_none_of_the_users_random_numbers(device):
    def state():
        return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()

    before = state()
    tune._load(torch.device(device))
    assert torch.equal(state(), before)


@pytest.mark.gpu
def test_the_faster_form_is_picked_once():
    x, calls = torch.randn(4096, 4096, device="cuda"), []
    forms = {"slow": lambda: [x @ x for _ in range(8)], "fast": lambda: calls.append(x + 1)}
    key = ("test", 7)
    assert tune.pick("t", key, forms, x.device) == "fast"
    seen = len(calls)
    assert tune.pick("t", key, forms, x.device) == "fast" and len(calls) == seen
