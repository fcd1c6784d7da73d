"""Several jobs in one pass: each has the loss and the gradients that it has alone, whatever it is batched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import InProcess, cells, config, gate_of, only, random_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from several_jobs import CPU, LAYERS, ONE_LENGTH, UNEQUAL, alone, audited, build, outcomes, plain, request, same

from lorabench.contract.ablation import NotApplied, Unsupported, conflict
from lorabench.contract.batch import IGNORE, pad
from lorabench.contract.kind import kind
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.measure.seat import WrongNumerics
from lorabench.measure.trial import run_trial
from lorabench.plan.compose import plan
from lorabench.plan.registry import ablation
from lorabench.run.runner import Runner
from lorabench_ablations import joint_linears
from lorabench_ablations.joint_batches import evenly, shared_out

LINEARS = "{fused_multi_lora:{form:linears}}"
TOGETHER = ["batched", "batched_packed", "fused_multi_lora"]
WAYS = [*TOGETHER, LINEARS]
# Where rows are packed, SDPA multiplies what its mask leaves out by zero, which NaN survives: there only side by side.
NAN_SAFE = [("batched", 0), ("batched", 1), ("batched_packed", 1), (LINEARS, 1)]
NAN_SAFE += [("fused_multi_lora", 0), ("fused_multi_lora", 1)]  # in slots the job's rows become the frozen model's


MORE = ["gradient_checkpointing", "group_by_length", "save_on_cpu"]
BESIDE = [(name, ()) for name in WAYS] + [("fused_multi_lora", ("gradient_checkpointing",))]
BESIDE += [
    pytest.param(name, (other,), marks=pytest.mark.exhaustive)
    for name in WAYS
    for other in MORE
    if (name, other) != ("fused_multi_lora", "gradient_checkpointing")
]


@pytest.mark.parametrize(("name", "others"), BESIDE, ids=str)
def test_every_job_is_as_it_is_alone(name, others):
    wanted = request(name, *others)
    same(outcomes(wanted), alone(wanted))


@pytest.mark.parametrize(
    ("name", "workload"), [("batched", UNEQUAL), ("batched", ONE_LENGTH), ("batched_packed", ONE_LENGTH)]
)
def test_every_job_is_as_it_is_alone_under_one_dropout_mask(name, workload):
    wanted = request(name, workload=workload, dropout=0.3)
    same(outcomes(wanted), alone(wanted))


@pytest.mark.parametrize(
    "name",  # of both that add adapters linear by linear one, and of both forms of our kernels one
    [pytest.param(name, marks=[] if name in TOGETHER[1:] else [pytest.mark.exhaustive]) for name in WAYS],
)
def test_the_trial_that_is_timed_steps_every_job_as_alone(name):
    wanted = request(name)
    arm, others = build(wanted), [build(plain(only(wanted, i))) for i in range(3)]
    for number in range(3):
        together = run_trial(arm, number=number)
        losses = [run_trial(other, number=number).loss for other in others]
        assert list(together.losses.values()) == pytest.approx(losses, rel=1e-4)
    assert set(together.device_ms) == {"forward", "backward", "step"}
    for step, other in zip(arm.steps, others, strict=True):
        after = dict(other.adapters())
        for name, parameter in arm.adapters(step):
            torch.testing.assert_close(parameter, after[name], rtol=1e-3, atol=2e-5)
    assert [s.optimizer.param_groups[0]["lr"] for s in arm.steps] == [3e-4, 1e-4, 1e-4]


@pytest.mark.parametrize("name", WAYS)
def test_an_adapter_without_rows_has_no_gradient_at_all(name):
    """Zeros would do harm: Adam moves what has a gradient of zero."""
    arm = build(request(name))
    (turn,) = arm.turns
    assert turn.innermost.count == 2 and [len(s.batches) for s in arm.steps] == [1, 2, 2]
    losses = turn.forward(turn.innermost.micro_batch(1))
    turn.backward(losses)
    few, many, thin = ([p.grad for _, p in arm.adapters(step)] for step in arm.steps)
    assert losses[0] == 0 and all(g is None for g in few)
    assert all(g is not None and g.abs().sum() > 0 for g in (*many, *thin))


def nan_in_the_second(wanted, where):
    """(losses, what is left of each job) of one trial, with the second job's adapter spoilt and as it was."""
    found = []
    for spoilt in (True, False):
        arm = build(wanted)
        if spoilt:
            with torch.no_grad():
                for n, p in arm.adapters(arm.steps[1]):
                    if where in n:
                        p.fill_(float("nan"))
        losses = run_trial(arm).losses
        left = {s.name: [(p.detach().clone(), p.grad.clone()) for _, p in arm.adapters(s)] for s in arm.steps}
        found.append((losses, left, arm.steps[1].name))
    return found


