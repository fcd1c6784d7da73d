"""benchmarks/tune_choices.py: an arm built with the choices of each way of timing, in turns."""

from __future__ import annotations

import re

import pytest
from helpers import benchmark
from lorakernels import tune

SMALL = ["models=[tiny-llama@2x16]", "dtype=float32", "trials=2", "warmup=1"]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAKERNELS_CACHE", "0")
        with benchmark("tune_choices") as module:
            yield module


def test_each_way_is_timed_in_turns(script, capsys, monkeypatch):
    used = []
    real = script.built_with
    monkeypatch.setattr(script, "built_with", lambda timers, *cell: used.append(timers) or real(timers, *cell))
    before = tune.trial_timers
    assert script.main([*SMALL, "ablations=[lora_kernels]"]) == 0
    text = capsys.readouterr().out
    events, graphs = script.by_events, script.WAYS["graphs"]
    assert used == [graphs, events, events, graphs, graphs, events]
    assert all(float(ms) > 0 for ms in re.findall(r"(?:events|graphs): ([0-9.]+) ms", text))
    assert len(re.findall(r" ms$", text, re.MULTILINE)) == 2 * script.ROUNDS
    assert "0 of 0 choices" in text, "on a CPU nothing is chosen"
    assert tune.trial_timers is before


def test_choices_that_differ_are_shown(script):
    norm, s = ("norm", 512, "cuda:0"), ("S", 512, "cuda:0")
    lines = script.differences(
        {"events": [{norm: "fused", s: "plain"}, {norm: "plain", s: "plain"}], "graphs": [{norm: "plain", s: "plain"}]}
    )
    assert lines == [
        "  1 of 2 choices are the same every time",
        "  ('norm', 512, 'cuda:0'): events fused, plain; graphs plain",
    ]


def test_bad_input_is_one_clear_line(script, capsys):
    assert script.main(["models=[tiny-lama]"]) == 2
    error = capsys.readouterr().err.strip()
    assert "did you mean tiny-llama" in error and len(error.splitlines()) == 1
