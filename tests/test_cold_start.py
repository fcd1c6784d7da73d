"""benchmarks/cold_start.py: what a user waits for, part by part, in fresh processes."""

from __future__ import annotations

import json
import time

import pytest
from helpers import benchmark

SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50,
}  # fmt: skip
GIVEN = {"name": "tiny@2x8", "config": SIZES, "batch": 2, "seq_len": 8, "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def script():
    with benchmark("cold_start") as module:
        yield module


def row(script, ours=1.0, peft=0.5):
    """A row in which every part of an arm took so many seconds."""
    each = {"peft": peft, "lorakernels": ours}
    seconds = {
        arm: {cache: {part: [each[arm]] for part in script.PARTS} for cache in script.CACHES} for arm in script.ARMS
    }
    return {"name": "m@1x8", "seconds": seconds, "compiled_kernels": 7, "choices": 3}


@pytest.mark.parametrize("arm", ["peft", "lorakernels"])
def test_a_child_tells_the_seconds_of_each_part(script, arm):
    found = script.train(GIVEN | {"arm": arm, "spawned": script.BEGAN - 1})
    assert list(found) == list(script.PARTS)
    assert found["start"] == pytest.approx(1)
    assert found["first_step"] > 0 and found["model"] > 0
    assert (found["apply"] > 1e-4) == (arm == "lorakernels")


def test_empty_and_warm_are_one_folder_of_each_arm_and_repeat(script, monkeypatch):
    runs = []

    def run(given, folder):
        runs.append((given["arm"], str(folder), (folder / "triton").is_dir()))
        (folder / "triton").mkdir(exist_ok=True)
        return dict.fromkeys(script.PARTS, 1.0)

    monkeypatch.setattr(script, "run", run)
    found = script.measured(GIVEN, repeats=2)
    counted = runs[1:]
    assert [warm for _, _, warm in counted] == [False, True] * 4, (
        "the second process of a pair finds what the first left"
    )
    assert len({folder for _, folder, _ in counted}) == 4
    assert [arm for arm, *_ in counted[::2]] == ["lorakernels", "peft", "peft", "lorakernels"], "A B B A"
    assert all(len(times) == 2 for arm in found["seconds"].values() for c in arm.values() for times in c.values())


def test_the_table_says_which_aims_are_reached(script):
    text = script.table([row(script, ours=3.0, peft=1.0)], "a machine")
    assert "| m@1x8 | empty | +6.00 s | at most 20 s | reached |" in text
    assert "| m@1x8 | warm | +6.00 s | at most 5 s | missed |" in text
    assert "| m@1x8 | lorakernels | warm | " + "3.00 | " * 8 + "18.00 |" in text
    assert "7 kernels compiled, 3 choices measured" in text


def test_what_lies_on_disk_is_counted(script, tmp_path):
    for name in ("a/x.cubin", "b/y.cubin", "b/y.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "choices-0.json").write_text(json.dumps({"choices": {"a": "b", "c": "d"}}))
    assert script.left_on_disk(tmp_path) == {"compiled_kernels": 2, "choices": 2}


def test_a_child_that_fails_is_one_clear_line(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text("raise SystemExit('no memory left')\n")
    with pytest.raises(script.ChildFailed, match=r"tiny@2x8 with peft ended with 1 and said: no memory left"):
        script.run(GIVEN | {"arm": "peft"}, tmp_path)


def test_a_childs_caches_lie_in_its_folder(script, monkeypatch, tmp_path):
    monkeypatch.setenv("LORAKERNELS_CACHE", "0")
    monkeypatch.setattr(script, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text(
        "import json, os, sys, time\n"
        "assert 'LORAKERNELS_CACHE' not in os.environ\n"
        "print('noise'), print(json.dumps({k: os.environ[k] for k in ('TRITON_CACHE_DIR', 'CUDA_CACHE_PATH')}))\n"
    )
    found = script.run(GIVEN | {"arm": "peft"}, tmp_path / "here")
    assert set(found.values()) == {str(tmp_path / "here/triton"), str(tmp_path / "here/cuda")}


@pytest.mark.parametrize(
    "argument, words",
    [
        ("tiny-lama@2x16", "did you mean tiny-llama"),
        ("tiny-llama", "expected MODEL@BATCHxLENGTH"),
        ("tiny-llama@alpaca", "expected MODEL@BATCHxLENGTH"),
    ],
)
def test_bad_input_is_one_clear_line(script, capsys, tmp_path, argument, words):
    assert script.main([argument, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_no_repeat_is_refused(script, capsys):
    with pytest.raises(SystemExit) as exit:
        script.main(["tiny-llama@2x16", "--repeats", "0"])
    assert exit.value.code == 2 and "at least 1" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_end_to_end_in_fresh_processes(script, capsys, tmp_path):
    began = time.time()
    assert script.main(["tiny-llama@2x16", "--repeats", "1", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/cold_start.json").read_text())
    seconds = found["rows"][0]["seconds"]
    spent = sum(times[0] for arm in seconds.values() for cache in arm.values() for times in cache.values())
    assert 0 < spent < time.time() - began
    assert seconds["lorakernels"]["empty"]["apply"][0] > seconds["peft"]["empty"]["apply"][0]
    assert found["rows"][0]["compiled_kernels"] == 0, "on a CPU"
    assert (tmp_path / "out/cold_start.md").read_text() in capsys.readouterr().out
    assert "torch" not in script.__dict__, "a child imports torch inside of its clock"
