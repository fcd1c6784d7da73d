"""`processes` from the command line to the record: each job trains in a process of its own, and one that is slow, dead
or wrong is told from the others."""

from __future__ import annotations

import pytest
from helpers import sweep

from lorabench.record.store import read_records

pytestmark = pytest.mark.exhaustive
MS = 2 * 150  # that rank_slow adds to a step of the job `long`, which has two micro-batches


@pytest.fixture(scope="module")
def records(plugin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    done = sweep(
        "models=[tiny-llama]", "workload=two_jobs", "reference=[sdpa,adamw_fused,padding]", "dtype=float32",
        "ablations=[processes,[processes,rank_slow],[processes,rank_wrong],[processes,{rank_fails: {how: kill}}]]",
        "trials=6", "warmup=1", "report=false", f"output={folder}", cwd=folder, env=plugin | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {" + ".join(r.ablations): r for r in read_records(folder)}


def of(records, *toggles):
    return next(r for name, r in records.items() if all(t in name for t in toggles) and name.count("+") < len(toggles))


def test_every_job_is_gated_against_itself_alone(records):
    record, again = of(records, "processes"), records[""]
    assert record.status == "ok", record.reason
    jobs = record.jobs["candidate"]
    assert list(jobs) == ["short", "long"]
    assert all(job.numerics.passed and job.numerics.tensors == 28 for job in jobs.values())
    assert {job: own.tokens.real for job, own in jobs.items()} == {"short": 32, "long": 96}
    assert record.tokens == again.tokens
    assert record.applied["processes"] == 2 and record.notes["processes"] == {"processes": 2, "backend": "gloo"}


def test_the_memory_is_that_of_all_processes(records):
    record, again = of(records, "processes"), records[""]
    ours, plain = record.memory["candidate"], again.memory["candidate"]
    assert (ours.weights, ours.adapters, ours.optimizer) == (2 * plain.weights, plain.adapters, plain.optimizer)


def test_the_time_is_that_of_the_slowest_process(records):
    slow = of(records, "processes", "rank_slow")
    assert slow.status == "ok", slow.reason
    spread = slow.ranks["candidate"]
    assert spread.size == 2 and set(spread.slowest) == {1} and spread.spread > 0.5
    assert min(slow.ms("candidate", ("forward",))) > MS > max(slow.ms("candidate", ("step",)))


def test_a_wrong_gradient_of_one_process_is_its_job_s(records):
    wrong = of(records, "processes", "rank_wrong")
    assert wrong.status == "wrong_numerics" and wrong.reason.startswith("job long: "), wrong.reason
    assert wrong.phases == {}


def test_a_process_that_is_killed_is_named(records):
    killed = of(records, "processes", "rank_fails")
    assert (killed.status, killed.rank) == ("crash", 1)
    assert killed.reason.startswith("rank 1: the worker was killed by SIGKILL") and killed.phases == {}


def test_they_may_be_what_others_are_held_against(tmp_path):
    """Each of its processes knows one job; the other arm's process is judged on both."""
    done = sweep(
        "models=[tiny-llama]", "workload=two_jobs", "reference=[sdpa,adamw_fused,padding,processes]", "dtype=float32",
        "ablations=[batched]", "trials=6", "warmup=1", "report=false", f"output={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again, batched = read_records(tmp_path)
    assert (again.status, batched.status) == ("ok", "ok"), (again.reason, batched.reason)
    assert set(again.ranks) == {"reference", "candidate"} and set(batched.ranks) == {"reference"}
    for record in (again, batched):
        for job in ("short", "long"):
            checks = {check.name for check in record.jobs["candidate"][job].numerics.checks}
            assert {"each gradient of each trial", "the loss of each trial", "each gradient after the trials"} <= checks
