"""Every trial has tokens of its own, in the layout that the toggle gave its batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import PEFT, arm, random_samples, request

from lorabench.contract.ablation import Ablation, Unsupported
from lorabench.contract.batch import IGNORE, Batch, Sample, pad
from lorabench.contract.kind import kind
from lorabench.contract.workload import Workload
from lorabench.measure.fairness import Untrusted
from lorabench.measure.feed import Feed, fresh_tokens, marked

PACKED = Workload(name="packed", kind="fixed", batch_size=4, seq_len=16)


def step_tokens(made):
    return [{n: t.clone() for n, t in b.inputs.items()} for b in made.step.batches]


@pytest.mark.parametrize("names", [PEFT, ("packing",)])
def test_a_trial_s_tokens_are_fresh_and_the_layout_stays(names):
    samples = random_samples([16, 5, 9, 12])
    made = arm(*names, samples=samples, workload=PACKED)
    own = step_tokens(made)
    made.kind.feed(made, 1)
    first = step_tokens(made)
    made.kind.feed(made, 2)
    second = step_tokens(made)
    made.kind.feed(made, 0)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(own, step_tokens(made), strict=True) for n in a)
    for one, other in ((own, first), (first, second)):
        for a, b in zip(one, other, strict=True):
            assert not torch.equal(a["input_ids"], b["input_ids"])
            assert torch.equal(a["labels"] == IGNORE, b["labels"] == IGNORE)
            assert all(torch.equal(a[n], b[n]) for n in a if n not in ("input_ids", "labels"))


def test_both_arms_get_the_same_tokens_however_they_lay_them_out():
    samples = random_samples([16, 5, 9, 12])
    padded, packed = (arm(*n, samples=samples, workload=PACKED) for n in (PEFT, ("packing",)))
    for made in (padded, packed):
        made.kind.feed(made, 3)
    trained = [
        sorted(int(t) for b in made.step.batches for t in b.inputs["labels"][b.inputs["labels"] != IGNORE])
        for made in (padded, packed)
    ]
    fresh = fresh_tokens(samples, 256, True, 0, 3)
    firsts = np.cumsum([0, 16, 5, 9])  # packing never predicts the first token of a sample
    assert trained[0] == sorted(fresh.tolist()) and trained[1] == sorted(np.delete(fresh, firsts).tolist())


def test_real_text_keeps_each_sample_s_tokens_and_what_is_trained():
    samples = [Sample([5, 6, 7, 8], [IGNORE, IGNORE, 7, 8]), Sample([1, 2, 3], [1, 2, 3])]
    flat = fresh_tokens(samples, 100, False, 0, 1)
    assert sorted(flat[:4]) == [5, 6, 7, 8] and sorted(flat[4:]) == [1, 2, 3]
    feed = Feed(pad(samples, 2), pad(marked(samples), 2), samples, 100, False, 0)
    feed(1)
    (batch,) = feed.batches
    assert batch.inputs["labels"][0].tolist() == [IGNORE, IGNORE, *flat[2:4].tolist()]
    assert batch.inputs["input_ids"][1].tolist() == [*flat[4:].tolist(), 0]


def test_batches_that_depend_on_what_the_tokens_are_cannot_take_fresh_ones():
    samples = random_samples([6, 6])
    (own,) = pad(samples, 2)
    (layout,) = pad(marked(samples), 2)
    sorted_ids = replace(own, inputs=own.inputs | {"input_ids": own.inputs["input_ids"].sort(1).values})
    with pytest.raises(Unsupported, match="depend on what the tokens are"):
        Feed([sorted_ids], [layout], samples, 256, True, 0)
    with pytest.raises(Unsupported, match="depend on what the tokens are"):
        Feed([own], [layout, layout], samples, 256, True, 0)
    assert isinstance(Feed([own], [layout], samples, 256, True, 0).batches[0], Batch)


class OddDict(dict):
    pass


class OddList(list):
    pass


class OddName(str):
    pass


class OddTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (lambda own: [replace(own, inputs=OddDict(own.inputs))], "a OddDict for its batch's inputs"),
        (lambda own: [replace(own, inputs={OddName(n): x for n, x in own.inputs.items()})], "a OddName for its batch"),
        (
            lambda own: [replace(own, inputs={n: x.as_subclass(OddTensor) for n, x in own.inputs.items()})],
            "a OddTensor for its batch's input_ids",
        ),
        (lambda own: OddList([own]), "a OddList for its list of batches"),
    ],
)
def test_batches_of_anything_that_may_do_work_while_they_are_filled_are_refused(odd, named):
    samples = random_samples([6, 6])
    (own,), layout = pad(samples, 2), pad(marked(samples), 2)
    with pytest.raises(Untrusted, match=named):
        Feed(odd(own), layout, samples, 256, True, 0)


def test_a_trial_s_batches_are_the_harness_s_own_whatever_became_of_the_last_ones():
    samples = random_samples([6, 6])
    batches = pad(samples, 2)
    feed = Feed(batches, pad(marked(samples), 2), samples, 256, True, 0)
    feed(1)
    batches[0] = replace(batches[0], inputs=OddDict(batches[0].inputs))
    feed(2)
    assert type(batches[0].inputs) is dict and type(batches[0]) is Batch
    assert torch.equal(
        batches[0].inputs["input_ids"].reshape(-1), torch.from_numpy(fresh_tokens(samples, 256, True, 0, 2))
    )


def test_an_op_s_rows_that_may_do_work_while_they_are_filled_are_refused():
    made = arm("adapters_in_compute_dtype", model="linear-32x48")
    made.step.x = made.step.x.as_subclass(OddTensor)
    with pytest.raises(Untrusted, match="a OddTensor for its x"):
        made.kind.feed(made, 1)


def test_an_op_s_rows_are_fresh_in_place():
    made = arm("adapters_in_compute_dtype", model="linear-32x48")
    x, first = made.step.x, made.step.x.detach().clone()
    made.kind.feed(made, 1)
    assert made.step.x is x and not torch.equal(x, first)
    made.kind.feed(made, 0)
    assert torch.equal(x, first) and request(model="linear-32x48").cell.kind == "op"


class CountsMore(Ablation):
    name, slot = "counts_more", "third_party"

    def collate(self, batch):
        return replace(batch, real=10 * batch.real)


def test_batches_that_count_other_tokens_than_the_samples_are_refused():
    with pytest.raises(Unsupported, match="count 210 real tokens; the samples have 21"):
        wanted = request(*PEFT, samples=random_samples([16, 5]))
        kind("train").build(replace(wanted, ablations=(*wanted.ablations, CountsMore())))
