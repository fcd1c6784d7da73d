"""Several jobs on one base: however they are put together, each comes out as if it had been alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PEFT, InProcess, cells, only, seat_of

from lorabench.contract.kind import kind
from lorabench.contract.ranks import ONE, Ranks
from lorabench.measure.judging import depth_noise
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.kind import GateRequest, request_of
from lorabench.measure.machine import describe
from lorabench.measure.seat import Ready, WrongNumerics
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.compose import ConfigError
from lorabench.record.schema import Record
from lorabench.run.runner import Runner

CPU = torch.device("cpu")


def two_jobs(*overrides):
    return cells("workload=two_jobs", "dtype=float32", *overrides)


def request(cell=None):
    return request_of(cell or two_jobs()[0], "reference", torch.float32, CPU)


def test_each_job_has_its_samples_adapter_optimizer_and_seed():
    arm = kind("train").build(request())
    short, long = arm.steps
    assert [s.name for s in arm.steps] == ["short", "long"]
    assert [len(s.tokens) for s in short.samples] == [16, 16] and [len(s.tokens) for s in long.samples] == [48, 48]
    assert (len(short.batches), len(long.batches)) == (1, 2)
    ranks = [{p.shape[0] for n, p in arm.adapters(s) if "lora_A" in n} for s in arm.steps]
    assert ranks == [{4}, {8}]
    assert [s.optimizer.param_groups[0]["lr"] for s in arm.steps] == [2e-4, 1e-4]
    assert short.items == 2 * 15 and long.items == 2 * 47
    scaling = {
        m.scaling[name]
        for m in arm.model.modules()
        if isinstance(getattr(m, "scaling", None), dict)
        for name in ("short",)
    }
    assert scaling == {8 / 4}


def test_each_job_trains_as_if_it_were_alone():
    """Loss and every gradient of the first step, and the parameters after three, bit for bit: plain PEFT, one after the
    other by `set_adapter`, shares nothing but the frozen base."""
    together, train = request(), kind("train")
    arm = train.build(together)
    alone = [train.build(only(together, i)) for i in range(2)]
    for step, own in zip(arm.steps, alone, strict=True):
        mine, theirs = one_step(arm, step), one_step(own)
        assert mine.loss == theirs.loss
        assert mine.gradients.keys() == theirs.gradients.keys()
        assert all(torch.equal(g, theirs.gradients[n]) for n, g in mine.gradients.items())
    for _ in range(2):
        run_trial(arm)
        for own in alone:
            run_trial(own)
    for step, own in zip(arm.steps, alone, strict=True):
        after = dict(own.adapters())
        assert all(torch.equal(p, after[n]) for n, p in arm.adapters(step))


def test_a_trial_steps_every_job_once_and_tells_their_losses_apart():
    arm = kind("train").build(request())
    before = {s.name: {n: p.detach().clone() for n, p in arm.adapters(s)} for s in arm.steps}
    trial = run_trial(arm)
    assert set(trial.losses) == {"short", "long"} and trial.loss == sum(trial.losses.values())
    assert set(trial.device_ms) == {"forward", "backward", "step"}
    for step in arm.steps:
        assert all(not torch.equal(p, before[step.name][n]) for n, p in arm.adapters(step))


def test_memory_and_work_are_counted_by_job():
    cell = two_jobs()[0]
    train = kind("train")
    arm = train.build(request(cell))
    run_trial(arm)
    counts = train.counts(arm)
    assert counts["long"].adapter_bytes == 2 * counts["short"].adapter_bytes > 0
    assert counts["long"].optimizer_bytes > counts["short"].optimizer_bytes > 0
    assert (counts["short"].real, counts["long"].real) == (32, 96)
    held = train.held(arm)
    assert held["adapters"] == sum(c.adapter_bytes for c in counts.values())
    assert held["optimizer"] == sum(c.optimizer_bytes for c in counts.values())
    short, long = train.work(cell, train.samples(cell))
    assert long.tflop["forward"] > 3 * short.tflop["forward"]  # three times the tokens, and a larger adapter


@pytest.mark.exhaustive
def test_two_jobs_become_a_record_with_a_gate_of_each(tmp_path):
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        records = [runner.measure(c) for c in two_jobs("ablations=[gradient_checkpointing,lora_kernels]")]
    assert {(r.status, r.reason) for r in records} == {("ok", None)}
    for record in records:
        jobs = record.jobs["candidate"]
        assert set(jobs) == {"short", "long"}
        assert [(j.r, j.tokens.real, j.tokens.trained) for j in jobs.values()] == [(4, 32, 30), (8, 96, 94)]
        assert record.real_tokens == 128 and record.tokens["candidate"].trained == 124
        assert all(j.numerics.passed and j.numerics.tensors == 28 for j in jobs.values())
        assert all(len(j.numerics.checks) > 10 for j in jobs.values())
        assert all(j.tflop["backward"] > 0 for j in jobs.values())
    left = records[2].notes["lorakernels"]["left"]
    assert left[-1] == "the adapters long: PEFT computes them; fused_multi_lora serves several"
    again = records[1]
    assert Record.model_validate_json(again.model_dump_json(by_alias=True, exclude_none=True)) == again


def test_the_gate_names_the_job_that_is_wrong(tmp_path, monkeypatch):
    toggle = registry.ablation_class("gradient_checkpointing")

    def spoil(self, model):
        for name, p in model.named_parameters():
            if ".long." in name and "lora_B" in name:
                p.requires_grad_().register_hook(lambda grad: 1.02 * grad)  # PEFT trains one adapter at a time
        return 1

    cell = two_jobs("ablations=[gradient_checkpointing]")[1]
    monkeypatch.setattr(toggle, "patch", spoil)
    seat, stack = seat_of(cell, tmp_path)
    ready = Ready()
    with pytest.raises(WrongNumerics, match=r"job long: the gradient of .*lora_B"):
        seat._gate(stack, ready)
    assert ready.numerics["short"].passed and not ready.numerics["long"].passed
    failed = seat.call("prepare", stack.name, stack)
    assert failed.status == "wrong_numerics" and failed.reason.startswith("job long: ")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("{name: a-b}", "should match pattern"),
        ("{name: a, lora: {rank: 3}}", "no field named 'rank' in lora; did you mean r."),
        ("{name: a, workload: {seq_length: 3}}", "no field named 'seq_length'; did you mean seq_len."),
        ("{name: a, learning_rate: 0}", "greater than 0"),
        ("{name: a}, {name: a}", "two jobs are named 'a'"),
        ("{name: a, copies: 0}", "copies=0: expected a number of jobs from 1 to 1024"),
        ("{name: a, copies: 2}, {name: a_2}", "two jobs are named 'a_2'"),
    ],
)
def test_a_wrong_job_is_one_line_before_a_start(job, says):
    with pytest.raises(ConfigError, match=says):
        cells(f"workload={{2x16: {{jobs: [{job}]}}}}")


def test_copies_of_a_job_are_jobs_with_names_and_seeds_of_their_own():
    (cell,) = cells("workload={2x16: {jobs: [{name: many, copies: 3, seed: 5, lora: {r: 4}}, {name: one}]}}")[:1]
    assert [(j.name, j.seed, j.lora.r) for j in cell.jobs] == [
        ("many_1", 5, 4), ("many_2", 6, 4), ("many_3", 7, 4), ("one", 0, 16),
    ]  # fmt: skip
    assert [len(j.workload.jobs) for j in cell.jobs] == [0] * 4


def test_without_jobs_a_workload_s_key_is_what_it_was():
    from lorabench.record.store import read_records

    results = Path(__file__).resolve().parents[2] / "results/h200"
    for suite in ("peers", "qlora", "first_sweep", "axolotl_blog", "lorakernels_parts", "lorafusion_kernels"):
        from helpers import config

        from lorabench.plan.compose import plan

        planned = {c.key: c for c in plan(config(f"suite={suite}"), "cuda").cells}
        recorded = {r.key: r for r in read_records(results / suite)}
        assert recorded.keys() <= planned.keys(), suite
        assert all(planned[k].kind == r.kind for k, r in recorded.items()), suite


def test_a_workload_without_jobs_has_one_and_bears_no_name():
    (job,) = cells()[0].jobs
    assert (job.name, job.adapter, job.learning_rate, job.seed) == ("", "default", 1e-4, 0)
    assert kind("train").build(request(cells(f"reference=[{','.join(PEFT)}]")[0])).step.name == ""


@pytest.mark.parametrize(("workload", "kinds"), [("{jobs_4: {seq_len: 16}}", 1), ("two_jobs", 2)])
def test_the_noise_of_jobs_alike_is_measured_once(workload, kinds, tmp_path, monkeypatch):
    """And told of each of them."""
    cell, asked = cells(f"workload={workload}", "dtype=float32")[0], []
    monkeypatch.setattr(
        depth_noise, "measure", lambda arm, run: asked.append(arm) or depth_noise.DepthNoise({}, 0.0, 0.0)
    )
    told = noise_of(cell, tmp_path, torch.float32)
    assert len(asked) == len({file for file, _ in told.values()}) == kinds and len(set(map(id, asked))) == 1
    assert list(told) == [job.name for job in cell.jobs]


def noise_of(cell, folder, dtype=torch.bfloat16, ranks=ONE):
    """What is told of the cell's jobs: the file and the noise, by job. `ranks`: of the arms, in this one process."""
    told, asked = {}, replace(request_of(cell, "reference", dtype, CPU), scratch=folder, ranks=ranks)
    made = lambda name, ablations: asked  # noqa: E731
    gate = GateRequest(cell, made, ONE, lambda job, *both: told.update({job: both}))
    kind("train")._measure_noise(gate)
    return told


