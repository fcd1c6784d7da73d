"""Pipelines on two and four processes of a CPU: the loss and every adapter's gradient are those of one process."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PEFT, arm, config, random_samples, request
from peft import PeftModel
from safetensors.torch import load_file, save_file
from several_jobs import UNEQUAL
from several_ranks import on_ranks

from lorabench.contract.ablation import Evidence, Unsupported, conflict
from lorabench.contract.ranks import ONE, Ranks
from lorabench.contract.workload import Workload
from lorabench.measure import build, parted_weights
from lorabench.measure.base import Base
from lorabench.measure.judging.numerics import clear, one_step
from lorabench.measure.kind import kind, request_of
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.compose import load_config, model, plan
from lorabench_ablations import pipeline_stages
from lorabench_ablations.joint_batches import halved
from lorabench_ablations.pipeline import _even
from lorabench_ablations.pipeline_step import save_adapter
from lorabench_ablations.scheduler import Scheduling

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


def compare(answers, wanted, rtol=1e-4, atol=1e-7):
    for loss, gradients, update_error, *_ in answers:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert gradients.keys() == wanted.gradients.keys()
        assert update_error < 1e-6
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradients[name]), gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("lengths", "tokens", "wanted"),
    [
        ([900, 800, 700, 600, 500, 400, 300, 200], 3600, [2200, 2200]),  # and not 3600 and 800
        ([900, 800, 700, 600, 500, 400, 300, 200], 7168, [4400]),
        ([500, 500, 500], 600, [500, 500, 500]),
        ([16], 16, [16]),
    ],
)
def test_rows_are_as_even_as_they_can_be_for_each_is_filled_up_to_the_longest(lengths, tokens, wanted):
    rows = _even(lengths, tokens, len(wanted))
    assert [sum(lengths[n] for n in row) for row in rows] == wanted
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))


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
    "toggle",
    [
        {"pipeline_1f1b": {"ranks": 2}},
        pytest.param({"pipeline_gpipe": {"ranks": 2, "tokens": 32}}, marks=pytest.mark.exhaustive),
        pytest.param({"pipeline_interleaved": {"ranks": 2}}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_pipelines_divide_the_samples_and_add_their_gradients(tmp_path, toggle):
    answers = on_ranks(4, tmp_path, stepped, (toggle,), 4)
    compare(answers, plain(4))
    real = [sum(counts) for *_, counts, _, _ in answers]
    assert real == [sum(LENGTHS[0::2]), 0, sum(LENGTHS[1::2]), 0]
    first, second, *others = [own for *_, own, _ in answers]
    assert [first, second] == others and not set(first) & set(second)


def test_a_pipeline_of_some_ranks_wants_a_multiple_of_them_and_one_job():
    with pytest.raises(Unsupported, match="pipeline_1f1b with ranks=3 needs a multiple of that, two at least"):
        registry.ablation({"pipeline_1f1b": {"ranks": 3}}).shard(random_samples(LENGTHS), Ranks(0, 4))
    with pytest.raises(ValueError, match="pipeline_multi_adapter has one pipeline, of all ranks"):
        registry.ablation({"pipeline_multi_adapter": {"ranks": 2}})


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


def jobs_arm(ranks, *toggles, layers=3, overrides=()):
    cell = plan(config(f"models=[{DEEP}]", *TWO_JOBS, "trials=3", *overrides), "cpu").cells[0]
    names = [*PEFT[:2], *toggles]
    made = request_of(cell, "reference", torch.float32, torch.device("cpu"), Path())
    made = replace(made, ablations=tuple(map(registry.ablation, names)), layers=layers, ranks=ranks)
    return kind("train").build(made)


def jobs_alone():
    made = jobs_arm(ONE, "padding")
    return {step.name: one_step(made, step) for step in made.steps}


def multi_adapter(**settings):
    return {"pipeline_multi_adapter": settings}


def jobs_stepped(ranks, *toggles, overrides=()):
    """What the gate asks, job by job; then a trial, in which each job's update comes within the schedule."""
    made = jobs_arm(ranks, *toggles, overrides=overrides)
    gate = {step.name: one_step(made, step) for step in made.steps}
    found = {name: (o.loss, {n: x.numpy() for n, x in o.gradients.items()}, o.update_error) for name, o in gate.items()}
    begun = []
    for step in made.steps:
        clear(made, step)
    outs = kind("train").trial(made, begun.append)
    losses = [ranks.total(sum(float(out) for out in own)) for own in outs]
    return found, begun, losses, made.turns[0].innermost.said()["pipeline"]


