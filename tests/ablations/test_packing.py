"""Rows without padding: nothing lost, nothing seen across samples, the same loss and gradients as each sample alone."""

import pytest
import torch
from helpers import arm, cells, gate_of, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.contract.batch import IGNORE, pad
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.plan.registry import ablation
from lorabench_ablations.packing import (
    STRATEGIES,
    Packing,
    PaddingFree,
    arrival,
    best_fit_decreasing,
    first_fit_decreasing,
)

FEED = Workload(name="t", kind="fixed", batch_size=2, seq_len=16)
FLAT = [*(Packing(strategy=name) for name in STRATEGIES), PaddingFree()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(st.lists(st.integers(1, 32), max_size=40))
def test_every_sample_is_placed_once_and_whole_and_no_row_overfilled(strategy, lengths):
    rows = STRATEGIES[strategy](lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 32 for row in rows)
    filled = [sum(lengths[i] for i in row) for row in rows]
    if strategy == "arrival":
        assert [i for row in rows for i in row] == list(range(len(lengths)))
        apart = [(done, lengths[after[0]]) for done, after in zip(filled, rows[1:], strict=False)]
        assert all(done + first > 32 for done, first in apart)  # else it would have gone into the row before
    else:
        least = sorted(filled)[:2]
        assert len(least) < 2 or sum(least) > 32  # two rows that fit together would have been one


def test_best_fit_takes_the_fullest_row_where_first_fit_takes_the_first():
    lengths = [7, 4, 4, 2]  # rows of 10: before the 2 is placed the first has room for 3, the second for 2
    assert first_fit_decreasing(lengths, 10) == [[0, 3], [1, 2]]
    assert best_fit_decreasing(lengths, 10) == [[0], [1, 2, 3]]
    assert arrival(lengths, 10) == [[0], [1, 2, 3]] and arrival([4, 7, 4, 2], 10) == [[0], [1], [2, 3]]


@pytest.mark.parametrize("place", STRATEGIES.values(), ids=STRATEGIES)
def test_a_sample_longer_than_a_row_is_refused(place):
    with pytest.raises(ValueError, match="33 tokens does not fit a row of 32"):
        place([2, 33], 32)


def test_no_sample_is_cut_to_a_shorter_row():
    with pytest.raises(Unsupported, match="packing: a sample of 12 tokens does not fit a row of 8"):
        Packing(row_tokens=8).batch(random_samples([3, 12]), FEED)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strategy": "bdf"}, "strategy: should be 'ffd', 'bfd' or 'arrival', not 'bdf'"),
        ({"row_tokens": 0}, "row_tokens: should be greater than 0, not 0"),
    ],
)
def test_a_wrong_parameter_is_one_line(given, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        ablation({"packing": given})


def test_a_wrong_parameter_is_refused_in_python_too():
    with pytest.raises(ValueError, match="row_tokens: should be greater than 0, not 0"):
        Packing(row_tokens=0)
    assert Packing(row_tokens=64).row_tokens == 64


@pytest.mark.parametrize("toggle", FLAT, ids=lambda toggle: toggle.label)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=8))
def test_flat_rows_train_the_same_tokens_as_padding(toggle, lengths):
    samples = random_samples(lengths)
    packed, padded = toggle.batch(samples, FEED), pad(samples, 2)

    def trained(batches):
        pairs = []
        for batch in batches:
            ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
            keep = labels[:, 1:] != IGNORE
            pairs += zip(ids[:, :-1][keep].tolist(), labels[:, 1:][keep].tolist(), strict=True)
        return sorted(pairs)

    assert trained(packed) == trained(padded)
    assert sum(b.trained for b in packed) == sum(b.trained for b in padded)
    assert sum(b.real for b in packed) == sum(b.real for b in padded) == sum(lengths)
    assert all(b.padded == 0 for b in packed)


def test_position_ids_restart_at_each_sample():
    (row,) = Packing().batch(random_samples([3, 5]), FEED)
    assert row.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert row.inputs["labels"][0, [0, 5]].tolist() == [IGNORE, IGNORE]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma", "gemma2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_sample_s_loss_is_its_loss_alone(family, attention):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("transformers gives gemma2 no SDPA")
    samples = random_samples([9, 4, 12])
    packed = arm(attention, "packing", model=f"tiny-{family}", samples=samples)
    (row,) = packed.step.batches
    with torch.no_grad():
        inputs = {k: v for k, v in row.inputs.items() if k != "labels"}
        logits = packed.model(**inputs).logits[0]
        start = 0
        for index in (2, 0, 1):  # first-fit-decreasing: longest first
            ids = torch.tensor([samples[index].tokens])
            alone = packed.model(input_ids=ids, labels=ids).loss
            ours = torch.nn.functional.cross_entropy(logits[start : start + ids.numel() - 1], ids[0, 1:])
            assert ours.item() == pytest.approx(alone.item(), rel=1e-5)
            start += ids.numel()


