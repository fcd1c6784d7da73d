"""`pipeline_multi_adapter`: jobs in one pipeline, each what it is alone; and micro-batches that several jobs share."""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter

import pytest
import torch
from attend import varlen_attn
from peft import PeftModel
from several_jobs import UNEQUAL, jobs_arm, multi_adapter
from several_ranks import compare, on_ranks

from lorabench.contract.ablation import Evidence, Unsupported, conflict
from lorabench.contract.ranks import ONE
from lorabench.measure.judging.numerics import clear, one_step
from lorabench.measure.kind import kind
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations import segments
from lorabench_ablations.joint_batches import halved
from lorabench_ablations.pipeline_stages import MARGIN
from lorabench_ablations.pipeline_step import save_adapter
from lorabench_ablations.scheduler import Scheduling

# -- several jobs -----------------------------------------------------------------------------------------------------


@functools.cache
def jobs_alone(*overrides, base=()):
    made = jobs_arm(ONE, "padding", *base, overrides=overrides)
    return {step.name: one_step(made, step) for step in made.steps}


def jobs_stepped(ranks, *toggles):
    return stepped(ranks, jobs_arm(ranks, *toggles))


def stepped(ranks, made):
    """What the gate asks, job by job; then a trial, in which each job's update comes within the schedule."""
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
        (True, False, ()),
        # In make test kernels are in the tests of steps in a row, and with checkpointing where jobs share.
        pytest.param(False, True, (), marks=pytest.mark.exhaustive),
        pytest.param(False, False, (), marks=pytest.mark.exhaustive),
        pytest.param(True, True, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(False, True, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(True, True, (), marks=pytest.mark.exhaustive),
        pytest.param(False, True, ("save_on_cpu",), marks=pytest.mark.exhaustive),
        pytest.param(False, False, ("nf4_base",), marks=pytest.mark.exhaustive),
        pytest.param(False, True, ("nf4_base",), marks=pytest.mark.exhaustive),
    ],
)
def test_several_jobs_in_one_pipeline_are_each_what_it_is_alone(tmp_path, flush, kernels, beside):
    wanted = jobs_alone(base=tuple(name for name in beside if name == "nf4_base"))  # other weights
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


def jobs_saved(ranks, toggle, folder):
    """PEFT's save by all ranks of each job's adapter, which has taken a step; the loss of each job's next forward."""
    made = jobs_arm(ranks, toggle)
    for step in made.steps:
        one_step(made, step)
        save_adapter(made.model, folder / step.name, adapter=step.name)
    return {step.name: one_step(made, step).loss for step in made.steps}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "toggle"), [(2, multi_adapter()), (4, multi_adapter(ranks=2))], ids=str)
def test_what_peft_saves_of_each_job_has_the_same_loss_in_plain_peft(tmp_path, ranks, toggle):
    losses = on_ranks(ranks, tmp_path, jobs_saved, toggle, tmp_path)
    made, before = jobs_arm(ONE, "padding"), jobs_alone()
    for step in made.steps:
        base = made.model.unload()
        made.model = step.model = step.call = PeftModel.from_pretrained(base, tmp_path / step.name, step.name)
        with torch.no_grad():
            loss = sum(float(step.forward(batch)) for batch in step.batches)
        assert [own[step.name] for own in losses] == pytest.approx([loss] * ranks, rel=1e-6)
        assert abs(loss - before[step.name].loss) > 1e-4


@pytest.fixture
def in_segments(monkeypatch):
    """torch's varlen attention on a CPU, which only takes segments that somebody has handed down to it: else each layer
    would wait for the device to find them out."""
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    monkeypatch.setattr("lorabench_ablations.segments.segments", handed_down(segments.segments))


def handed_down(find):
    """`segments`, which says no where it is asked from within a layer."""

    def found(*args):
        assert not any(frame.function == "attention" for frame in inspect.stack()[:4]), "found out within a layer"
        return find(*args)

    return found


