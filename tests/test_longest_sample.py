"""The script that says how long one sample may be: on a tiny model, and what it refuses."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from helpers import benchmark

GIB = 1 << 30


@pytest.fixture(scope="module")
def script():
    with benchmark("longest_sample") as module:
        yield module


@pytest.mark.exhaustive  # each arm is a process, which imports for as long as a sweep does
def test_every_arm_has_a_row_for_each_length_and_memory(script, tmp_path):
    candidates = "ablations=[tiled_mlp]"
    small = ["--model", "tiny-llama", "--tokens", "32,64", "--memory-gib", "1,2"]
    script.main([str(tmp_path), *small, candidates, "reference=long_cpu", "dtype=float32"])
    steps, longest = pd.read_csv(tmp_path / "steps.csv"), pd.read_csv(tmp_path / "longest_sample.csv")
    assert (steps.status == "ok").all() and (steps.seconds > 0).all()
    assert list(steps.arm) == [arm for arm in ("reference", "tiled_mlp") for _ in range(2)], (
        "the third is the reference"
    )
    assert list(steps.tokens) == [32, 64] * 2
    assert list(longest.memory_gib) == [1, 2] * 2


def test_a_length_that_memory_has_no_room_for_ends_an_arm(script, tmp_path, monkeypatch):
    def step(cell, dtype, device, steps):
        tokens = cell.workload.seq_len
        if tokens > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore")
        return {"status": "ok", "seconds": 1.0, "peak_gib": tokens / 4}

    monkeypatch.setattr(script, "step", step)
    options = ["--model", "tiny-llama", "--tokens", "32,64,128,256", "--only", "0"]
    script.main([str(tmp_path), *options, "reference=long_cpu", "dtype=float32", "ablations=[]"])
    steps = pd.read_csv(tmp_path / "steps.csv")
    assert list(steps.status) == ["ok", "ok", "out of memory"] and list(steps.tokens) == [32, 64, 128]


def test_the_longest_sample_lies_on_the_line(script):
    line = [(script.Load(n, n * n), (16 + n // 1024) * GIB) for n in (8192, 16384, 32768)]
    assert script.tokens_in(80, script.fit(line)) == pytest.approx(64 * 1024, rel=0.01)
    assert script.tokens_in(141, script.fit(line)) == pytest.approx(125 * 1024, rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "0,8"], "0: expected lengths and a number of steps from 1 on"),
        (["--confirm-gib", "24"], "expected a CUDA device"),
    ],
)
def test_what_it_cannot_do_is_one_line(script, tmp_path, capsys, monkeypatch, options, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), *options])
    assert said in capsys.readouterr().err
