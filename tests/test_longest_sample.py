"""The script that says how long one sample may be: on a tiny model, and what it refuses; and the table made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import benchmark

RESULTS = Path(__file__).resolve().parents[1] / "results"


@pytest.fixture(scope="module")
def script():
    with benchmark("longest_sample") as module:
        yield module


@pytest.mark.exhaustive  # each arm is a process, which imports for as long as a sweep does
def test_every_arm_has_a_row_for_each_length(script, tmp_path):
    candidates = "ablations=[tiled_mlp]"
    small = ["--model", "tiny-llama", "--tokens", "32,64", "--memory-gib", "1,2"]
    script.main([str(tmp_path), *small, candidates, "reference=long_cpu", "dtype=float32"])
    steps, longest = pd.read_csv(tmp_path / "steps.csv"), pd.read_csv(tmp_path / "longest_sample.csv")
    assert (steps.status == "ok").all() and (steps.seconds > 0).all()
    assert list(steps.arm) == [arm for arm in ("reference", "tiled_mlp") for _ in range(2)]
    assert list(steps.tokens) == [32, 64] * 2
    assert set(longest.arm) <= set(steps.arm), "on a CPU the peaks are a process's, and need not rise with the tokens"


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


def test_the_longest_sample_lies_on_the_line_of_the_two_longest_steps(script, tmp_path, capsys):
    rows = [
        ["a", "", 4096, "ok", 1, 25], ["a", "", 8192, "ok", 1, 24], ["a", "", 32768, "ok", 1, 48],
        ["a", "", 65536, "out of memory", "", ""], ["a", 80, 63488, "ok", 1, 78],
        ["a", 80, 69376, "out of memory", "", ""], ["b", "", 8192, "ok", 1, 20],
    ]  # fmt: skip
    names = ["arm", "cap_gib", "tokens", "status", "seconds", "peak_gib"]
    pd.DataFrame(rows, columns=names).to_csv(tmp_path / "steps.csv", index=False)
    script.main([str(tmp_path), "--of-steps", "--memory-gib", "20,80,141"])
    found = pd.read_csv(tmp_path / "longest_sample.csv").query("arm == 'a'")
    assert list(found.tokens) == [4096, 65536, 125 * 1024]
    assert list(found.ran_at.fillna(0)) == [0, 63488, 0] and list(found.out_of_memory_at.fillna(0)) == [0, 69376, 0]


def test_the_published_lengths_are_those_that_the_published_steps_give(script, tmp_path):
    published = RESULTS / "h200/longest_sample"
    shutil.copy(published / "steps.csv", tmp_path)
    script.main([str(tmp_path), "--of-steps"])
    pd.testing.assert_frame_equal(*(pd.read_csv(at / "longest_sample.csv") for at in (tmp_path, published)))


def test_the_table_has_ours_first_and_then_the_longest(tmp_path):
    (tmp_path / "h200/longest_sample").mkdir(parents=True)
    ours = "lora_kernels + adapters_in_compute_dtype + transformers_loss + long_context"
    rows = [
        ["reference", 24, 22391], ["reference", 80, 165945], ["a + b", 24, 30000], ["a + b", 80, 1219834],
        [ours, 24, 862], [ours, 80, 12296],
    ]  # fmt: skip
    with benchmark("longest_table") as module:
        pd.DataFrame(rows, columns=["arm", "memory_gib", "tokens"]).to_csv(tmp_path / module.TABLE, index=False)
        heads, made = module.of(tmp_path)
    assert heads == ["arm", "24 GiB", "80 GiB"]
    assert made == [
        ["`long_context` on our kernels", "0.862", "12.3"], ["`a + b`", "30.0", "1220"],
        ["the reference", "22.4", "166"],
    ]  # fmt: skip


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