@pytest.mark.parametrize(
    "toggles",
    [
        pytest.param((multi_adapter(tokens=64, kernels=True), "gradient_checkpointing"), marks=pytest.mark.exhaustive),
        (multi_adapter(), {"lorafusion": {"tokens": 150}}),
        pytest.param((multi_adapter(),), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_attention_goes_by_segments_in_every_stage(tmp_path, toggles, in_segments):
    """Of packed rows a mask would be computed with for all pairs of positions: in the 32B's rows of 7116 tokens about a
    fifth of a step (2026-11-26). Micro-batches have unlike numbers of segments, and of several jobs."""
    wanted = jobs_alone()
    for found, *_ in on_ranks(2, tmp_path, jobs_stepped, *toggles, "varlen"):
        for job, outcome in found.items():
            compare([outcome], wanted[job])


@functools.cache
def trained_alone(*overrides, trials=3):
    return trained(ONE, "padding", overrides=overrides, trials=trials)


def trained(ranks, *toggles, overrides=(), trials=3):
    """(each job's losses in so many trials, its adapter behind them)"""
    made = jobs_arm(ranks, *toggles, overrides=overrides)
    losses = [list(run_trial(made, number=number).losses.values()) for number in range(trials)]
    losses = [[ranks.total(loss) for loss in own] for own in losses]
    return losses, [{n: p.detach().numpy().copy() for n, p in made.adapters(step)} for step in made.steps]


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({"kernels": True, "tokens": 64}, ()),
        pytest.param({"kernels": True}, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param({"kernels": True, "flush": True}, (), marks=pytest.mark.exhaustive),
        pytest.param({"kernels": True}, (), marks=pytest.mark.exhaustive),
        pytest.param({}, (), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_steps_in_a_row_train_each_job_as_alone(tmp_path, settings, beside):
    """A job's update comes between the forwards and the backwards of the other jobs' micro-batches."""
    trains_as_alone(on_ranks(2, tmp_path, trained, multi_adapter(**settings), *beside), trained_alone())


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
    # Which layers a rank has would follow from measured times, and two runs are compared.
    made = jobs_arm(ranks, multi_adapter(layers=[2, 1], **settings))
    with torch.no_grad():
        for _, p in made.adapters(made.steps[0]) if spoil else ():
            p.fill_(float("nan"))
    losses = list(run_trial(made).losses.values())
    return losses, {name: p.grad.numpy().copy() for name, p in made.adapters(made.steps[1])}


@pytest.mark.parametrize("settings", [{"kernels": True}, pytest.param({}, marks=pytest.mark.exhaustive)], ids=str)
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
        assert notes["changed"]["mlp"] == 8 // 2 + MARGIN and notes["left"] == []
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


def refused(ranks, toggles, override):
    try:
        jobs_arm(ranks, *toggles, overrides=(override,))
    except Unsupported as error:
        return str(error)


def test_an_adapter_that_the_kernels_do_not_know_is_one_line(tmp_path):
    said = "an adapter is a variant of LoRA (DoRA, say); expected plain LoRA on a linear, so that each row"
    for reason in on_ranks(2, tmp_path, refused, [multi_adapter(kernels=True)], "lora.use_dora=true"):
        assert reason.startswith("pipeline_multi_adapter: ") and said in reason


# -- micro-batches of several jobs -------------------------------------------------------------------------------------

MIXING = {"lorafusion": {"tokens": 150}}
HELD = [[0, 1], [2], [1, 2]]  # the jobs of each of its micro-batches
REAL = 48 + 173 + 160  # tokens of each job


def shared_stepped(ranks, *toggles):
    """`stepped`, the jobs of each micro-batch, the shapes of them all, and (real, padding) as this rank counts."""
    made = jobs_arm(ranks, *toggles, overrides=(UNEQUAL,))
    held = [[part.job for part in batch.inputs["parts"]] for batch in made.micro_batches]
    shapes = {tuple(batch.inputs["input_ids"].shape) for batch in made.micro_batches}
    return stepped(ranks, made), held, shapes, (made.real, made.padded)


@pytest.mark.parametrize(
    ("kernels", "rule", "held", "beside"),
    [
        (False, MIXING, HELD, ()),
        (True, MIXING, HELD, ("gradient_checkpointing",)),
        pytest.param(  # one, of which two ranks make two, as they do in test_every_rank_has_the_first_one_s_schedule…
            False,
            {"lorafusion": {"tokens": 1000}},
            [[1, 2], [0, 1]],
            (),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(True, MIXING, HELD, (), marks=pytest.mark.exhaustive),
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
    wanted = jobs_alone(UNEQUAL)
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
    [  # in make test over two pipelines, which train in the same way: see below
        pytest.param(True, (), marks=pytest.mark.exhaustive),
        pytest.param(False, (), marks=pytest.mark.exhaustive),
        pytest.param(True, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
        pytest.param(False, ("gradient_checkpointing",), marks=pytest.mark.exhaustive),
    ],
)
def test_steps_in_a_row_train_jobs_that_share_micro_batches_as_alone(tmp_path, kernels, beside):
    answers = on_ranks(2, tmp_path, shared_trained, multi_adapter(kernels=kernels), MIXING, *beside)
    trains_as_alone(answers, trained_alone(UNEQUAL))


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
        pytest.param(False, "adapter", "the loss of few", marks=pytest.mark.exhaustive),
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
        ({"tokens": 64}, "fifo", "tokens= and a scheduler both say which samples go together"),
        ({}, {"fast_fit": {"tokens": "auto"}}, "every rank would find a size of its own"),
    ],
    ids=str,
)
def test_what_goes_beside_the_pipeline_and_not_beside_a_scheduler(settings, rule, why):
    both = [registry.ablation(multi_adapter(**settings)), registry.ablation(rule)]
    said = conflict(both) or ""
    assert why in said and "\n" not in said
    assert conflict([registry.ablation(multi_adapter(kernels=True)), registry.ablation(MIXING)]) is None


def test_a_sample_that_fits_no_micro_batch_is_one_line_on_every_rank(tmp_path):
    for said in on_ranks(2, tmp_path, refused, [multi_adapter(), {"lorafusion": {"tokens": 20}}], UNEQUAL):
        assert said.startswith("lorafusion: ") and "holds at most 20" in said and "\n" not in said


# -- several pipelines -------------------------------------------------------------------------------------------------

EIGHT = UNEQUAL.replace("samples: 4, batch_size: 2", "samples: 8, batch_size: 2").replace("samples: 2,", "samples: 4,")
SHARED = {"lorafusion": {"tokens": 150}}
OVER_TWO = [  # toggles, and by pipeline the jobs of each micro-batch
    ([multi_adapter(ranks=2)], [[[0], [1], [1], [2], [2]]] * 2),
    ([multi_adapter(ranks=2, flush=True)], [[[0], [0], [1], [1], [2], [2]]] * 2),
    ([multi_adapter(ranks=2, tokens=110)], [[[0], [1], [1], [1], [2], [2]], [[0], [1], [1], [2], [2]]]),
    # of its own samples alone either pipeline would have another order
    ([multi_adapter(ranks=2, kernels=True), SHARED], [[[1], [0, 1], [2], [2]]] * 2),
]


STEPS = 3


def over_two_pipelines(ranks, which):
    """Of these of OVER_TWO: what the gate asks and a trial has, the jobs of each micro-batch, the bytes of what is
    trained here, the real tokens that are counted, and the losses of STEPS steps with the adapters behind them."""
    found = []
    for toggles, _ in which:
        made = jobs_arm(ranks, *toggles, overrides=(EIGHT,))
        held = [[part.job for part in batch.inputs["parts"]] for batch in made.micro_batches]
        if SHARED in toggles:
            assert all(batch.inputs["input_ids"].numel() <= 150 for batch in made.micro_batches)
        gate = stepped(ranks, made)
        nbytes = sum(p.nbytes for step in made.steps for _, p in made.adapters(step))
        learnt = trained(ranks, *toggles, overrides=(EIGHT,), trials=STEPS)
        found.append((gate, held, nbytes, made.real, learnt))
    return found


@pytest.mark.parametrize(
    "which",
    # What flush and tokens divide among two pipelines they divide in one, too; the scheduler alone sees both.
    [OVER_TWO[3:], pytest.param(OVER_TWO, marks=pytest.mark.exhaustive)],
    ids=["scheduled", "all"],
)
def test_each_job_over_two_pipelines_is_what_it_is_alone_and_the_replicas_stay_bitwise_equal(tmp_path, which):
    wanted, alone = jobs_alone(EIGHT), trained_alone(EIGHT, trials=STEPS)
    everything = on_ranks(4, tmp_path, over_two_pipelines, which)
    for number, (_, jobs) in enumerate(which):
        answers = [own[number] for own in everything]
        assert [held for _, held, *_ in answers] == [own for own in jobs for _ in range(2)]
        for (found, begun, losses, said), held, nbytes, _, _ in answers:
            assert found.keys() == wanted.keys()
            for job, outcome in found.items():
                compare([outcome], wanted[job], rtol=1e-3, atol=1e-6)
            assert begun.count("step") == 3 + 1 and len(losses) == 3
            assert said["micro_batches"] == len(held)
            assert nbytes in said["added_up_bytes_by_rank"]  # a ring of two sends each gradient once
        assert [real for *_, real, _ in answers] == [48 + 218 + 160, 0, 48 + 167 + 155, 0]
        learnt = [own for *_, own in answers]
        trains_as_alone(learnt, alone)
        for (_, first), (_, second) in zip(learnt[:2], learnt[2:], strict=True):
            for own, other in zip(first, second, strict=True):
                assert own.keys() == other.keys() and own
                assert all((x == other[name]).all() for name, x in own.items())


def refused_over_two(ranks):
    """Each has to come on every rank: one that goes on would wait for the others."""
    some = UNEQUAL.replace("samples: 2,", "samples: 1,")
    return [
        refused(ranks, [multi_adapter(ranks=2)], some),
        refused(ranks, [multi_adapter(ranks=2, flush=True)], UNEQUAL),
        refused(ranks, [multi_adapter(ranks=2, tokens=80)], EIGHT),  # the sample of 99 is in the first pipeline
        refused(ranks, [multi_adapter(ranks=2), {"lorafusion": {"tokens": 80}}], EIGHT),
    ]


def test_what_two_pipelines_cannot_do_is_one_line_on_every_rank_of_both(tmp_path):
    answers = on_ranks(4, tmp_path, refused_over_two)
    assert answers[1:] == answers[:1] * 3
    uneven, flushed, long, scheduled = answers[0]
    assert uneven == "pipeline_multi_adapter divides 1 samples among 2 groups of 2 ranks: give a multiple of 2"
    assert flushed == "pipeline_multi_adapter needs at least 2 micro-batches on 2 ranks; a step has 1"
    assert long == "pipeline_multi_adapter: a sample of 99 tokens does not fit a row of 80"
    assert scheduled.startswith("lorafusion: ") and "holds at most 80" in scheduled and "\n" not in scheduled