def test_no_token_sees_another_sample():
    samples = random_samples([6, 6])
    changed = [samples[0], random_samples([6], seed=9)[0]]
    logits = []
    for drawn in (samples, changed):
        made = arm("sdpa", "packing", samples=drawn)
        inputs = {k: v for k, v in made.step.batches[0].inputs.items() if k != "labels"}
        with torch.no_grad():
            logits.append(made.model(**inputs).logits[0])
    torch.testing.assert_close(logits[0][:6], logits[1][:6])
    assert not torch.allclose(logits[0][6:], logits[1][6:])
    swapped = [changed[1], samples[0]]
    made = arm("sdpa", "packing", samples=swapped)
    inputs = {k: v for k, v in made.step.batches[0].inputs.items() if k != "labels"}
    with torch.no_grad():
        second = made.model(**inputs).logits[0][6:]
    torch.testing.assert_close(second, logits[0][:6])


OURS = ("adapters_in_compute_dtype", "lora_kernels")


@pytest.mark.parametrize(
    ("others", "name"),  # a strategy says which rows there are; what computes them is asked of the first one
    [
        pytest.param(others, name, marks=[pytest.mark.exhaustive] if others and 0 < n < len(STRATEGIES) else [])
        for others in ((), OURS)
        for n, name in enumerate(
            [*({"packing": {"strategy": s, "row_tokens": 16}} for s in STRATEGIES), "padding_free"]
        )
    ],
    ids=str,
)
def test_gradients_are_padding_s(name, others):
    samples = random_samples([9, 4, 12, 7, 3])
    packed, padded = (one_step(arm("sdpa", "adamw", *others, n, samples=samples)) for n in (name, "padding"))
    assert packed.loss == pytest.approx(padded.loss, rel=1e-5)
    for key, gradient in packed.gradients.items():
        torch.testing.assert_close(gradient, padded.gradients[key], rtol=1e-3, atol=1e-6)


def evidence(name, lengths, batch_size=2):
    feed = Workload(name="t", kind="fixed", batch_size=batch_size, seq_len=16, samples=len(lengths))
    return Evidence(arm("sdpa", name, samples=random_samples(lengths), workload=feed), None, None)


def test_packing_counts_the_samples_that_share_a_row():
    assert Packing().audit(evidence("packing", [9, 4, 12, 7, 16])) == 5  # in rows of 32: 16 + 12 + 4, 9 + 7
    shorter = {"packing": {"row_tokens": 16}}
    assert Packing(row_tokens=16).audit(evidence(shorter, [9, 4, 12, 7, 16])) == 4  # 16, 12 + 4, 9 + 7


def test_packing_engages_where_a_micro_batch_is_one_sample():
    """Nothing is padded there, but the rows are fewer than the samples."""
    found = evidence("packing", [9, 4, 12, 7, 3, 5], batch_size=1)
    assert Packing().audit(found) == 6 and len(found.arm.step.batches) == 3
    with pytest.raises(NotApplied, match="6 packed rows are not fewer than 6 micro-batches"):
        Packing().audit(evidence("packing", [16] * 6, batch_size=1))


def test_nothing_to_pack_is_not_applied():
    with pytest.raises(NotApplied, match="same length"):
        Packing().audit(evidence("packing", [16, 16]))


def test_padding_free_counts_the_samples_of_padded_micro_batches():
    assert PaddingFree().audit(evidence("padding_free", [9, 4, 7, 7, 3])) == 2
    with pytest.raises(NotApplied, match="the samples of each have one length"):
        PaddingFree().audit(evidence("padding_free", [9, 9, 7, 7]))
    with pytest.raises(NotApplied, match="a micro-batch is one sample"):
        PaddingFree().audit(evidence("padding_free", [9, 4, 7], batch_size=1))


def test_padding_free_is_the_flattening_collator_s_batch():
    from transformers import DataCollatorWithFlattening

    samples = random_samples([5, 3, 6, 2])
    ours = PaddingFree().batch(samples, FEED)
    for i, batch in enumerate(ours):
        rows = [{"input_ids": s.tokens, "labels": s.labels} for s in samples[2 * i : 2 * i + 2]]
        theirs = DataCollatorWithFlattening()(rows)
        for name in ("input_ids", "labels", "position_ids"):
            assert batch.inputs[name].tolist() == theirs[name].tolist(), name


def test_settings_name_the_strategy_where_the_trainers_have_one():
    assert Packing(strategy="bfd").settings().sft == {"packing": True, "packing_strategy": "bfd"}
    assert Packing(strategy="arrival").settings().axolotl == {
        "sample_packing": True,
        "sample_packing_sequentially": True,
    }
    assert Packing().settings().axolotl == {"sample_packing": True}
    assert PaddingFree().settings().sft["padding_free"] and PaddingFree().settings().axolotl == {
        "batch_flattening": True
    }


@pytest.mark.parametrize("toggle", ["packing", "padding_free"])
def test_under_dropout_it_is_gated_without(toggle, tmp_path):
    """The gate's masks go by a tensor's shape, and plain PEFT has none of a packed row's."""
    cell = cells("workload=short_samples", "dtype=float32", "lora.lora_dropout=0.1", f"ablations=[{toggle}]")[-1]
    assert gate_of(cell, tmp_path).numerics[""].passed
