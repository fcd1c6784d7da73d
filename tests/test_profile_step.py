"""benchmarks/profile_step.py: a sweep's candidates, timed and profiled without a sweep."""

from __future__ import annotations

import re

import pytest
from helpers import benchmark

SMALL = ["models=[tiny-llama@2x16]", "dtype=float32", "trials=2", "warmup=1"]


@pytest.fixture(scope="module")
def script():
    with benchmark("profile_step") as module:
        yield module


def test_each_candidate_by_operator(script, capsys):
    assert script.main([*SMALL, "ablations=[sdpa,lora_kernels]"]) == 0
    text = capsys.readouterr().out
    first, second = text.split("tiny-llama @ 2x16: ")[1:]
    assert first.startswith("sdpa\n") and second.startswith("lora_kernels\n")
    for part in (first, second):
        forward, backward, total = (float(x) for x in re.findall(r"(?:forward|backward|fb) ([0-9.]+)", part))
        assert forward > 0 and backward > 0 and abs(forward + backward - total) < 0.2
        listed = [float(x) for x in re.findall(r"^ +([0-9.]+) ms +[0-9.]+%", part, re.MULTILINE)]
        everything = float(re.findall(r"([0-9.]+) ms in all", part)[0])
        assert listed[:-1] == sorted(listed[:-1], reverse=True)
        assert abs(sum(listed) - everything) < 0.01 * len(listed) + 0.01
    assert "aten::mm" in second


def test_the_reference_is_shown_where_nothing_else_is_asked_for(script, capsys):
    assert script.main([*SMALL, "ablations=[]"]) == 0
    assert "reference against itself" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [(["ablations=[lora_kernel]"], "lora_kernels"), (["ablations=[liger,sdpa]"], "liger patches more than its own")],
)
def test_bad_input_is_one_line(script, arguments, words, capsys):
    assert script.main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
