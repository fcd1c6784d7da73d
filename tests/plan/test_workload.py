"""Workloads: lengths that follow the figures, padding that is counted, text that is read or refused in one line."""

import json

import numpy as np
import pytest
import torch
from helpers import random_samples

from lorabench.contract.batch import IGNORE, pad
from lorabench.contract.workload import Workload, WorkloadError, fixed, length_tables
from lorabench.plan.samples import draw, draw_lengths


@pytest.mark.parametrize("name", length_tables()["measured"])
def test_measured_lengths_have_the_data_set_s_mean_and_range(name):
    table = length_tables()["measured"][name]
    drawn = draw_lengths(name, 20_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(table["mean"], rel=0.01)
    assert drawn.std() == pytest.approx(table["std"], rel=0.1)  # the last percent is drawn out to the maximum
    assert table["quantiles"][0] <= drawn.min() and drawn.max() <= table["quantiles"][-1]


@pytest.mark.parametrize("name", length_tables()["approximate"])
def test_approximate_lengths_are_labelled_and_near_their_mean(name):
    table = length_tables()["approximate"][name]
    drawn = draw_lengths(name, 20_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(table["mean"], rel=0.05)
    assert Workload(name="x", kind="lengths", distribution=name, batch_size=1, seq_len=9).lengths_are == "approximate"


def test_same_seed_same_samples():
    feed = Workload(name="x", kind="lengths", distribution="gsm8k", batch_size=2, seq_len=512, samples=6)
    assert draw(feed, 100, 5) == draw(feed, 100, 5) != draw(feed, 100, 6)
    assert len(draw(feed, 100, 5)) == 6
    assert max(max(s.tokens) for s in draw(feed, 100, 5)) < 100


def test_padding_is_counted_apart_from_real_tokens():
    samples = random_samples([5, 9, 3])
    first, second = pad(samples, batch_size=2)
    assert (first.real, first.padded, first.trained) == (14, 4, 12)
    assert (second.real, second.padded, second.trained) == (3, 0, 2)
    assert "attention_mask" in first.inputs and "attention_mask" not in second.inputs
    assert first.inputs["labels"][0, 5:].tolist() == [IGNORE] * 4
    assert first.inputs["input_ids"][1].tolist() == samples[1].tokens


def test_fixed_by_its_name():
    assert (fixed("4x2048").batch_size, fixed("4x2048").seq_len) == (4, 2048)
    assert fixed("4by2048") is None
    assert {len(s.tokens) for s in draw(fixed("3x7"), 50, 0)} == {7}


class Words:
    """A tokenizer: one token a character."""

    eos_token_id = 1

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [2 + ord(c) % 90 for c in text]}


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setattr("lorabench.plan.samples.load_tokenizer", lambda name: Words())


def text(path, **more):
    return Workload(name="t", kind="text", path=str(path), tokenizer="w", batch_size=2, seq_len=20, samples=2, **more)


def test_text_is_tokenized_and_only_the_answer_may_be_trained(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"question": "1+1", "answer": str(i)}) + "\n" for i in range(3)))
    sample = draw(text(path, train_on="last_field"), 100, 0)[0]
    assert len(sample.tokens) == len("1+1\n") + len("2\n") + 1 and sample.tokens[-1] == 1
    assert sample.labels[:4] == [IGNORE] * 4
    assert sample.labels[4:] == sample.tokens[4:]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"question": "1"}\n{"question": "2"}\n', "no field named .answer."),
        ("not json\n" * 2, "is not JSON"),
        ('{"question": 1, "answer": 2}\n', "has 1 rows; the workload needs 2"),
    ],
)
def test_bad_text_is_one_line(tmp_path, tokenizer, content, says):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=says):
        draw(text(path), 100, 0)
    with pytest.raises(WorkloadError, match="no such file"):
        draw(text(tmp_path / "missing.jsonl"), 100, 0)


def test_a_tokenizer_above_the_vocabulary_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "x", "answer": "y"}\n' * 2)
    with pytest.raises(WorkloadError, match="above the model's vocabulary"):
        draw(text(path), 5, 0)


def test_batches_are_long_integers():
    batch = pad(random_samples([3, 4]), 2)[0]
    assert {v.dtype for v in batch.inputs.values()} == {torch.int64}
