"""Samples of like lengths together: the same samples and gradients, less padding, and said where there is none."""

import pytest
import torch
from helpers import arm, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import get_length_grouped_indices

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.contract.batch import pad
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.plan.registry import ablation
from lorabench_ablations.grouping import GroupByLength, TokenBudget, budgeted, grouped

LENGTHS = [9, 4, 12, 7, 3, 16]
ANY = st.lists(st.integers(1, 32), min_size=1, max_size=60)


def feed(batch_size=2, samples=6):
    return Workload(name="t", kind="fixed", batch_size=batch_size, seq_len=16, samples=samples)


def evidence(name, lengths, batch_size=2):
    made = arm("sdpa", name, samples=random_samples(lengths), workload=feed(batch_size, len(lengths)))
    return Evidence(made, None, None)


@settings(deadline=None)
@given(ANY, st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_grouping_is_transformers_own_where_the_samples_come_as_it_draws_them(lengths, batch_size, mega_batches, seed):
    drawn = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    theirs = get_length_grouped_indices(
        lengths, batch_size, mega_batches, generator=torch.Generator().manual_seed(seed)
    )
    ours = grouped([lengths[i] for i in drawn], mega_batches * batch_size)
    assert [drawn[i] for i in ours] == theirs


@given(ANY)
def test_a_budget_is_never_exceeded_and_every_sample_is_there_once(lengths):
    parts = budgeted(lengths, 48)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    widths = [max(lengths[i] for i in part) for part in parts]
    assert all(width * len(part) <= 48 for width, part in zip(widths, parts, strict=True))
    assert widths == sorted(widths, reverse=True)
    full = zip(widths, parts[:-1], strict=False)
    assert all((len(part) + 1) * width > 48 for width, part in full)  # one sample more would be too many


def test_a_sample_above_the_budget_is_refused_in_words():
    with pytest.raises(Unsupported, match="token_budget: a sample of 16 tokens does not fit a budget of 12"):
        TokenBudget(tokens=12).batch(random_samples(LENGTHS), feed())


def test_batches_of_a_step():
    samples = random_samples(LENGTHS)
    assert [b.inputs["input_ids"].shape for b in GroupByLength().batch(samples, feed())] == [(2, 16), (2, 9), (2, 4)]
    budget = TokenBudget(tokens=24).batch(samples, feed())
    assert [tuple(b.inputs["input_ids"].shape) for b in budget] == [(1, 16), (2, 12), (3, 7)]
    assert [tuple(b.inputs["input_ids"].shape) for b in TokenBudget().batch(samples, feed())] == [
        (2, 16),
        (3, 9),
        (1, 3),
    ]


@pytest.mark.parametrize(
    "toggle", [GroupByLength(), GroupByLength(mega_batches=2), TokenBudget(), TokenBudget(tokens=20)]
)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=12))
def test_the_same_tokens_are_trained(toggle, lengths):
    samples = random_samples(lengths)
    ours, padded = toggle.batch(samples, feed()), pad(samples, 2)
    assert sum(b.trained for b in ours) == sum(b.trained for b in padded)
    assert sum(b.real for b in ours) == sum(b.real for b in padded) == sum(lengths)
    assert sorted(rows(ours)) == sorted(rows(padded))


def rows(batches):
    """The tokens of each sample, without its padding."""
    found = []
    for batch in batches:
        ids = batch.inputs["input_ids"]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
        found += [row[: int(real)].tolist() for row, real in zip(ids, mask.sum(1), strict=True)]
    return found


@pytest.mark.parametrize("name", ["group_by_length", {"token_budget": {"tokens": 24}}])
@pytest.mark.parametrize("others", [(), ("adapters_in_compute_dtype", "lora_kernels")], ids=["plain", "lora_kernels"])
def test_gradients_are_padding_s(name, others):
    samples = random_samples(LENGTHS)
    ours, padded = (one_step(arm("sdpa", "adamw", *others, n, samples=samples)) for n in (name, "padding"))
    assert ours.loss == pytest.approx(padded.loss, rel=1e-5)
    for key, gradient in padded.gradients.items():
        torch.testing.assert_close(ours.gradients[key], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "lengths", "batch_size", "says"),
    [
        ("group_by_length", LENGTHS, 1, "a micro-batch of one sample has no padding"),
        ("group_by_length", LENGTHS, 6, "the step is one micro-batch"),
        ("group_by_length", [16, 16, 9, 9], 2, "each is as wide as without it"),
        ("token_budget", [16, 16, 16, 16], 2, "the same shapes as padding"),
    ],
)
def test_what_changes_no_micro_batch_says_why(name, lengths, batch_size, says):
    with pytest.raises(NotApplied, match=says):
        ablation(name).audit(evidence(name, lengths, batch_size))


def test_sites_are_the_micro_batches():
    assert GroupByLength().audit(evidence("group_by_length", LENGTHS)) == 3
    assert TokenBudget().audit(evidence("token_budget", LENGTHS, batch_size=1)) == 5  # 16, 12, 9, 7 and 4, 3


@pytest.mark.parametrize("given", [{"group_by_length": {"mega_batches": 0}}, {"token_budget": {"tokens": "many"}}])
def test_a_wrong_parameter_is_one_line(given):
    with pytest.raises(ValueError, match=r"should be (greater than 0|a valid integer), not"):
        ablation(given)


def test_settings():
    assert GroupByLength().settings().trainer == {"train_sampling_strategy": "group_by_length"}
    assert TokenBudget().settings() is None
