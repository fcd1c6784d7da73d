"""The script that trains four jobs together and each alone: on a tiny random model, and its verdict."""

from __future__ import annotations

import csv
import json

import own_models
import pytest
from helpers import benchmark

from lorabench_ablations import joint_linears


@pytest.fixture(scope="module")
def script():
    with benchmark("several_jobs") as module:
        yield module


@pytest.fixture
def arguments(tmp_path):
    model = own_models.saved(tmp_path / "tiny", num_hidden_layers=1)
    rows = [{"question": f"How much is {i} + 2?", "answer": f"It is {i + 2}, I think."} for i in range(40)]
    text = own_models.jsonl(tmp_path / "text.jsonl", rows)
    common = ["--model", str(model), "--weights", "auto", "--dtype", "float32", "--way", "batched_packed"]
    return [str(text), *common, "--steps", "3", "--out", str(tmp_path / "out")]


@pytest.mark.exhaustive
def test_each_job_learns_together_what_it_learns_alone(script, arguments, tmp_path):
    assert script.main([*arguments, "--times", "100", "--at-once", "2"]) == 0
    out = tmp_path / "out"
    found = json.loads((out / "summary.json").read_text())
    assert found["passed"] and found["jobs"].keys() == script.JOBS.keys()
    assert found["tokens_s"].keys() == set(script.HOW) and all(rate > 0 for rate in found["tokens_s"].values())
    for job in found["jobs"].values():
        assert job["mean_distance"] < 1e-4 and job["last_loss"] != job["first_loss"]
    rows = list(csv.DictReader((out / "losses.csv").open()))
    assert len(rows) == 3 and len(rows[0]) == 1 + 3 * len(script.JOBS)
    picture = out / "several_jobs.png"
    picture.unlink()
    assert script.main(["--redraw", str(out)]) == 0 and picture.stat().st_size > 10_000


def test_a_pass_that_gives_rows_another_scaling_does_not_pass(script, arguments, monkeypatch):
    added = joint_linears._added
    monkeypatch.setattr(joint_linears, "_added", lambda linear, part, x: 1.5 * added(linear, part, x))
    assert script.main([*arguments, "--times", "100"]) == 1


def test_a_curve_as_cuda_graphs_passes_or_not_like_the_other_one(script):
    ways = [*script.HOW, script.CAPTURED]
    off = {script.ALONE: 0.0, script.AGAIN: 0.01, script.TOGETHER: 0.02, script.CAPTURED: 0.02}
    curves = {run: [4.0 + off[run.how], 3.0 + off[run.how]] for run in script.runs(ways)}
    assert script.verdict(curves, 1, 3.0)["passed"]
    curves[script.Run("odd", script.CAPTURED)] = [4.05, 3.0]
    found = script.verdict(curves, 1, 3.0)
    assert [job for job, own in found["jobs"].items() if not own["passed"]] == ["odd"]
    assert found["jobs"]["odd"]["largest_distance"] == pytest.approx(0.05)


def test_a_text_that_is_too_short_is_said(script, arguments):
    with pytest.raises(SystemExit, match="40 rows; the steps of all jobs need 2700"):
        script.main([*arguments, "--steps", "300"])
