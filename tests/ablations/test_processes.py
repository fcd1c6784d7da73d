"""`processes`: each job is as it is alone, in a process of its own, on a CPU over gloo."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from helpers import MACHINE, cells
from several_jobs import LAYERS, UNEQUAL, alone, build, outcomes, request
from several_ranks import on_ranks

from lorabench.contract.ablation import Ablation, Evidence, Unsupported, conflict
from lorabench.contract.family import Family, Stack
from lorabench.contract.ranks import Ranks
from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Ready, Seat, Seating, WrongNumerics
from lorabench.measure.trial import run_trial
from lorabench.plan.design import refusal
from lorabench.plan.registry import ablation
from lorabench.record.schema import ArmMemory
from lorabench.run.ranks import on_one_gpu, whole_batch
from lorabench_ablations import processes

GPU = MACHINE.model_copy(update={"device": "cuda", "gpus": 1, "capability": (9, 0)})


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What an arm needs is imported once, before processes are forked."""
    build(request("sequential"))


def wanted_on(ranks, number):
    return replace(request("processes"), ranks=ranks.alone(), mine=number).own()


def as_alone(ranks):
    wanted = wanted_on(ranks, ranks.rank)
    (found,), theirs = outcomes(wanted), alone(request("sequential"))[ranks.rank]
    arm = build(wanted)
    (step,) = arm.steps
    trained = [name for name, p in arm.model.named_parameters() if "lora_" in name]
    equal = all(torch.equal(gradient, theirs.gradients[name]) for name, gradient in found.gradients.items())
    return step.name, found.loss == theirs.loss, equal, found.gradients.keys() == theirs.gradients.keys(), len(trained)


def test_every_job_is_as_it_is_alone_and_no_process_has_another_one_s_adapter(tmp_path):
    alone(request("sequential"))  # once, before processes are forked
    answers = on_ranks(3, tmp_path, as_alone)
    assert answers == [(name, True, True, True, 2 * 7 * LAYERS) for name in ("few", "many", "thin")]


def audited(ranks):
    found = []
    for number in (ranks.rank, 0):  # of the second, both train the same job
        wanted = wanted_on(ranks, number)
        arm = build(wanted)
        evidence = Evidence(arm, arm.patched["processes"], {})  # type: ignore[arg-type]
        toggle = ablation("processes")
        found.append((toggle.audit(evidence), toggle.notes(evidence)))
    return found


def test_the_audit_counts_processes_that_train_different_jobs(tmp_path):
    note = {"processes": {"processes": 2, "backend": "gloo"}}
    assert on_ranks(2, tmp_path, audited) == [[(2, note), (0, note)]] * 2


def times_of_a_trial(ranks):
    arm = build(wanted_on(ranks, ranks.rank))
    ranks.barrier()  # who builds its arm faster does not make up for it
    time.sleep(0.4 * ranks.rank)
    called = time.perf_counter()  # one clock for all processes of a machine
    done = run_trial(arm, number=1)
    return called, done.began, list(done.losses)


def test_a_trial_begins_in_all_processes_together_and_is_of_one_job(tmp_path):
    answers = on_ranks(2, tmp_path, times_of_a_trial)
    called, began, jobs = zip(*answers, strict=True)
    assert called[1] - called[0] > 0.2 and min(began) > max(called)
    assert jobs == (["few"], ["many"])


@dataclass(frozen=True, kw_only=True)
class Spoilt(Ablation):
    """Of the job `many` alone one gradient is wrong."""

    name: ClassVar[str] = "spoilt"
    slot: ClassVar[str] = "spoilt"

    def step(self, step):
        if step.name == "many":
            last = [p for n, p in step.model.named_parameters() if "lora_B" in n][-1]
            last.register_hook(lambda grad: 1.01 * grad)
        return step


def judged(ranks: Ranks, scratch, spoilt):
    cell = cells(UNEQUAL, "dtype=float32", "ablations=[processes]")[-1]
    if spoilt:
        cell = replace(cell, candidate=(*cell.candidate, Spoilt()))
    family = Family((cell,))
    stack: Stack = family.stacks[-1]
    machine = SimpleNamespace(device="cpu", dtype=lambda wanted: "float32")
    seat = Seat(Seating(family, machine, False, None, str(scratch)), lambda text: None, ranks)  # type: ignore[arg-type]
    seat.open()
    into = Ready()
    try:
        seat._gate(stack, into)
    except WrongNumerics as error:
        return str(error)
    return {job: verdict.passed for job, verdict in into.numerics.items()}


