"""The script that trains the start and the end of the ladder: on a tiny random model, and its verdict."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from helpers import benchmark, word_model

from lorabench.measure.machine import describe
from lorabench_ablations.packing import Packing


@pytest.fixture(scope="module")
def script():
    with benchmark("ladder_loss") as module:
        yield module


def test_start_and_end_of_the_ladder_learn_the_same(script, tmp_path, capsys):
    # bitsandbytes 0.50.2 dequantizes on a CPU wrongly where rows are no multiple of its blocks of 64.
    model, text = word_model(tmp_path, hidden=64, intermediate=128)
    out = tmp_path / "out"
    names = ["adamw_fused", "packing", "lora_kernels", "adapters_in_compute_dtype"]
    own = ["--model", str(model), "--weights", "auto", "--start", "predibase_start_cpu", "--ablations", *names]
    script.main([str(text), *own, "--dtype", "float32", "--steps", "4", "--batch", "3", "--out", str(out)])
    assert "start, seed 0, reordered" in capsys.readouterr().out
    found = json.loads((out / "summary.json").read_text())
    assert {"nf4_base", "padding", "gradient_checkpointing"} < set(found["arms"]["start"])
    # In float32 there is no lower dtype for the adapters: that rung cannot be had, and is no part of the end.
    assert {"nf4_base", "packing", "lora_kernels"} < set(found["arms"]["end"])
    assert "adapters_in_compute_dtype" not in found["arms"]["end"]
    rows = list(csv.DictReader((out / "losses.csv").open()))
    start, end, other = ([float(row[n]) for row in rows] for n in ("start, seed 0", "end, seed 0", "start, seed 1"))
    assert end == pytest.approx(start, rel=1e-4) and end != start
    assert other[0] != pytest.approx(start[0], rel=1e-3)  # another seed sees other samples
    held_out = found["held_out_loss"]
    assert held_out["end, seed 0"] == pytest.approx(held_out["start, seed 0"], rel=1e-4)
    assert held_out["start, seed 0, reordered"] == pytest.approx(held_out["start, seed 0"], rel=1e-4)
    assert found["distance"]["start, two seeds"] > found["distance"]["end and start"]
    picture = out / "ladder_loss.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()
    assert script.main(["--redraw", str(out)]) == 0 and picture.stat().st_size > 10_000


def test_batches_pass_through_the_toggles_of_an_arm_as_in_a_cell(script, tmp_path, monkeypatch):
    """A toggle that puts something into every batch, as attention over packed rows does, is asked here, too."""
    model, text = word_model(tmp_path, hidden=64, intermediate=128)
    collated = []
    monkeypatch.setattr(Packing, "collate", lambda self, batch: collated.append(batch) or batch)
    own = ["--model", str(model), "--weights", "auto", "--start", "predibase_start_cpu", "--batch", "3"]
    options = script.parse([str(text), *own, "--dtype", "float32", "--ablations", "adamw_fused", "packing"])
    cell = script.ends(options, describe())
    request, arm = script.built(cell, script.LAST, torch.float32, torch.device("cpu"), tmp_path)
    collated.clear()
    assert [b.real for b in script.lay_out(request, arm, arm.samples)] == [b.real for b in collated]
    assert len(collated) == 1 < len(arm.samples) == 3, "the step's samples lie in one row"
    collated.clear()
    assert script.held_out_loss(request, arm, 2 * arm.samples) > 0
    assert [len(b.inputs["input_ids"]) for b in collated] == [4, 2]


def test_the_verdict(script):
    first, again, last, other = script.RUNS
    held_out = {first: 1.0, again: 1.002, other: 1.3}
    assert script.verdict(held_out | {last: 0.999})["passed"]
    assert not script.verdict(held_out | {last: 0.99})["passed"]
    assert script.verdict(held_out | {last: 0.99})["distance"]["start, two seeds"] == pytest.approx(0.3)


def test_a_reordered_step_has_the_same_samples(script):
    options = script.parse(["text", "--steps", "3", "--batch", "4"])
    train = list(range(20))
    plain, again = (script.steps_of(train, run, options) for run in script.RUNS[:2])
    assert [sorted(own) for own in plain] == [sorted(own) for own in again] and plain != again
    assert len({i for own in plain for i in own}) == 12
