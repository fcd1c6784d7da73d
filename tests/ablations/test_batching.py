"""Packing: nothing lost, nothing seen across samples, the same loss and gradients as each sample alone."""

import pytest
import torch
from helpers import arm, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.contract.batch import IGNORE, pad
from lorabench.contract.workload import Workload
from lorabench.measure.numerics import one_step
from lorabench_ablations.batching import Packing, first_fit_decreasing

FEED = Workload(name="t", kind="fixed", batch_size=2, seq_len=16)


@given(st.lists(st.integers(1, 32), max_size=40))
def test_first_fit_decreasing_places_every_sample_once_and_overfills_nothing(lengths):
    bins = first_fit_decreasing(lengths, 32)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 32 for b in bins)
    fullest = sorted(sum(lengths[i] for i in b) for b in bins)
    assert len(fullest) < 2 or fullest[0] + fullest[1] > 32  # two bins that fit together would have been one


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="33 tokens does not fit a row of 32"):
        first_fit_decreasing([33], 32)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=8))
def test_packing_trains_the_same_tokens_as_padding(lengths):
    samples = random_samples(lengths)
    packed, padded = Packing().batch(samples, FEED), pad(samples, 2)

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


def test_packed_gradients_are_padding_s():
    samples = random_samples([9, 4, 12, 7, 3])
    packed, padded = (one_step(arm("sdpa", "adamw", name, samples=samples)) for name in ("packing", "padding"))
    assert packed.loss == pytest.approx(padded.loss, rel=1e-5)
    for name, gradient in packed.gradients.items():
        torch.testing.assert_close(gradient, padded.gradients[name], rtol=1e-3, atol=1e-6)


def test_nothing_to_pack_is_not_applied():
    made = arm("packing")
    with pytest.raises(NotApplied, match="same length"):
        Packing().audit(Evidence(made, None, None))