def only_the_second(found):
    (losses, left, second), (wanted, usual, _) = found
    assert losses[second] != losses[second] and len(wanted) > 1
    for job in wanted.keys() - {second}:
        assert losses[job] == wanted[job]
        assert all(
            torch.equal(a, b) for mine in zip(left[job], usual[job], strict=True) for a, b in zip(*mine, strict=True)
        )


@pytest.mark.parametrize(
    ("name", "one_length", "where"),
    [
        *((*way, "lora_B") for way in NAN_SAFE),
        # Behind either matrix the job's addend is NaN; whose rows it is added to does not depend on which it was.
        *(
            pytest.param(*way, "lora_A", marks=[] if way == ("fused_multi_lora", 1) else [pytest.mark.exhaustive])
            for way in NAN_SAFE
        ),
    ],
)
def test_a_job_that_is_nan_leaves_the_others_bitwise_alone(name, one_length, where):
    only_the_second(nan_in_the_second(request(name, workload=ONE_LENGTH if one_length else UNEQUAL), where))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["batched_packed", "fused_multi_lora"])
def test_a_nan_in_a_packed_row_stays_in_its_segment(name):
    """Atomic adds: the last bits of a gradient differ from run to run, so of our kernels only the losses are equal."""
    wanted = replace(request(name, "varlen", "adapters_in_compute_dtype"), dtype=torch.bfloat16)
    found = nan_in_the_second(replace(wanted, device=torch.device("cuda")), "lora_B")
    (losses, left, second), (usual, *_) = found
    assert losses[second] != losses[second]
    for job in usual.keys() - {second}:
        assert losses[job] == usual[job] and all(g.isfinite().all() for _, g in left[job])


@pytest.mark.parametrize("name", WAYS)
def test_no_token_sees_another_job_s_or_sample_s(name):
    arm = build(request(name))
    (turn,) = arm.turns

    def losses():
        return turn.forward(turn.innermost.micro_batch(0)).detach()

    before = losses()
    for step, others in ((0, [1, 2]), (1, [0, 2]), (2, [0, 1])):
        ids = arm.steps[step].batches[0].inputs["input_ids"]
        kept = ids.clone()
        ids.copy_((kept + 1) % 250)
        after = losses()
        assert after[step] != before[step] and torch.equal(after[others], before[others])
        ids.copy_(kept)


def test_packed_rows_have_no_padding_and_lengths_that_are_equal_lie_side_by_side():
    arm = build(request("batched_packed"))
    assert arm.padded == 0 and all(b.inputs["input_ids"].shape[0] == 1 for b in arm.micro_batches)
    arm = build(request("batched_packed", workload=ONE_LENGTH))
    (batch,) = arm.micro_batches
    assert batch.inputs["input_ids"].shape == (3, 16) and "position_ids" not in batch.inputs
    assert batch.real == 48 and batch.trained == 45


def test_padding_is_counted_for_the_job_whose_rows_are_padded():
    arm = build(request("batched"))
    for batch in arm.micro_batches:
        assert batch.real + batch.padded == batch.inputs["input_ids"].numel()
        assert int(batch.inputs["attention_mask"].sum()) == batch.real
        assert int((batch.inputs["labels"][:, 1:] != IGNORE).sum()) == batch.trained
    counts = kind("train").counts(arm)
    assert sum(c.padded for c in counts.values()) == arm.padded > build(request("sequential")).padded


def test_sequential_is_plain_peft():
    wanted = request("sequential")
    for one, other in zip(outcomes(wanted), alone(wanted), strict=True):
        assert one.loss == other.loss
        assert all(torch.equal(g, other.gradients[n]) for n, g in one.gradients.items())


def test_what_the_audit_says():
    assert audited("sequential", request("sequential"))[0] == 3
    sites, notes = audited("batched", request("batched"))
    assert sites == LAYERS * 7 and len(notes["joint_batches"]) == 2


@pytest.mark.parametrize("name", TOGETHER)
def test_a_workload_without_jobs_is_refused(name):
    with pytest.raises(Unsupported, match="workload has no jobs of its own; expected one with `jobs`"):
        build(request(name, workload="workload=2x16"))


