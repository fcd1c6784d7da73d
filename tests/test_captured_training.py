"""The script that times whole trainer runs, on a tiny model: every arm, the rates, the table."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import benchmark, word_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

SMALL = ["--model", "tiny-llama", "--steps", "5", "--warm", "2", "--batch", "2", "--seq-len", "24"]


@pytest.fixture(scope="module")
def script():
    with benchmark("captured_training") as module:
        yield module


@pytest.mark.exhaustive
def test_it_trains_compares_and_writes(script, tmp_path, monkeypatch, capsys):
    own = script.apart
    monkeypatch.setattr(
        script, "apart", lambda options, arm: own(options, arm) if arm == "unsloth" else script.run(options, arm)
    )
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    arms = ["plain", "captured", "lorakernels_captured", "lorakernels_padding_free_captured", "unsloth"]
    assert script.main([*SMALL, "--out", str(tmp_path / "out"), "--arms", *arms]) == 0
    found = json.loads((tmp_path / "out" / "captured_training.json").read_text())
    made = found["arms"]
    assert list(made) == arms and "pip install" in made["unsloth"]["unsupported"]
    for name in arms[:4]:
        arm = made[name]
        assert arm["real_tokens_per_step"] == 48, "GSM8K's samples are longer than 24 tokens"
        assert arm["steady_tokens_per_s"] == pytest.approx(48e3 / arm["steady_ms_per_step"])
        assert len(arm["losses"]) == 5 and arm["largest_loss_distance"] < 1e-3, "the same samples in each step"
    assert made["plain"]["capture"] is None and made["plain"]["steady_against_plain"] == 1
    assert made["captured"]["capture"]["eager"] == {"CUDA graphs need a CUDA device; the model is on cpu": 5}
    table = (tmp_path / "out" / "captured_training.md").read_text()
    assert table.count("\n| ") == 6 and "| unsloth | needs unsloth" in table
    assert table in capsys.readouterr().out


@pytest.mark.exhaustive
def test_an_arm_that_fails_is_named_and_costs_no_other(script, tmp_path):
    command = [*SMALL, "--out", str(tmp_path / "out"), "--arms", "captured", "--lengths", "nothing_of_the_kind"]
    assert script.main(command) == 1
    found = json.loads((tmp_path / "out" / "captured_training.json").read_text())
    assert "nothing_of_the_kind" in found["arms"]["captured"]["failed"]
    assert "nothing_of_the_kind" in (tmp_path / "out" / "captured.stderr.txt").read_text()


@pytest.mark.exhaustive
def test_an_arm_without_an_end_says_where_it_stood(script, tmp_path):
    command = ["--model", "tiny-llama", "--steps", "99999", "--seq-len", "4", "--timeout", "30"]
    assert script.main([*command, "--out", str(tmp_path / "out"), "--arms", "plain"]) == 1
    found = json.loads((tmp_path / "out" / "captured_training.json").read_text())
    assert found["arms"]["plain"]["failed"] == "no end within 30 s"
    assert "captured_training.py" in (tmp_path / "out" / "plain.stderr.txt").read_text()


def test_real_text(script, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0, "two": 1, "and": 2, "five": 3}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path)
    rows = [{"question": "two and two", "answer": "five"}, {"question": "two", "answer": "two"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = script.parse([*SMALL, "--text", str(tmp_path / "text.jsonl"), "--tokenizer", str(tmp_path)])
    samples = script.samples_of(options)
    assert samples[:3] == [[1, 2, 1, 3], [1, 1], [1, 2, 1, 3]] and len(samples) == 10
    assert script.tokens_of(options, samples) == [6] * 5


def test_real_weights_are_trained_and_their_losses_shown(script, tmp_path, monkeypatch):
    model, text = word_model(tmp_path)
    monkeypatch.setattr(script, "apart", script.run)
    words = ["--weights", str(model), "--text", str(text), "--steps", "3", "--warm", "1", "--batch", "2"]
    words += ["--out", str(tmp_path / "out"), "--arms", "plain"]
    assert script.main(words) == 0
    found = json.loads((tmp_path / "out" / "captured_training.json").read_text())
    losses = list(found["arms"]["plain"]["losses"].values())
    ids = [torch.tensor(one) for one in script.samples_of(script.parse(words))[:2]]
    rows, labels = (pad_sequence(ids, batch_first=True, padding_value=filler) for filler in (0, -100))
    own = AutoModelForCausalLM.from_pretrained(model)(input_ids=rows, labels=labels).loss.item()
    assert losses[0] == pytest.approx(own, abs=1e-4), "the weights of the folder, before the first update"
    said = (tmp_path / "out" / "captured_training.md").read_text()
    assert said.startswith(str(model)) and f"| {losses[0]:.3f} → {losses[-1]:.3f} |" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warm", "5"], "must lie between 0 and --steps 5"),
        (["--text", "nowhere.jsonl"], "--text needs --tokenizer or --weights"),
        (["--text", "nowhere.jsonl", "--tokenizer", "x"], "nowhere.jsonl: no such file"),
        (["--arms", "fastest"], "invalid choice"),
    ],
)
def test_wrong_arguments(script, words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.parse([*SMALL, *words])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
