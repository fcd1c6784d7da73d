"""What the toggles that batch note of themselves: the micro-batches as they are, and as padding would make them."""

import json

import pytest
from helpers import arm, random_samples

from lorabench.contract.ablation import Evidence
from lorabench.contract.batch import pad
from lorabench.contract.rehearsal import Sizing
from lorabench.contract.workload import Workload
from lorabench.plan.architecture import decoder_layers
from lorabench.plan.packing_gain import MicroBatch
from lorabench_ablations.batching import layout, lengths_of, micro_batch, own_batches, padded_batches
from lorabench_ablations.packing import row

LENGTHS = [9, 4, 12, 7, 3]


def evidence(*names, **kwargs):
    feed = Workload(name="t", kind="lengths", distribution="glue", batch_size=2, seq_len=16, samples=5)
    return Evidence(arm(*names, samples=random_samples(LENGTHS), **({"workload": feed} | kwargs)), None, None)


def test_a_batch_says_the_lengths_of_its_samples():
    samples = random_samples([5, 9, 9])
    assert micro_batch(row(samples)) == MicroBatch(1, 23, (5, 9, 9))
    assert [micro_batch(b) for b in pad(samples, 2)] == [MicroBatch(2, 9, (5, 9)), MicroBatch(1, 9, (9,))]


@pytest.mark.parametrize("name", ["packing", "padding_free", "group_by_length", "token_budget"])
def test_the_note_holds_both_arms_and_goes_through_json(name):
    made = evidence("sdpa", name)
    note = json.loads(json.dumps(layout(made)))["layout"]
    assert [tuple(b[:2]) for b in note["padded"]] == [(2, 9), (2, 12), (1, 3)]
    assert sorted(n for b in note["own"] for n in b[2]) == sorted(LENGTHS)
    assert (note["lengths"], note["knows_borders"]) == ("approximate", False)


def test_every_job_is_there():
    jobs = [{"name": "first"}, {"name": "second"}]
    feed = Workload(name="t", kind="lengths", distribution="glue", batch_size=2, seq_len=40, samples=3, jobs=jobs)
    made = Evidence(arm("sdpa", "packing", workload=feed), None, None)
    own, padded = own_batches(made), padded_batches(made)
    assert sum(b.real for b in own) == sum(b.real for b in padded) == sum(lengths_of(made.arm.samples))
    assert len(padded) == 4


def test_a_micro_batch_that_was_found_is_what_padding_would_have_had():
    made = evidence("sdpa", "group_by_length")
    made.arm.sizings = [Sizing(3)]
    assert [batch[:2] for batch in padded_batches(made)] == [(3, 12), (2, 7)]


def test_the_flops_of_a_token_and_of_a_pair():
    made = evidence("sdpa", "packing")
    note = layout(made)["layout"]
    base = made.arm.model.get_base_model()
    frozen = sum(p.numel() for p in decoder_layers(base).parameters() if p.dim() == 2 and not p.requires_grad)
    adapters = sum(p.numel() for p in base.parameters() if p.requires_grad)
    config = base.config
    assert note["token_flop"] == 4 * (frozen + config.vocab_size * config.hidden_size) + 6 * adapters
    assert note["pair_flop"] == 14 * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def test_attention_that_knows_the_borders_is_noted():
    made = evidence("sdpa", "packing")
    made.arm.model.config._attn_implementation = "flash_attention_2"
    assert layout(made)["layout"]["knows_borders"]