def test_sequential_without_jobs_does_nothing():
    with pytest.raises(NotApplied, match="no jobs of its own"):
        audited("sequential", request("sequential", workload="workload=2x16"))


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        ("batched", "sequential", "both fill the slot jobs"),
        ("batched", "lora_kernels", "one adapter at a time"),
        ("batched_packed", "lora_mlp_kernel", "one adapter at a time"),
        ("batched", "auto_batch_size", "one job alone"),
        ("batched", "fused_linear_cross_entropy", "one loss for all rows"),
        ("batched", "ddp", "one job"),
    ],
)
def test_what_cannot_be_combined_is_said_in_one_line(name, other, says):
    assert says in (conflict([ablation(name), ablation(other)]) or "")


def test_packed_rows_cannot_be_padded():
    with pytest.raises(Unsupported, match="take batched_packed"):
        build(request("batched", "packing"))


@pytest.mark.parametrize("lora", ["use_dora=true", "bias=lora_only"])
def test_other_adapters_are_refused(lora):
    with pytest.raises(Exception, match=r"variant of LoRA|bias"):
        made = plan(config("models=[tiny-llama]", f"lora.{lora}", UNEQUAL, "ablations=[batched]"), "cpu").cells
        build(request_of(made[-1], "candidate", torch.float32, CPU))


def test_the_gate_catches_a_pass_that_gives_rows_another_job_s_adapter(monkeypatch, tmp_path):
    added = joint_linears._added

    def swapped(linear, part, x):
        other = {"few": "thin", "thin": "few"}.get(part.adapter, part.adapter)
        return added(linear, part._replace(adapter=other), x)

    monkeypatch.setattr(joint_linears, "_added", swapped)
    cell = cells(UNEQUAL, "dtype=float32", "ablations=[batched]")[-1]
    with pytest.raises(WrongNumerics, match="job few"):
        gate_of(cell, tmp_path)


@pytest.mark.exhaustive
def test_a_sweep_has_them_in_one_table(tmp_path):
    chosen = cells("workload=two_jobs", "dtype=float32", f"ablations=[{','.join(WAYS)}]")
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        records = [runner.measure(c) for c in chosen]
    assert {(r.status, r.reason) for r in records} == {("ok", None)}
    for record in records[1:]:
        assert all(job.numerics.passed and job.numerics.tensors == 28 for job in record.jobs["candidate"].values())
        assert record.real_tokens == 128


GROUPS = [{"tokens": 150}, {"at_a_time": 2}, {"at_a_time": 1, "tokens": 170}]


@pytest.mark.parametrize(
    ("name", "more"),  # which samples go together is decided before the way is asked: each has one in make test
    [
        pytest.param(name, more, marks=[] if i == j else [pytest.mark.exhaustive])
        for i, name in enumerate(TOGETHER)
        for j, more in enumerate(GROUPS)
    ],
    ids=str,
)
def test_micro_batches_of_a_token_budget_and_groups_of_jobs(name, more):
    words = ",".join(f"{key}:{value}" for key, value in more.items())
    wanted = request(f"{{{name}:{{{words}}}}}")
    same(outcomes(wanted), alone(wanted))
    arm = build(wanted)
    assert len(arm.turns) == {None: 1, 2: 2, 1: 3}[more.get("at_a_time")]
    if "tokens" in more:
        assert len(arm.micro_batches) > 1
        assert all(b.inputs["input_ids"].numel() <= more["tokens"] for b in arm.micro_batches)
    assert arm.real == sum(len(s.tokens) for s in arm.samples)