@pytest.mark.parametrize(
    ("flush", "kernels", "beside"),
    [
        (False, False, ()),
        (True, False, ()),
        (False, True, ()),
        (True, True, ("gradient_checkpointing",)),
        pytest.param(False, True, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(True, True, (), marks=pytest.mark.exhaustive),
        pytest.param(False, True, ("save_on_cpu",), marks=pytest.mark.exhaustive),
    ],
)
def test_several_jobs_in_one_pipeline_are_each_what_it_is_alone(tmp_path, flush, kernels, beside):
    wanted = jobs_alone()
    answers = on_ranks(2, tmp_path, jobs_stepped, multi_adapter(flush=flush, kernels=kernels), *beside)
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


def trained(ranks, *toggles, overrides=()):
    """(each job's losses in three trials, its adapter behind them)"""
    made = jobs_arm(ranks, *toggles, overrides=overrides)
    losses = [list(run_trial(made, number=number).losses.values()) for number in range(3)]
    losses = [[ranks.total(loss) for loss in own] for own in losses]
    return losses, [{n: p.detach().numpy().copy() for n, p in made.adapters(step)} for step in made.steps]


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({"kernels": True}, ()),
        ({"kernels": True}, ("gradient_checkpointing",)),
        ({"kernels": True, "flush": True}, ()),
        ({"kernels": True, "tokens": 64}, ()),
        pytest.param({}, (), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_steps_in_a_row_train_each_job_as_alone(tmp_path, settings, beside):
    """A job's update comes between the forwards and the backwards of the other jobs' micro-batches."""
    trains_as_alone(on_ranks(2, tmp_path, trained, multi_adapter(**settings), *beside), trained(ONE, "padding"))


def trains_as_alone(answers, alone):
    losses, adapters = alone
    for job, wanted in enumerate(adapters):
        found = {name: x for _, own in answers for name, x in own[job].items()}
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(x), rtol=1e-3, atol=2e-5)
    for own, _ in answers:
        assert own == [pytest.approx(each, rel=1e-5) for each in losses]
    assert losses[0] != losses[1]  # they learn


def spoilt(ranks, settings, spoil):
    """The losses of a trial, and the second job's gradients, where the first job's adapter is NaN or as it was."""
    made = jobs_arm(ranks, multi_adapter(**settings))
    with torch.no_grad():
        for _, p in made.adapters(made.steps[0]) if spoil else ():
            p.fill_(float("nan"))
    losses = list(run_trial(made).losses.values())
    return losses, {name: p.grad.numpy().copy() for name, p in made.adapters(made.steps[1])}


@pytest.mark.parametrize("settings", [{"kernels": True}, {}], ids=str)
def test_a_job_that_is_nan_leaves_the_others_bitwise_alone(tmp_path, settings):
    for folder in (found := tmp_path / "found", usual := tmp_path / "usual"):
        folder.mkdir()
    pairs = zip(on_ranks(2, found, spoilt, settings, True), on_ranks(2, usual, spoilt, settings, False), strict=True)
    for rank, ((losses, gradients), (wanted, own)) in enumerate(pairs):
        assert losses[1] == wanted[1] and (losses[0] != losses[0]) == (rank == 1)  # the last stage has the losses
        assert gradients.keys() == own.keys() and gradients
        assert all((gradients[name] == x).all() for name, x in own.items())


def forwards(ranks):
    """By rank: forwards that the model's own code ran when the arm was built, those behind a step, the notes."""
    made = jobs_arm(ranks, toggle := multi_adapter(kernels=True), layers=None)
    ran = made.model._lorabench_jobs.report.forwards
    built = dict(ran.left)
    one_step(made, made.steps[0])
    notes = registry.ablation(toggle).notes(Evidence(made, None, Counter()))
    return built, dict(ran.left), dict(ran.fused), notes["lorakernels"]


def test_every_forward_behind_the_patch_is_our_kernels(tmp_path):
    """Those, too, by which the stages are measured, and by which torch learns shapes."""
    answers = on_ranks(2, tmp_path, forwards)
    for built, left, fused, notes in answers:
        assert built == left and fused["layer"] > 0
        assert notes["changed"]["mlp"] == HALF + MARGIN and notes["left"] == []
    measured, *_ = (fused["linear_cross_entropy"] for _, _, fused, _ in answers)
    assert answers[1][2]["linear_cross_entropy"] > measured > 0  # the first rank has the head while it measures


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ("fused_rms_norm", "kernels=true already has this part"),
        ("fused_rope", "kernels=true already has this part"),
        ("fused_linear_cross_entropy", "kernels=true already has this part"),
        ("selective_checkpointing", "a layer's second pass has to run the operators of its first"),
    ],
)
def test_what_goes_beside_the_pipeline_and_not_beside_its_kernels(beside, why):
    both = [registry.ablation(beside), registry.ablation(multi_adapter(kernels=True))]
    assert (conflict(both) or "").startswith(f"pipeline_multi_adapter excludes {beside}: {why}")
    assert conflict([both[0], registry.ablation("pipeline_multi_adapter")]) is None
    assert "lorakernels" in both[1].requires.packages and not registry.ablation_class(both[1].name).requires.packages


