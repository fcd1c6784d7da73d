"""Slot `scheduler`: whatever rule shares the samples of all jobs out, each job is as it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from several_jobs import alone, audited, build, outcomes, request, same

from lorabench.contract.ablation import NotApplied, Unsupported, conflict
from lorabench.plan.registry import ablation
from lorabench_ablations.joint_batches import shared_out

RULES = ["fifo", "fast_fit", "optimal_fit", "residual_capacity", "lorafusion"]
WAYS = ["batched_packed", "fused_multi_lora", "batched"]


def remainder(number, place):
    """In make test every rule has one way, and every way a rule: they meet in the schedule, of which a way knows only
    whether padding counts, and tests/schedule has every rule with and without."""
    return [] if number % len(WAYS) == place else [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        pytest.param(rule, way, marks=remainder(number, place))
        for number, rule in enumerate(RULES)
        for place, way in enumerate(WAYS)
    ],
)
def test_every_job_is_as_it_is_alone_under_every_rule(rule, way):
    wanted = request(way, f"{{{rule}:{{tokens:150}}}}")
    arm = build(wanted)
    assert len(arm.micro_batches) > 1
    assert all(batch.inputs["input_ids"].numel() <= 150 for batch in arm.micro_batches)
    assert arm.real == sum(len(sample.tokens) for sample in arm.samples)
    same(outcomes(wanted), alone(wanted))


def test_a_rule_puts_samples_together_that_the_workload_does_not():
    """Of one large micro-batch everything is a part; without a rule there are as many as a job has of its own."""
    assert len(build(request("batched_packed")).micro_batches) == 2
    sites, notes = audited("fast_fit", request("batched_packed", "fast_fit"))
    assert sites == 1 and len(notes["tokens_of_each_micro_batch"]) == 1


@pytest.mark.parametrize("way", ["sequential", "sdpa"])
def test_without_jobs_that_train_together_it_is_not_applied_or_a_conflict(way):
    if way == "sequential":
        assert "expected batched" in (conflict([ablation("fifo"), ablation(way)]) or "")
    else:
        with pytest.raises(NotApplied, match="expected batched"):
            audited("fifo", request(way, "fifo"))


def test_two_rules_for_the_same_samples_are_refused():
    assert "both fill the slot scheduler" in (conflict([ablation("fifo"), ablation("fast_fit")]) or "")
    for way in ("batched", "batched_packed", "fused_multi_lora"):
        found = conflict([ablation({way: {"tokens": 200}}), ablation("fifo")])
        assert f"{way} excludes fifo: tokens= and a scheduler both say" in (found or "")
        assert conflict([ablation(way), ablation("fifo")]) is None


@pytest.mark.parametrize("rule", RULES)
def test_a_sample_that_fits_nowhere_is_one_line(rule):
    with pytest.raises(Unsupported, match="holds at most 20"):
        build(request("batched_packed", f"{{{rule}:{{tokens:20}}}}"))


def test_a_schedule_that_loses_a_sample_is_refused():
    steps = build(replace(request("sequential"))).steps
    with pytest.raises(Unsupported, match="twice or not at all"):
        shared_out([step.batches for step in steps], [[(0, 0), (1, 0)]])


@pytest.mark.parametrize("given", [{"tokens": 0}, {"multiple": "many"}], ids=str)
def test_a_wrong_parameter_is_one_line(given):
    with pytest.raises(ValueError, match=r"(tokens: should be greater than 0|multiple: should be a valid integer)"):
        ablation({"fifo": given})