@pytest.mark.parametrize("spoilt", [pytest.param(False, marks=pytest.mark.exhaustive), True])  # others pass there, too
def test_each_process_gates_its_own_job(tmp_path, spoilt):
    few, many, thin = on_ranks(3, tmp_path, judged, tmp_path, spoilt)
    assert (few, thin) == ({"few": True}, {"thin": True})
    if spoilt:
        assert many.startswith("job many: ")
    else:
        assert many == {"many": True}


def test_a_job_s_processes_need_one_gpu_whatever_their_number():
    cell = cells("workload=alpaca_jobs_4", "ablations=[processes]")[-1]
    family = Family((cell,))
    assert (cell.ranks, cell.ranks_of("reference"), cell.gpus) == (4, 1, 1)
    assert (family.ranks, family.gpus) == (4, 1)
    assert Seating(family, MACHINE, False, None, "").one_gpu
    assert refusal(cell, GPU) is None and refusal(cell, MACHINE) is None
    divided = Family((cells("workload=8x16", "world_size=2", "ablations=[ddp]")[-1],))
    assert (divided.ranks, divided.gpus) == (2, 2)
    assert not Seating(divided, MACHINE, False, None, "").one_gpu


@pytest.mark.parametrize("workload", ["2x16", "alpaca_jobs_1"])
def test_one_job_alone_is_refused(workload):
    cell = cells(f"workload={workload}", "ablations=[processes]")[-1]
    reason = f"processes trains several jobs at the same time; the workload {workload} has one"
    assert refusal(cell, MACHINE) == ("unsupported", reason)


def test_several_gpus_are_refused():
    cell = cells("workload=two_jobs", "world_size=2", "ablations=[processes]")[-1]
    assert refusal(cell, MACHINE) == (
        "unsupported",
        "processes has a process a job, all on one GPU: give world_size=1",
    )


def test_several_jobs_in_one_process_are_refused():
    with pytest.raises(Unsupported, match="one job a process; here are 3 in one"):
        build(request("processes"))


@pytest.mark.parametrize(
    ("other", "says"),
    [("batched", "both fill the slot jobs"), ("ddp", "no step is divided"), ("auto_batch_size", "the room that it"),
     ("fifo", "nothing to share out")],
)  # fmt: skip
def test_what_cannot_be_combined_is_said_in_one_line(other, says):
    assert says in (conflict([ablation("processes"), ablation(other)]) or "")


def test_what_runs_one_adapter_goes_with_it():
    assert conflict([ablation("processes"), ablation("lora_kernels")]) is None


def test_memory_is_added_over_the_processes_and_jobs_are_put_together():
    ready = [
        Ready(
            memory=ArmMemory(weights=100, static=120, peaks={"forward": peak, "step": 130}, peak=peak, retries=0),
            own_bytes=20, base_bytes=100, jobs={job: JobCounts(real=real, padded=1, trained=real)},
        )
        for job, peak, real in (("one", 140, 10), ("two", 160, 8))
    ]  # fmt: skip
    one = on_one_gpu(ready)
    assert one.memory == ArmMemory(
        weights=200, static=240, peaks={"forward": 300, "step": 260}, peak=300, retries=0
    )  # fmt: skip
    assert one.base_bytes == 200 and 40 < one.own_bytes < 40 + 1e9  # and the second one's context
    assert ready[0].memory.weights == 100  # type: ignore[union-attr]
    assert on_one_gpu([Ready(), Ready()]).memory is None
    assert whole_batch([r.jobs for r in ready]) == {"one": ready[0].jobs["one"], "two": ready[1].jobs["two"]}


@pytest.mark.parametrize("daemon", [True, False])
def test_the_record_says_whether_mps_was_seen(monkeypatch, daemon):
    import psutil

    names = ["python", None, *(["nvidia-cuda-mps-control"] if daemon else [])]
    monkeypatch.setattr(psutil, "process_iter", lambda wanted: [SimpleNamespace(info={"name": n}) for n in names])
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert processes.served_by_mps() == {"mps_daemon": daemon, "mps_pipes": None}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    assert processes.served_by_mps()["mps_pipes"] == "/run/mps"
