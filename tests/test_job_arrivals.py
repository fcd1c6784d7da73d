"""The script that replays jobs which arrive over time: on a tiny random model, by the clock."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace

import own_models
import pandas as pd
import pytest
from helpers import benchmark


@pytest.fixture(scope="module")
def script():
    with benchmark("job_arrivals") as module:
        yield module


@pytest.fixture
def arguments(tmp_path):
    model = own_models.saved(tmp_path / "tiny", num_hidden_layers=1)
    rows = [{"question": f"How much is {i} + 2?", "answer": f"It is {i + 2}, I think."} for i in range(120)]
    text = own_models.jsonl(tmp_path / "text.jsonl", rows)
    common = ["--model", str(model), "--weights", "auto", "--dtype", "float32", "--tokens", "256"]
    return [str(text), *common, "--steps", "2", "5", "--jobs", "4", "--out", str(tmp_path / "out")]


def test_jobs_train_in_turn_or_together_from_when_they_arrive(script, arguments, tmp_path, capsys):
    assert script.main([*arguments, "--load", "20", "--replays", "2"]) == 0  # all arrive before the first has ended
    found = json.loads((tmp_path / "out/arrivals.json").read_text())
    first, second = found["replays"]
    assert first["jobs"] != second["jobs"] and first["order"] == [*second["order"][-1:], *second["order"][:-1]]
    for replay in found["replays"]:
        alone, ours, together = (list(replay["lives"][way].values()) for way in script.WAYS)
        for lives in (alone, ours, together):
            assert (
                [life["due"] for life in lives]
                == [life["due"] for life in alone]
                == sorted(life["due"] for life in lives)
            )
            assert all(life["due"] <= life["began"] < life["ended"] for life in lives)
            assert [life["tokens"] for life in lives] == [life["tokens"] for life in alone]
        for lives in (alone, ours):
            assert all(one["ended"] <= other["began"] for one, other in itertools.pairwise(lives)), "one by one"
        assert together[1]["began"] < together[0]["ended"]
        plain, numbers = (replay["ways"][way] for way in (script.PLAIN, script.TOGETHER))
        assert numbers["times_tokens_s"] == pytest.approx(numbers["tokens_s"] / plain["tokens_s"], rel=1e-6)
    assert (tmp_path / "out/arrivals.png").stat().st_size > 5_000

    table = pd.read_csv(tmp_path / "out/arrivals.csv")
    assert table.replay.tolist() == [1, 1, 1, 2, 2, 2] and table.way.tolist() == [*script.WAYS, *script.WAYS]
    own = table[table.way == script.TOGETHER].times_completion
    median, low, high = found["ways"][script.TOGETHER]["times_completion"]
    assert (median, low, high) == pytest.approx((own.mean(), own.min(), own.max()), rel=1e-4)
    told = (tmp_path / "out/arrivals.md").read_text()
    assert told in capsys.readouterr().out and f"{median:.2f} [{low:.2f}, {high:.2f}]" in told


def test_how_much_busier_the_gpu_is_and_nothing_where_nobody_looked(script):
    def one(busy, ended):
        return script.Replayed({"job_1": script.Life(0.0, 0.0, ended, 100)}, busy)

    ways = script.compared({script.PLAIN: one(0.2, 4.0), script.OURS: one(None, 2.0), script.TOGETHER: one(0.25, 2.0)})
    assert ways[script.TOGETHER]["busier_pct"] == pytest.approx(25) and ways[script.TOGETHER]["times_completion"] == 2
    assert ways[script.OURS]["busier_pct"] is None
    frame = pd.DataFrame([{"replay": 1, "way": script.OURS, **ways[script.OURS]}])
    assert "gpu_busy" not in script.medians(frame) and script.medians(frame)["tokens_s"] == [50, 50, 50]


def test_the_gpu_is_looked_at_while_jobs_train(script, monkeypatch):
    library = SimpleNamespace(nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=handle))
    monkeypatch.setattr(script, "nvml_handle", lambda: (library, 40))
    monkeypatch.setattr(script, "LOOK_S", 0.001)
    with script.Busy() as busy:
        while not busy.seen:
            time.sleep(0.001)
    assert busy.share == pytest.approx(0.4)
    monkeypatch.setattr(script, "nvml_handle", lambda: None)
    with script.Busy() as busy:
        pass
    assert busy.share is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--jobs", "1"], "expected two jobs and one replay at least"),
        (["--replays", "0"], "expected two jobs and one replay at least"),
        (["--steps", "9", "3"], "--steps LEAST MOST"),
    ],
)
def test_what_is_no_trace_is_one_line(script, arguments, capsys, changed, words):
    with pytest.raises(SystemExit):
        script.main([*arguments, *changed])
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="120 rows; the steps of all jobs need"):
        script.main([*arguments, "--steps", "100", "200"])
