"""Workloads: lengths that follow the figures, padding that is counted, text that is read or refused in one line."""

import json
import re

import numpy as np
import pytest
import torch
from helpers import random_samples

from lorabench.contract.batch import IGNORE, pad
from lorabench.contract.workload import Workload, WorkloadError, fixed, length_tables
from lorabench.plan import compose
from lorabench.plan.samples import choose, draw, draw_lengths


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


def long_and_short(tmp_path, rows=60):
    """A file whose answers have 1 to 300 characters, most of them few."""
    path = tmp_path / "a.jsonl"
    lengths = [1 + int(300 * (n / rows) ** 3) for n in range(rows)]
    path.write_text("".join(json.dumps({"question": "q", "answer": "x" * n}) + "\n" for n in lengths))
    return path, [n + len("q\n\n") + 1 for n in lengths]


def chosen(path, samples, batch_size, seed=0):
    feed = text(path).model_copy(update={"seq_len": 512, "samples": samples, "batch_size": batch_size})
    return choose(feed, 100, seed, samples), draw(feed, 100, seed)


@pytest.mark.parametrize(("samples", "batch_size"), [(2, 2), (12, 3), (16, 4), (60, 2)])
def test_rows_have_the_lengths_and_the_padding_of_the_file(tmp_path, tokenizer, samples, batch_size):
    path, lengths = long_and_short(tmp_path)
    found, drawn = chosen(path, samples, batch_size)
    own = [len(s.tokens) for s in drawn]
    assert own == [lengths[row] for row in found.rows] and found.of == 60
    wanted = np.quantile(lengths, (np.arange(samples) + 0.5) / samples, method="inverted_cdf")
    assert sorted(own) == pytest.approx(wanted, rel=0.25, abs=2)
    rng, batches = np.random.default_rng(1), []
    for _ in range(2000):
        batches.append(rng.choice(lengths, batch_size, replace=False))
    usual = 1 - np.mean([b.sum() for b in batches]) / np.mean([batch_size * b.max() for b in batches])
    assert found.text_padding == pytest.approx(usual, abs=0.02)
    laid = [own[n : n + batch_size] for n in range(0, samples, batch_size)]
    assert found.padding == pytest.approx(1 - sum(own) / sum(len(b) * max(b) for b in laid))
    assert found.padding == pytest.approx(found.text_padding, abs=0.03 if samples > 2 else 0.3)


def test_a_plan_that_is_made_again_reads_no_row_again(tmp_path, monkeypatch):
    path, _ = long_and_short(tmp_path)
    feed, read = text(path).model_copy(update={"seq_len": 512, "samples": 12, "batch_size": 3}), []

    class Counting(Words):
        def __call__(self, text, add_special_tokens):
            read.append(text)
            return super().__call__(text, add_special_tokens)

    one = Counting()
    monkeypatch.setattr("lorabench.plan.samples.load_tokenizer", lambda name: one)
    first = choose(feed, 100, 0, 12)
    assert len(read) == 2 * 60
    assert choose(feed, 100, 0, 12) == first and len(read) == 2 * 60
    assert choose(feed, 100, 1, 12) != first and len(read) == 4 * 60


def test_the_same_seed_chooses_the_same_rows_and_says_how_many_of_how_many(tmp_path, tokenizer):
    path, lengths = long_and_short(tmp_path)
    (one, drawn), (again, _), (other, _) = (chosen(path, 12, 3, seed) for seed in (0, 0, 1))
    assert one == again and one.rows != other.rows
    assert sorted(lengths[row] for row in one.rows) == sorted(lengths[row] for row in other.rows)
    assert draw(text(path).model_copy(update={"seq_len": 512, "drawn": one}), 100, 7) == drawn
    assert re.fullmatch(r"12 of 60 rows, chosen by their length; padding [\d.]+ % \(random .*: [\d.]+ %\)", one.words)


def test_batches_are_long_integers():
    batch = pad(random_samples([3, 4]), 2)[0]
    assert {v.dtype for v in batch.inputs.values()} == {torch.int64}


def test_a_folder_is_named_and_not_where_it_lies(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    made = compose.workload({str(tmp_path / "a.jsonl"): {"tokenizer": str(tmp_path / "words"), "seq_len": 8}})
    assert made.name == "a.jsonl(tokenizer=words, seq_len=8)" and made.tokenizer == str(tmp_path / "words")