def refused_jobs(ranks, *overrides):
    try:
        jobs_arm(ranks, multi_adapter(kernels=True), overrides=overrides)
    except Unsupported as error:
        return str(error)


def test_an_adapter_that_the_kernels_do_not_know_is_one_line(tmp_path):
    said = "an adapter is a variant of LoRA (DoRA, say); expected plain LoRA on a linear, so that each row"
    for reason in on_ranks(2, tmp_path, refused_jobs, "lora.use_dora=true"):
        assert reason.startswith("pipeline_multi_adapter: ") and said in reason


# -- micro-batches of several jobs -------------------------------------------------------------------------------------

MIXING = {"lorafusion": {"tokens": 150}}
HELD = [[0, 1], [2], [1, 2]]  # the jobs of each of its micro-batches
REAL = 48 + 173 + 160  # tokens of each job


def shared_alone():
    made = jobs_arm(ONE, "padding", overrides=(UNEQUAL,))
    return {step.name: one_step(made, step) for step in made.steps}


def shared_stepped(ranks, *toggles):
    """`jobs_stepped`, the jobs of each micro-batch, the shapes of them all, and (real, padding) as this rank counts."""
    made = jobs_arm(ranks, *toggles, overrides=(UNEQUAL,))
    held = [[part.job for part in batch.inputs["parts"]] for batch in made.micro_batches]
    shapes = {tuple(batch.inputs["input_ids"].shape) for batch in made.micro_batches}
    return jobs_stepped(ranks, *toggles, overrides=(UNEQUAL,)), held, shapes, (made.real, made.padded)