@given(
    lengths=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=6), min_size=1, max_size=4),
    tokens=st.integers(25, 200),
    packed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_in_one_micro_batch_and_none_is_too_large(lengths, tokens, packed):
    jobs = [pad(random_samples(own, seed=i), 2) for i, own in enumerate(lengths)]
    longest = max(max(own) for own in lengths)
    if longest > tokens:
        with pytest.raises(Unsupported, match=f"a sample of {longest} tokens does not fit a micro-batch of {tokens}"):
            evenly(lengths, tokens, packed)
        return
    made, places = shared_out(jobs, evenly(lengths, tokens, packed))
    rows: dict[int, list[int]] = {}
    for own, at, before in zip(made, places, lengths, strict=True):
        assert sorted(n for b in own for n in masks(b).sum(1).tolist()) == sorted(before) and at == sorted(set(at))
        for batch, place in zip(own, at, strict=True):
            rows.setdefault(place, []).extend(masks(batch).sum(1).tolist())
    assert sorted(rows) == list(range(len(rows)))
    assert all((sum(own) if packed else len(own) * max(own)) <= tokens for own in rows.values())
    if packed:
        assert len(rows) <= 2 * -(-sum(map(sum, lengths)) // tokens)


def masks(batch):
    return batch.inputs.get("attention_mask", torch.ones_like(batch.inputs["input_ids"]))


@pytest.mark.parametrize("given", [{"tokens": 0}, {"at_a_time": "two"}], ids=str)
def test_a_wrong_parameter_is_one_line(given):
    with pytest.raises(ValueError, match=r"should be (greater|a valid integer)"):
        ablation({"batched": given})


def test_a_budget_that_a_sample_exceeds_is_refused():
    with pytest.raises(Unsupported, match="tokens does not fit a micro-batch of 20"):
        build(request("{batched_packed:{tokens:20}}"))


@pytest.mark.parametrize("name", [pytest.param("batched", marks=pytest.mark.exhaustive), "batched_packed"])
def test_norms_and_rope_of_ours_go_with_it(name):
    wanted = request(name, "fused_rms_norm", "fused_rope")
    same(outcomes(wanted), alone(wanted))


def test_our_kernels_hold_no_logits_where_the_head_is_plain_and_go_with_norms_and_rope():
    wanted = request("fused_multi_lora", "fused_rms_norm", "fused_rope")
    same(outcomes(wanted), alone(wanted))
    _, notes = audited("fused_multi_lora", wanted)
    assert notes["loss_of_each_job"] == "chunked head"
    whole = request("{fused_multi_lora:{chunked_head:false}}")
    same(outcomes(whole), alone(whole))


@pytest.mark.parametrize(
    "model",  # in make test gemma2 is where its logits are capped
    ["tiny-qwen2", *(pytest.param(f"tiny-{name}", marks=pytest.mark.exhaustive) for name in ("llama", "gemma2"))],
)
def test_every_family_s_jobs_run_through_the_layers_of_one_adapter(model):
    made = cells(f"models=[{model}]", UNEQUAL, "dtype=float32", "ablations=[[fused_multi_lora]]")
    wanted = request_of(made[-1], "candidate", torch.float32, CPU)
    wanted = replace(wanted, ablations=tuple(ablation(n) for n in ("eager", "adamw_foreach", "fused_multi_lora")))
    eager = [replace(only(wanted, i), ablations=wanted.ablations[:2]) for i in range(3)]
    same(outcomes(wanted), [one_step(build(one)) for one in eager])
    _, notes = audited("fused_multi_lora", wanted)
    changed, layers = notes["lorakernels"]["changed"], wanted.model.hf_config().num_hidden_layers
    assert notes["form"] == "slots" and [changed[part] for part in ("qkv", "o", "mlp")] == 3 * [layers]


def test_a_gradient_that_is_not_finite_stays_with_its_job(monkeypatch):
    """The job's loss is a number, so it shows only before the optimizers step; the others have their own by then."""
    arm, usual = (build(request("fused_multi_lora", workload=ONE_LENGTH)) for _ in range(2))
    together = arm.turns[0].innermost
    losses_of = together._losses

    def overflowing(batch, absent=()):
        losses = losses_of(batch, absent)
        if losses.requires_grad:
            losses.register_hook(lambda g: torch.where(g == 0, 0, g * g.new_tensor([1, float("inf")])))
        return losses

    monkeypatch.setattr(together, "_losses", overflowing)
    for made in (arm, usual):
        (turn,) = made.turns
        turn.backward(turn.forward(turn.innermost.micro_batch(0)))
        if made is arm:
            assert not any(p.grad.isfinite().all() for n, p in made.adapters(made.steps[0]) if "lora_B" in n)
        turn.update()
    for (_, p), (_, q) in zip(arm.adapters(arm.steps[0]), usual.adapters(usual.steps[0]), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-6)
    assert not all(p.isfinite().all() for _, p in arm.adapters(arm.steps[1]))


def test_a_wrong_form_is_one_line():
    with pytest.raises(ValueError, match="form: should be 'slots' or 'linears', not 'slot'"):
        ablation({"fused_multi_lora": {"form": "slot"}})


def test_logits_that_are_capped_are_made_whole():
    made = plan(config("models=[tiny-gemma2]", "dtype=float32", UNEQUAL, "ablations=[fused_multi_lora]"), "cpu").cells
    wanted = request_of(made[-1], "candidate", torch.float32, CPU)
    wanted = replace(wanted, ablations=tuple(ablation(n) for n in ("eager", "adamw_foreach", "fused_multi_lora")))
    assert audited("fused_multi_lora", wanted)[1]["loss_of_each_job"] == "of the whole logits"
    eager = [replace(only(wanted, i), ablations=wanted.ablations[:2]) for i in range(3)]
    same(outcomes(wanted), [one_step(build(one)) for one in eager])
