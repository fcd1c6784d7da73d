"""Pipelines on two and four processes of a CPU: the loss and every adapter's gradient are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PEFT, arm, config, random_samples
from peft import PeftModel
from several_ranks import on_ranks

from lorabench.contract.ablation import Unsupported
from lorabench.contract.ranks import ONE
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import clear, one_step
from lorabench.measure.kind import kind, request_of
from lorabench.plan import registry
from lorabench.plan.compose import plan
from lorabench_ablations.pipeline_step import save_adapter

FEED = Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
LENGTHS = [16, 9, 12, 16, 3, 14, 7, 11]


DEEP = "tiny-llama-8-layers"  # cut to as many as a test needs


def plain(layers):
    made = arm(*PEFT, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers)
    return one_step(made)


def stepped(ranks, toggles, layers):
    made = arm(
        *PEFT[:2], *toggles, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers, ranks=ranks
    )
    outcome = one_step(made)
    counts = [batch.real for batch in made.step.batches]
    names = [name for name, _ in made.adapters(made.step)]
    gradients = {name: x.numpy() for name, x in outcome.gradients.items()}
    return outcome.loss, gradients, outcome.update_error, counts, names, made.step.innermost.machinery.split


def compare(answers, wanted):
    for loss, gradients, update_error, *_ in answers:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert gradients.keys() == wanted.gradients.keys()
        assert update_error < 1e-6
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradients[name]), gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("ranks", "layers", "toggle"),
    [
        (2, 3, "pipeline_gpipe"),
        (2, 3, "pipeline_1f1b"),
        (2, 3, {"pipeline_1f1b": {"tokens": 32, "layers": [1, 2]}}),
        (2, 4, {"pipeline_interleaved": {"v": 2}}),
        pytest.param(4, 4, "pipeline_1f1b", marks=pytest.mark.exhaustive),
        pytest.param(4, 4, "pipeline_gpipe", marks=pytest.mark.exhaustive),
        pytest.param(2, 6, {"pipeline_interleaved": {"v": 3}}, marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(tmp_path, ranks, layers, toggle):
    answers = on_ranks(ranks, tmp_path, stepped, (toggle,), layers)
    compare(answers, plain(layers))
    assert [sum(counts) for *_, counts, _, _ in answers] == [sum(LENGTHS)] + [0] * (ranks - 1)
    names = [name for *_, own, _ in answers for name in own]
    assert len(names) == len(set(names)) == layers * 7 * 2  # each tensor is on one rank
    split = answers[0][-1]
    assert sum(split) == layers and min(split) >= 1
    assert toggle in ("pipeline_gpipe", "pipeline_1f1b") or "layers" not in str(toggle) or split == [1, 2]
    assert all(answer[-1] == split for answer in answers)


@pytest.mark.parametrize(
    "beside",
    [
        "gradient_checkpointing",
        "lora_kernels",
        pytest.param("selective_checkpointing", marks=pytest.mark.exhaustive),
        pytest.param("save_on_cpu", marks=pytest.mark.exhaustive),
        pytest.param("adamw_fused", marks=pytest.mark.exhaustive),
    ],
)
def test_beside_other_toggles(tmp_path, beside):
    answers = on_ranks(2, tmp_path, stepped, ("pipeline_1f1b", beside), 3)
    compare(answers, plain(3))


def refused(ranks, *toggles):
    try:
        stepped(ranks, toggles, 3)
    except Unsupported as error:
        return str(error)


@pytest.mark.parametrize(
    ("toggles", "reason"),
    [
        (("pipeline_1f1b", {"gradient_checkpointing": {"use_reentrant": True}}), "use_reentrant=false"),
        (({"pipeline_1f1b": {"layers": [1, 1, 1]}},), "layers=[1, 1, 1]: expected 2 numbers, one a stage"),
        (({"pipeline_1f1b": {"tokens": 8}},), "a sample of 16 tokens does not fit a row of 8"),
    ],
)
def test_what_is_refused_on_every_rank(tmp_path, toggles, reason):
    for said in on_ranks(2, tmp_path, refused, *toggles):
        assert reason in said


def saved(ranks, folder):
    """PEFT's save by all ranks, of an adapter that has taken a step; the loss of the next forward."""
    made = arm(*PEFT[:2], "pipeline_1f1b", samples=random_samples(LENGTHS), workload=FEED, ranks=ranks)
    one_step(made)
    save_adapter(made.model, folder)
    return one_step(made).loss


def test_what_peft_saves_has_the_same_loss_in_plain_peft(tmp_path):
    losses = on_ranks(2, tmp_path, saved, tmp_path / "adapter")
    made = arm(*PEFT, samples=random_samples(LENGTHS), workload=FEED)
    before = one_step(made).loss
    base = made.model.unload()
    made.step.model = made.step.call = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        loss = sum(float(made.step.forward(batch)) for batch in made.step.batches)
    assert losses == pytest.approx([loss] * 2, rel=1e-6) and abs(loss - before) > 1e-4


# -- several jobs -----------------------------------------------------------------------------------------------------

TWO_JOBS = ("workload=two_jobs", "reference=[sdpa,adamw_foreach,padding]")


def jobs_arm(ranks, *toggles):
    cell = plan(config(f"models=[{DEEP}]", *TWO_JOBS, "trials=3"), "cpu").cells[0]
    names = [*PEFT[:2], *toggles]
    made = request_of(cell, "reference", torch.float32, torch.device("cpu"), Path())
    made = replace(made, ablations=tuple(map(registry.ablation, names)), layers=3, ranks=ranks)
    return kind("train").build(made)


def jobs_alone():
    made = jobs_arm(ONE, "padding")
    return {step.name: one_step(made, step) for step in made.steps}


def jobs_stepped(ranks, flush):
    """What the gate asks, job by job; then a trial, in which each job's update comes within the schedule."""
    made = jobs_arm(ranks, {"pipeline_multi_adapter": {"flush": flush}})
    gate = {step.name: one_step(made, step) for step in made.steps}
    found = {name: (o.loss, {n: x.numpy() for n, x in o.gradients.items()}, o.update_error) for name, o in gate.items()}
    begun = []
    for step in made.steps:
        clear(made, step)
    outs = kind("train").trial(made, begun.append)
    losses = [ranks.total(sum(float(out) for out in own)) for own in outs]
    return found, begun, losses, made.turns[0].said()["pipeline"]


@pytest.mark.parametrize("flush", [False, True])
def test_several_jobs_in_one_pipeline_are_each_what_it_is_alone(tmp_path, flush):
    wanted = jobs_alone()
    answers = on_ranks(2, tmp_path, jobs_stepped, flush)
    for found, begun, losses, said in answers:
        assert found.keys() == wanted.keys()
        for job, (loss, gradients, update_error) in found.items():
            compare([(loss, gradients, update_error)], wanted[job])
        # each job's step as soon as its last backward is through: the first one's before the last one's backward
        assert begun.count("step") == 2 + 1 and begun.index("step") < len(begun) - 1 - begun[::-1].index("backward")
        assert len(losses) == 2
        assert said["micro_batches"] == 3 + flush and 0 < said["bubble_pct"] < 100
        # each micro-batch's hidden states (rows x 48 positions, 64 wide, float32), and their gradients back
        rows = 1 if flush else 2  # a job alone has to fill the pipeline with its two samples
        assert said["sent_bytes_by_rank"] == [said["micro_batches"] * rows * 48 * 64 * 4] * 2
        assert said["predicted_bubble_pct"] < 100 and sum(said["layers_by_stage"]) == 3
