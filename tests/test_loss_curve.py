"""The script that trains with and without lorakernels: on a tiny random model, and its verdict on made-up curves."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from helpers import benchmark, word_model


@pytest.fixture(scope="module")
def script():
    with benchmark("loss_curve") as module:
        yield module


@pytest.fixture
def inputs(tmp_path):
    return word_model(tmp_path)


@pytest.mark.exhaustive
def test_it_trains_compares_and_writes(script, inputs, tmp_path, capsys):
    model, text = inputs
    command = [str(text), "--weights", str(model), "--steps", "4", "--batch", "3", "--out", str(tmp_path / "out")]
    assert script.main(command) == 0
    said = capsys.readouterr().out
    assert "lorakernels, seed 1" in said and "times_one_seed_twice" in said and "times_two_seeds" in said
    rows = list(csv.DictReader((tmp_path / "out" / "losses.csv").open()))
    assert len(rows) == 4 and len(rows[0]) == 6
    plain, ours, other = (
        np.array([float(r[n]) for r in rows]) for n in ("peft, seed 0", "lorakernels, seed 0", "peft, seed 1")
    )
    assert abs(plain - ours).max() < 1e-3 * plain[0] < abs(plain - other).max()  # seeds see other samples
    assert (abs(plain - ours) > 0).any(), "the same code ran twice"
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["passed"] and found["mean_distance"]["peft, seed 0, twice"] == 0
    assert found["lorakernels_sites"]["mlp"] == 2 and found["settings"]["held_out_samples"] == 5
    held_out = found["held_out_loss"]
    assert held_out["peft, seed 0"] == held_out["peft, seed 0, again"] != held_out["peft, seed 1"]
    assert held_out["lorakernels, seed 1"] == pytest.approx(held_out["peft, seed 1"], rel=1e-4)
    drawn = [tmp_path / "out" / f"loss_curve.{suffix}" for suffix in ("png", "svg")]
    for picture in drawn:
        assert picture.stat().st_size > 10_000
        picture.unlink()
    assert script.main(["--redraw", str(tmp_path / "out")]) == 0
    assert all(picture.stat().st_size > 10_000 for picture in drawn) and "lorakernels - PEFT" in drawn[1].read_text()
    with pytest.raises(SystemExit, match="has 40 rows"):
        script.main([*command[:3], "--steps", "300"])


@pytest.mark.exhaustive
def test_fp8_rounds_more_and_the_settings_say_so(script, inputs, tmp_path, capsys):
    model, text = inputs

    def distance(*more):
        out = tmp_path / f"out{len(more)}"
        script.main([str(text), "--weights", str(model), "--steps", "4", "--batch", "3", "--out", str(out), *more])
        found = json.loads((out / "summary.json").read_text())
        assert found["settings"]["fp8"] is bool(more)
        return found["mean_distance"]["lorakernels and peft, seed 0"]

    assert 10 * distance() < distance("--fp8")


def test_held_out_samples_are_trained_on_by_nobody(script, inputs):
    model, text = inputs
    train, held_out = script.samples(script.parse([str(text), "--weights", str(model), "--steps", "4"]))
    assert len(train) == 35 and len(held_out) == 5
    assert not {tuple(s.tokens) for s in train} & {tuple(s.tokens) for s in held_out}
    batches = script.order(train, 1, steps=8, batch=4)
    assert len(batches) == 8 and sum(b.real for b in batches) < sum(len(s.tokens) for s in train)


def curves(script, off, again=0.0):
    """Two seeds of PEFT 0.1 apart, ours `off` from each, and the repetition `again` from its first run."""
    steps = np.linspace(3, 2, 40)
    return {
        run: (steps + 0.1 * run.seed + (off if run.ours else 0.0) + (again if run.again else 0.0)).tolist()
        for run in script.RUNS
    }  # fmt: skip


@pytest.mark.parametrize(("off", "passed"), [(0.01, True), (-0.09, True), (0.11, False)])
def test_the_verdict(script, off, passed):
    found = script.verdict(curves(script, off), 10)
    assert found["passed"] is passed
    assert found["mean_distance"]["lorakernels and peft, seed 1"] == pytest.approx(abs(off))
    assert found["mean_distance"]["peft, two seeds"] == pytest.approx(0.1)
    assert found["mean_distance"]["peft, seed 0, twice"] == 0
    assert found["times_two_seeds"]["lorakernels and peft, seed 1"]["mean"] == pytest.approx(abs(off) / 0.1)
    assert found["times_one_seed_twice"]["lorakernels and peft, seed 1"] == {"mean": None, "largest": None}
    assert "not above that of PEFT's two seeds" in found["criterion"]
    assert "runs twice is reported and decides nothing" in found["criterion"]


def test_both_comparisons_are_reported(script):
    found = script.verdict(curves(script, 0.04, again=0.01), 10)
    assert found["passed"], "four times what one seed twice is apart, and within two seeds"
    for seed in script.SEEDS:
        ours = f"lorakernels and peft, seed {seed}"
        assert found["times_one_seed_twice"][ours] == {"mean": pytest.approx(4), "largest": pytest.approx(4)}
        assert found["times_two_seeds"][ours] == {"mean": pytest.approx(0.4), "largest": pytest.approx(0.4)}


def test_one_wild_stretch_fails(script):
    made = curves(script, 0.0)
    wild = next(r for r in made if r.ours and r.seed == 1)
    made[wild][20:32] = [x + 0.2 for x in made[wild][20:32]]
    found = script.verdict(made, 10)
    assert not found["passed"]
    assert found["mean_distance"]["lorakernels and peft, seed 1"] < found["mean_distance"]["peft, two seeds"]