@pytest.mark.parametrize(
    ("kernels", "rule", "held", "beside"),
    [
        (False, MIXING, HELD, ()),
        (True, MIXING, HELD, ()),
        (True, MIXING, HELD, ("gradient_checkpointing",)),
        (False, {"lorafusion": {"tokens": 1000}}, [[1, 2], [0, 1]], ()),  # one, of which two ranks make two
        pytest.param(False, MIXING, HELD, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(False, MIXING, HELD, ("fused_linear_cross_entropy",), marks=pytest.mark.exhaustive),
        *(
            pytest.param(kernels, {rule: {"tokens": tokens}}, held, (), marks=pytest.mark.exhaustive)
            for kernels in (True, False)
            for rule, tokens, held in (
                ("fifo", 100, [[0, 1], [1], [1, 2], [2], [2]]),
                ("fast_fit", 150, [[0, 1], [1, 2], [2]]),
                ("lorafusion", 80, [[0, 1], [1], [0, 1], [2], [2]]),
            )
        ),
    ],
    ids=str,
)
def test_jobs_that_share_micro_batches_are_each_what_they_are_alone(tmp_path, kernels, rule, held, beside):
    wanted = shared_alone()
    answers = on_ranks(2, tmp_path, shared_stepped, multi_adapter(kernels=kernels), rule, *beside)
    for (found, begun, losses, said), jobs, _, _ in answers:
        assert jobs == held and said["micro_batches"] == len(held)
        assert found.keys() == wanted.keys()
        for job, (loss, gradients, update_error) in found.items():
            compare([(loss, gradients, update_error)], wanted[job], rtol=1e-3, atol=1e-6)  # as `several_jobs.same`
        assert begun.count("step") == 3 + 1 and len(losses) == 3
    (((rows, width),),) = {frozenset(shapes) for _, _, shapes, _ in answers}  # a stage has buffers of one shape
    positions = len(held) * width
    assert rows == 1 and [counted for *_, counted in answers] == [(REAL, positions - REAL), (0, 0)]


def counted(ranks):
    made = jobs_arm(ranks, multi_adapter())
    return made.real, made.padded


def test_what_is_filled_up_for_another_job_is_counted_on_one_rank(tmp_path):
    """Three micro-batches of 2 x 48 positions hold 128 tokens."""
    assert on_ranks(2, tmp_path, counted) == [(128, 3 * 2 * 48 - 128), (0, 0)]


def begun_in_a_trial(ranks):
    made, begun = jobs_arm(ranks, multi_adapter(), MIXING, overrides=(UNEQUAL,)), []
    kind("train").trial(made, begun.append)
    return begun[1:]  # behind the mark of the trial's first forward, in which the schedule runs


def test_a_job_s_step_comes_behind_the_last_backward_that_holds_it(tmp_path):
    """In the last stage: the first job's behind micro-batch 0, the others' behind the last one."""
    _, last = on_ranks(2, tmp_path, begun_in_a_trial)
    assert last[:9] == ["forward", "backward", "step", *["forward", "backward"] * 2, "step", "step"]


@pytest.mark.parametrize(
    ("kernels", "beside"),
    [
        (True, ()),
        (False, ()),
        pytest.param(True, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(False, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
    ],
)
def test_steps_in_a_row_train_jobs_that_share_micro_batches_as_alone(tmp_path, kernels, beside):
    answers = on_ranks(2, tmp_path, shared_trained, multi_adapter(kernels=kernels), MIXING, *beside)
    trains_as_alone(answers, trained(ONE, "padding", overrides=(UNEQUAL,)))


def shared_trained(ranks, *toggles):
    return trained(ranks, *toggles, overrides=(UNEQUAL,))


def differently_scheduled(ranks):
    """As if the second rank's programme had run into its time limit."""
    if ranks.rank:
        Scheduling.schedule = lambda self, lengths, padded, capacity: [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    made = jobs_arm(ranks, toggle := multi_adapter(kernels=True), {"lorafusion": {"tokens": 64}}, layers=2)
    ran = made.model._lorabench_jobs.report.forwards
    one_step(made, made.steps[0])
    notes = registry.ablation(toggle).notes(Evidence(made, None, Counter()))["pipeline_multi_adapter"]
    return made.turns[0].innermost.places, notes, dict(ran.left)


def test_every_rank_has_the_first_one_s_schedule_and_says_it(tmp_path):
    for places, notes, left in on_ranks(2, tmp_path, differently_scheduled):
        assert places == [[0, 1], [0, 1]] and not left
        assert notes["jobs_of_each_micro_batch"] == [2, 2] and notes["micro_batches"] == 2
        assert notes["empty_micro_batches_of_an_endless_run"] == 1  # each job is in the last one and in the first one
        assert "micro_batches_by_halving" not in notes


@pytest.mark.parametrize(
    ("together", "count", "wanted"),
    [
        ([[(0, 0), (0, 1), (1, 0)], [(1, 1)]], 2, [[(0, 0), (0, 1), (1, 0)], [(1, 1)]]),
        ([[(0, 0), (0, 1), (1, 0)], [], [(1, 1)]], 3, [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]),
        ([[(0, 0), (1, 0)], [(0, 1), (1, 1)]], 3, [[(0, 0)], [(1, 0)], [(0, 1), (1, 1)]]),
        ([[(0, 0)]], 2, [[(0, 0)]]),  # a sample is not cut
    ],
)
def test_micro_batches_are_halved_until_there_is_one_a_rank(together, count, wanted):
    assert halved(together, [[50, 20], [30, 10]], count) == wanted


def spoilt_together(ranks, folder, kernels, where):
    """Writes what ends a trial in which the first job's adapter or its gradient is NaN, and whether any adapter has
    been trained; both ranks raise, because the first one's pipe breaks."""
    made = jobs_arm(ranks, multi_adapter(kernels=kernels), MIXING, overrides=(UNEQUAL,))
    with torch.no_grad():
        for _, p in made.adapters(made.steps[0]):
            p.fill_(float("nan")) if where == "adapter" else p.register_hook(lambda grad: grad * float("nan"))
    before = [{name: p.detach().clone() for name, p in made.adapters(step)} for step in made.steps[1:]]
    try:
        run_trial(made)
    except Exception as error:
        after = [dict(made.adapters(step)) for step in made.steps[1:]]  # of this rank's stage
        same = all(own and all(own[n].equal(was[n]) for n in own) for own, was in zip(after, before, strict=True))
        (folder / str(ranks.rank)).write_text(json.dumps([type(error).__name__, str(error), same]))
        raise


@pytest.mark.parametrize(
    ("kernels", "where", "what"),
    [
        (True, "adapter", "the loss of few"),
        (False, "adapter", "the loss of few"),
        pytest.param(True, "gradient", "a gradient of few is not finite", marks=pytest.mark.exhaustive),
    ],
)
def test_a_nan_in_a_shared_micro_batch_ends_the_step_before_anything_is_trained_on_it(tmp_path, kernels, where, what):
    with pytest.raises(AssertionError, match="rank 0"):
        on_ranks(2, tmp_path, spoilt_together, tmp_path, kernels, where)
    (_, _, first), (name, said, last) = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first and last and name == "FloatingPointError"
    assert said.startswith(what) and "\n" not in said


@pytest.mark.parametrize(
    ("settings", "rule", "why"),
    [
        ({"flush": True}, "lorafusion", "flush=true empties the pipeline behind each job"),
        ({"tokens": 64}, "fifo", "tokens= of the pipeline and a scheduler both say which samples go together"),
        ({}, {"fast_fit": {"tokens": "auto"}}, "every rank would find a size of its own"),
    ],
    ids=str,
)
def test_what_goes_beside_the_pipeline_and_not_beside_a_scheduler(settings, rule, why):
    both = [registry.ablation(multi_adapter(**settings)), registry.ablation(rule)]
    said = conflict(both) or ""
    assert why in said and "\n" not in said
    assert conflict([registry.ablation(multi_adapter(kernels=True)), registry.ablation(MIXING)]) is None


def refused_shared(ranks, rule):
    try:
        jobs_arm(ranks, multi_adapter(), rule, overrides=(UNEQUAL,))
    except Unsupported as error:
        return str(error)


def test_a_sample_that_fits_no_micro_batch_is_one_line_on_every_rank(tmp_path):
    for said in on_ranks(2, tmp_path, refused_shared, {"lorafusion": {"tokens": 20}}):
        assert said.startswith("lorafusion: ") and "holds at most 20" in said and "\n" not in said


# -- layers that a rank never has ------------------------------------------------------------------------------------

LAYERS = 8
HALF, MARGIN = LAYERS // 2, pipeline_stages.MARGIN  # the head of this model is less than half of a layer


def deep(*names, ranks=ONE, base=None, overrides=()):
    """An arm of the whole model: no gate's shallow one."""
    made = request(
        *PEFT[:2], *names, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, ranks=ranks, overrides=overrides
    )
    return kind("train").build(replace(made, base=base))


def layers_of(model):
    """The decoder layers of which a model has frozen weights."""
    found = (re.search(r"\.layers\.(\d+)\.", n) for n, p in model.named_parameters() if "lora_" not in n and p.numel())
    return sorted({int(one[1]) for one in found if one})


def watched():
    """A list that gets, of each base model whose weights are drawn, its layers and its parameters, these weakly."""
    drawn, fill = [], build.fill_weights

    def filling(model, dtype, seed, adapter=None):
        if adapter is None:
            drawn.append((layers_of(model), [weakref.ref(p) for p in model.parameters()]))
        fill(model, dtype, seed, adapter)

    build.fill_weights = filling
    return drawn


def held(ranks, toggle, *beside):
    """(layers that are drawn, layers when the arm is built, those after a step, bytes that outlive the cut unused)"""
    drawn = watched()
    jobs = "pipeline_multi_adapter" in toggle
    made = jobs_arm(ranks, toggle, layers=None) if jobs else deep(toggle, *beside, ranks=ranks)
    built = layers_of(made.model)
    for step in made.steps:
        one_step(made, step)
    gc.collect()
    ((first, parameters),) = drawn
    mine = {id(p) for p in made.model.parameters()}
    left = [p for one in parameters if (p := one()) is not None and id(p) not in mine]
    return first, built, layers_of(made.model), sum(p.nbytes for p in left)


MARGINS = [[*range(HALF + MARGIN)], [*range(HALF - MARGIN, LAYERS)]]


@pytest.mark.parametrize(
    ("toggles", "wanted"),
    [
        (("pipeline_1f1b",), MARGINS),
        (("pipeline_1f1b", "lora_kernels"), MARGINS),
        (({"pipeline_gpipe": {"layers": [HALF, HALF]}},), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (({"pipeline_interleaved": {"layers": [1, 3, 2, 2]}},), [[0, 4, 5], [1, 2, 3, 6, 7]]),
        ((multi_adapter(flush=True),), MARGINS),
        ((multi_adapter(kernels=True),), MARGINS),
    ],
)
def test_a_rank_has_its_own_layers_and_a_margin_from_the_start(tmp_path, toggles, wanted):
    answers = on_ranks(2, tmp_path, held, *toggles)
    assert [first for first, *_ in answers] == wanted
    for first, built, after, left in answers:
        assert set(after) <= set(built) <= set(first) and left == 0
        assert built == (first if "pipeline_multi_adapter" in toggles[0] else after)  # whose batches come with the step
    assert sorted(n for *_, after, _ in answers for n in after) == [*range(LAYERS)]


def stepped_beyond_the_margin(ranks, toggles):
    """As if the head took as long as 50 layers, which no number of parameters says."""
    pipeline_stages._ms = lambda parts, inputs, layers: 50.0 + len(layers)
    return stepped(ranks, toggles, None)


@pytest.mark.parametrize(
    ("toggles", "split"),
    [
        (("pipeline_1f1b", "lora_kernels"), [HALF + MARGIN, HALF - MARGIN]),
        (({"pipeline_interleaved": {"layers": [1, 3, 2, 2]}},), [1, 3, 2, 2]),
    ],
)
def test_no_stage_has_a_layer_that_its_rank_has_not(tmp_path, toggles, split):
    answers = on_ranks(2, tmp_path, stepped_beyond_the_margin, toggles)
    compare(answers, plain(None))
    assert all(answer[-1] == split for answer in answers)


def shared(ranks, folder, first):
    """Of two pipelines behind a `first` arm over one Base: whether the arms' frozen weights all lie in it, how many
    models were drawn, the Base's layers, whether the second's loss is the first's and the weights are as they were."""
    base, drawn = Base(folder), watched()
    names = [*first, "pipeline_1f1b", {"pipeline_gpipe": {"tokens": 32}}]
    arms = [deep(name, ranks=ranks, base=base) for name in names]
    before, arms = base.checksum(), arms[-2:]
    frozen = [{n: p for n, p in arm.model.named_parameters() if not p.requires_grad} for arm in arms]
    places = [{n: p.data_ptr() for n, p in own.items()} for own in frozen]
    common = places[0].keys() & places[1].keys()
    inside = all(base.bytes_of(arm.model) == arm.parameter_bytes()["weights"] for arm in arms)
    same = inside and bool(common) and all(places[0][n] == places[1][n] for n in common)
    losses = [one_step(arm).loss for arm in arms]
    kept = {int(n.split(".")[2]) for n in base.weights if ".layers." in n}
    return same, len(drawn), sorted(kept), losses, base.checksum() == before


@pytest.mark.parametrize("first", [(), ("padding",)], ids=str)
def test_pipelines_of_one_process_share_the_layers_that_they_keep(tmp_path, first):
    answers = on_ranks(2, tmp_path, shared, tmp_path, first)
    for (same, drawn, kept, losses, unchanged), own in zip(answers, MARGINS, strict=True):
        assert same and drawn == 1 and unchanged
        assert kept == ([*range(LAYERS)] if first else own)  # an arm of the whole model lends what a stage needs
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def read(ranks, folder, name):
    """The outcome of a step, and how often a rank has read a whole model."""
    whole, reading = [], build._read
    build._read = lambda *rest: whole.append(rest) or reading(*rest)
    made = deep(name, ranks=ranks, overrides=(f"weights={folder}",))
    outcome = one_step(made)
    gradients = {name: x.numpy() for name, x in outcome.gradients.items()}
    return outcome.loss, gradients, outcome.update_error, len(whole)


def real(folder):
    """A model with weights of its own, in several files of a folder."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_config(model(DEEP, load_config([])).hf_config(), dtype=torch.float32)
    saved.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("name", ["pipeline_1f1b", "fsdp2"])
def test_of_weights_in_a_folder_each_rank_reads_its_part(tmp_path, name):
    folder = real(tmp_path / "real")
    answers = on_ranks(2, tmp_path, read, folder, name)
    compare(answers, one_step(deep("padding", overrides=(f"weights={folder}",))))
    assert [answer[-1] for answer in answers] == [0, 0]


def whole_read(ranks, folder):
    def reading(*rest):
        raise LookupError("read whole")

    build._read = reading
    try:
        deep("pipeline_1f1b", ranks=ranks, overrides=(f"weights={folder}",))
    except LookupError as error:
        return error.args[0]


def test_weights_by_other_names_come_whole_and_are_cut_then(tmp_path):
    folder = real(tmp_path / "real")
    names = folder / "model.safetensors.index.json"
    file = folder / json.loads(names.read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(file)
    save_file({"norm.weight": tensors.pop("model.norm.weight")} | tensors, file, {"format": "pt"})
    names.write_text(names.read_text().replace("model.norm.weight", "norm.weight"))
    assert parted_weights.files_of(model(DEEP, load_config([f"weights={folder}"])))["norm.weight"].is_file()
    assert on_ranks(2, tmp_path, whole_read, folder) == ["read whole"] * 2


def test_other_libraries_patches_find_every_layer():
    """They walk over the layers of the model, and expect attention and MLP in each."""
    alone, beside = request("pipeline_1f1b"), request("pipeline_1f1b", "liger")
    assert [a.name for a in build._dividing(alone)] == ["pipeline_1f1b"] and build._dividing(beside) == []
