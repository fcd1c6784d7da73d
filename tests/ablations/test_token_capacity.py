"""`tokens: auto`: the positions of a joint micro-batch, found by the memory model."""

from __future__ import annotations

import pytest
import torch
from several_jobs import alone, build, request, same

from lorabench.contract.ablation import Evidence
from lorabench.measure.judging.numerics import one_step
from lorabench.plan.registry import ablation

FAST_FIT = ["batched_packed", "{fast_fit:{tokens:auto}}"]
OTHERS = [
    ["batched", "{optimal_fit:{tokens:auto}}"],
    ["fused_multi_lora", "{lorafusion:{tokens:auto,multiple:32}}"],
]


def found(wanted):
    arm = build(wanted)
    (joint,) = [turn.innermost for turn in arm.turns]
    return arm, joint.capacity


@pytest.mark.parametrize(
    "way", [FAST_FIT, *(pytest.param(way, marks=pytest.mark.exhaustive) for way in OTHERS)], ids=str
)
def test_with_room_all_samples_go_together_and_each_job_is_as_it_is_alone(way):
    wanted = request(*way)
    arm, capacity = found(wanted)
    assert len(arm.micro_batches) == 1 and capacity.found["found_by"].startswith("a fit to")
    name = next(a.name for a in wanted.ablations if getattr(a, "tokens", None) == "auto")
    toggle = next(a for a in wanted.ablations if a.name == name)
    told = toggle.notes(Evidence(arm, arm.patched[name], {}))["capacity"][0]
    assert told["tokens"] == capacity.tokens and told["measured_gib"] > 0
    assert all(parameter.grad is None for _, parameter in arm.adapters())
    assert not any(step.optimizer.state for step in arm.steps)
    same([one_step(arm, step) for step in arm.steps], alone(wanted))  # as one whose tries have left no trace


@pytest.mark.exhaustive
def test_a_smaller_budget_makes_more_micro_batches_each_of_which_fits():
    wanted = request(*FAST_FIT)
    longest = max(len(s.tokens) for own in wanted.samples for s in own)
    budget = 0.8 * found(wanted)[1].found["measured_gib"]
    arm, capacity = found(request("batched_packed", f"{{fast_fit:{{tokens:auto,budget_gib:{budget}}}}}"))
    assert len(arm.micro_batches) > 1 and arm.real == sum(len(s.tokens) for s in arm.samples)
    assert longest <= max(batch.inputs["input_ids"].numel() for batch in arm.micro_batches) <= capacity.tokens
    assert capacity.found["measured_gib"] <= budget


def test_where_the_longest_sample_does_not_fit_memory_is_out():
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        build(request("batched_packed", "{fast_fit:{tokens:auto,budget_gib:0.001}}"))


@pytest.mark.parametrize("given", [{"fifo": {"tokens": "much"}}, {"fifo": {"budget_gib": 0}}], ids=str)
def test_a_wrong_word_is_one_line(given):
    with pytest.raises(
        ValueError,
        match=r"(should be a valid integer or should be 'auto', not 'much'|budget_gib: should be greater than 0)",
    ):
        ablation(given)
