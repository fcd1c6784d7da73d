"""Whole nodes at a shape that is met for the first time, where `tune` measures: its forms run without launching their
kernels, run for good, are timed by runs on the same tensors, and one wins. None of that may be seen in any gradient.

On a GPU this is what every first step does. Here, in Triton's interpreter, the launches are held back in the same
places, memory that nobody has written is NaN, and either the first or the last form wins.
"""

import contextlib
from types import SimpleNamespace

import pytest
import test_fp8
import test_mlp_node
import test_projection_node
import torch
from kernel_checks import exhaustive
from lorakernels import compile_ahead, tune
from lorakernels.runtime import INTERPRET
from lorakernels.tuning import choice_cache
from lorakernels.tuning.choice_cache import ChoiceCache

pytestmark = pytest.mark.skipif(not INTERPRET, reason="runs in Triton's interpreter: see test_interpreter.py")
NODES = {
    "attention": test_projection_node.test_the_whole_attention_node,
    "mlp": test_mlp_node.test_the_whole_mlp_node,
}


@pytest.fixture
def measured(monkeypatch):
    """Makes `tune` measure on a CPU. Of what it yields, `timed` are the names of the forms that were timed, and `wins`
    says which shall win, the first or the last."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.__getitem__
    state = SimpleNamespace(timed=[], wins="first")

    def held_back(self, grid):
        return (lambda *a, **k: None) if compile_ahead.collecting() else launch(self, grid)

    def without_launching(calls):
        with compile_ahead._collect():
            for call in calls:
                call()

    def timers(forms, device):
        def timer(place, name):
            forms[name]()
            state.timed.append(name)
            return place

        order = list(forms) if state.wins == "first" else list(forms)[::-1]
        return {name: (lambda place=place, name=name: timer(place, name)) for place, name in enumerate(order)}

    monkeypatch.setattr(InterpretedFunction, "__getitem__", held_back)
    monkeypatch.setattr(compile_ahead, "kernels_of", without_launching)
    monkeypatch.setattr(choice_cache, "of_device", lambda device: ChoiceCache(None, {}))
    monkeypatch.setattr(tune, "measures", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tune, "ROUNDS", 2)
    monkeypatch.setattr(tune, "trial_timers", timers)
    monkeypatch.setattr(tune, "trial_on", contextlib.nullcontext)
    monkeypatch.setattr(tune, "deterministic", lambda: False)
    tune.forget()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what nobody has written with NaN
    yield state
    torch.use_deterministic_algorithms(False)
    tune.forget()


@pytest.mark.parametrize("wins", ["last", exhaustive("first")])
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("p", [0.3, exhaustive(0.0)])
@pytest.mark.parametrize("dtype", [torch.float16, exhaustive(torch.float32)], ids=str)
def test_the_first_step_of_a_shape_is_right(node, wins, p, dtype, measured, monkeypatch):
    measured.wins = wins
    torch.manual_seed(0)
    NODES[node]((17, 17, 17), 3, "none is forced", True, p, True, "cpu", dtype, monkeypatch)
    assert {"plain", "addmm"} & set(measured.timed) and len(set(measured.timed)) > 3, measured.timed


@pytest.mark.parametrize("wins", ["last", "first"])
def test_the_first_step_of_an_mlp_in_fp8_is_right(wins, measured):
    measured.wins = wins
    test_fp8.test_an_mlp_is_that_of_the_emulated_products(True, True)
    assert {"glu in fp8", "glu backward in fp8"} <= {key[0] for key in tune.choices()}