def test_noise_that_does_not_fit_is_measured_with_layers_that_run_again(tmp_path, monkeypatch):
    """The loss is moved by the same neighbours, for layers that run again draw what they drew; gradients by as much."""
    cell = cells("ablations=[adamw]")[0]
    measure, asked = depth_noise.measure, []

    def seeded(arm, run):
        torch.manual_seed(0)
        return measure(arm, run)

    def short_of_memory(arm, run):
        asked.append(arm.model.get_base_model().is_gradient_checkpointing)
        return seeded(arm, run) if asked[-1] else never(arm, run)

    def never(arm, run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 22.57 GiB.")

    found = []
    for one in (seeded, short_of_memory, never):
        monkeypatch.setattr(depth_noise, "measure", one)
        (folder := tmp_path / one.__name__).mkdir()
        found.append(noise_of(cell, folder)[""][1])
    whole, again, none = found
    assert whole.loss == again.loss and none is None
    assert all(0.5 < again.tensors[n][0] / error < 2 for n, (error, _) in whole.tensors.items())
    assert asked == [False, True]


def test_a_process_alone_does_not_measure_the_noise_of_a_model_that_is_divided_among_several(tmp_path):
    (cell, *_) = cells("world_size=2", "reference=[pipeline_gpipe]", "ablations=[pipeline_1f1b]", "dtype=bfloat16")
    assert noise_of(cell, tmp_path, ranks=Ranks(0, 2))[""][1] is None


def test_several_ranks_divide_what_jobs_are_gated_against_and_the_first_reads_all(tmp_path, monkeypatch):
    asked, train, made = replace(request(), scratch=tmp_path), kind("train"), []
    whole = train._gold_and_plain(asked)
    compute = train._gold_and_plain
    monkeypatch.setattr(train, "_gold_and_plain", lambda some: made.append(len(some.jobs)) or compute(some))
    assert train._golds(Ranks(1, 2), asked) == {}
    found = train._golds(Ranks(0, 2), asked)
    assert made == [1, 1] and list(found) == list(whole)
    for (gold, plain), both in zip(found.values(), whole.values(), strict=True):
        for outcome, wanted in zip((gold, plain), both, strict=True):
            assert outcome.loss == wanted.loss
            assert all(torch.equal(outcome.gradients[n], g) for n, g in wanted.gradients.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_job_is_gated_against_is_what_it_comes_to_alone(dtype, tmp_path):
    """One shallow model has all their adapters."""
    cell = cells("workload=two_jobs", f"dtype={str(dtype).removeprefix('torch.')}")[0]
    request = replace(request_of(cell, "reference", dtype, CPU), scratch=tmp_path, layers=2, ablations=())
    together = kind("train")._gold_and_plain(request)
    assert list(together) == [job.name for job in cell.jobs]
    for index, both in enumerate(together.values()):
        for found, alone in zip(both, kind("train")._gold_and_plain(only(request, index))[""], strict=True):
            assert (found.loss, found.update_error) == (alone.loss, alone.update_error)
            assert found.gradients.keys() == alone.gradients.keys()
            assert all(torch.equal(g, alone.gradients[n]) for n, g in found.gradients.items())
