"""The script that holds a recommendation against stacks put together by hand: what it asks for, what it makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import benchmark

from lorabench.plan.compose import load_recommend_config
from lorabench.report import recommendation as page

RESULTS = Path(__file__).parents[1] / "results" / "h200" / "guide_memory"
SWITCH_ON = ["tiled_mlp(shards=2)"]
HAND = ["packing", "tiled_mlp(shards=2)"]  # the second is what is recommended anyway


@pytest.fixture(scope="module")
def script():
    with benchmark("recommend_case") as module:
        yield module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"{i}!"}) + "\n" for i in range(5)))
    return path


def found(switch_on: list[str]) -> page.Recommendation:
    return page.Recommendation(
        title="t", switch_on=switch_on, paragraph="p", tried=[], left_out=[], code=[], command="c", made="now"
    )


def test_it_asks_for_an_answer_and_then_for_that_stack_beside_others(script, text, tmp_path, monkeypatch):
    asked = []

    def run(command, *arguments):
        asked.append((command, *arguments))
        if command == "recommend":
            folder = Path(arguments[-1].partition("=")[2])
            folder.mkdir(parents=True)
            (folder / page.FILE).write_text(found(SWITCH_ON).model_dump_json())

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "held_against", lambda folder, found: {"passed": folder.name == "by_hand"})
    out = tmp_path / "out"
    assert script.main([str(text), "--model", "tiny-llama", "--rows", "3", "--out", str(out), "--hand", *HAND]) == 0
    (first, *recommend), (second, *sweep) = asked
    assert (first, second) == ("recommend", "sweep") and json.loads((out / "beside.json").read_text())["passed"]
    config = load_recommend_config(recommend)
    assert config.budget_minutes == 5 and config.workload and "chats.jsonl" in str(config.workload)
    assert "ablations=[[{tiled_mlp: {shards: 2}}], [packing]]" in sweep
    chats = [json.loads(line) for line in (out / "case" / "chats.jsonl").read_text().splitlines()]
    assert len(chats) == 3 and [turn["content"] for turn in chats[2]["messages"]] == ["2?", "2!"]
    assert json.loads((out / "case" / "config.json").read_text())["model_type"] == "llama"
    with pytest.raises(SystemExit, match="has 5 rows; --rows 9 need more"):
        script.main([str(text), "--rows", "9", "--out", str(out)])


def test_it_passes_where_nothing_beside_it_is_much_faster(script, monkeypatch):
    three = ["activation_offloading", "tiled_loss", *SWITCH_ON]  # the results have them in another order
    assert script.held_against(RESULTS, found(three))["recommended"] == " + ".join(reversed(three))
    slowest = script.held_against(RESULTS, found(["save_on_cpu"]))
    speed, low, high = slowest["beside"]["sdpa + adamw_foreach + padding + tiled_mlp(shards=2)"]
    assert low < speed < high and speed == pytest.approx(1 / 0.206, rel=0.01) and not slowest["passed"]
    assert slowest["beside"].keys() > {"sdpa + adamw_foreach + padding"} and len(slowest["beside"]) == 7
    monkeypatch.setattr(script, "WITHIN", max(speed for speed, _, _ in slowest["beside"].values()))
    assert script.held_against(RESULTS, found(["save_on_cpu"]))["passed"]
