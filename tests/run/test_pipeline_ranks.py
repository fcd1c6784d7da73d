"""Pipelines from the command line to the record, over really several processes. One of which a rank fails is in
test_ranks.py."""

from __future__ import annotations

import pytest
from helpers import MACHINE, cells, sweep

from lorabench.measure.judging.limits import UNKNOWN
from lorabench.plan.design import refusal
from lorabench.record.store import read_records

COMMON = ("world_size=2", "trials=3", "warmup=1", "dtype=float32", "report=false")
FEED = "workload={alpaca: {samples: 8, batch_size: 1, seq_len: 64}}"


def tokens_of(record):
    return record.real_tokens, record.tokens["candidate"].trained


@pytest.mark.exhaustive
def test_from_the_command_to_a_right_row_of_each_schedule(tmp_path):
    done = sweep(
        *COMMON, "models=[tiny-llama-8-layers]", FEED,
        "ablations=[pipeline_gpipe,pipeline_1f1b,pipeline_interleaved]", f"output={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again, *pipelines = read_records(tmp_path)
    for record in pipelines:
        assert record.status == "ok", record.reason
        each = 2 if record.ablations[0].startswith("pipeline_interleaved") else 1
        (name,) = record.applied.keys() & {"pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"}
        assert record.applied[name] == 2 * each
        assert record.numerics.tensors == 2 * each * 7 * 2 and record.numerics.grad_error < 1e-5
        found = {check.name: check.found for check in record.numerics.checks}
        assert found["each gradient before the trials"] < 1e-5 and found["each gradient of each trial"] < 1e-4
        assert tokens_of(record) == tokens_of(again)
        notes = record.notes[name]
        assert sum(notes["layers"]) == 8 and min(notes["layers"]) >= 1
        sides = 2 * each - 1  # of each rank's stages, as many have one behind them as have one before them
        sent = sides * notes["micro_batches"] * notes["shape"][1] * 64 * 4  # a row, 64 wide, float32
        assert notes["sent_bytes"] == notes["least_bytes"] == notes["handed_bytes"]["send"] == [sent] * 2
        layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
        assert sum(notes["held_bytes"]["weights"]) == 4 * (8 * layer + 2 * 256 * 64 + 64)  # nothing is on two ranks
        assert len(notes["held_bytes"]["adapters"]) == 2
        assert {"forward", "backward", "step"} <= record.phases.keys()
        assert all(phase["candidate"][0] > 0 for phase in record.phases.values())
        said = record.notes["candidate"]["pipeline"]
        assert len(said["bubble_pct_by_rank"]) == 2 and 0 < said["bubble_pct"] < 100


@pytest.mark.exhaustive
def test_several_jobs_from_the_command_to_a_right_row(tmp_path):
    done = sweep(
        *COMMON, "models=[tiny-llama]", "workload=two_jobs",
        "ablations=[pipeline_multi_adapter,{pipeline_multi_adapter: {kernels: true}}]", f"output={tmp_path}",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *records = read_records(tmp_path)
    assert [record.ablations for record in records] == [
        ["pipeline_multi_adapter"], ["pipeline_multi_adapter(kernels=True)"],
    ]  # fmt: skip
    for record in records:
        assert record.status == "ok", record.reason
        assert list(record.jobs["candidate"]) == ["short", "long"]
        assert all(job.numerics.grad_error < 1e-5 for job in record.jobs["candidate"].values())
        assert record.notes["pipeline_multi_adapter"]["micro_batches"] == 3
    assert "lorakernels" in records[1].notes and "lorakernels" not in records[0].notes


@pytest.mark.exhaustive
def test_jobs_that_share_micro_batches_from_the_command_to_a_right_row(tmp_path):
    done = sweep(
        *COMMON, "models=[tiny-llama]", "workload=two_jobs",
        "ablations=[[{pipeline_multi_adapter: {kernels: true}},{lorafusion: {tokens: 64}}],"
        "[pipeline_multi_adapter,{fifo: {tokens: 80}}],[{pipeline_multi_adapter: {flush: true}},fifo]]",
        f"output={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again, *records = sorted(read_records(tmp_path), key=lambda record: record.status == "conflict")
    *run, refused = records
    assert refused.status == "conflict" and "flush=true empties the pipeline behind each job" in refused.reason
    held = {"lorafusion": ([2, 2], [64, 64]), "fifo": ([2, 1], [80, 80])}
    for record, (jobs, tokens) in zip(run, held.values(), strict=True):
        assert record.status == "ok", record.reason
        assert all(job.numerics.grad_error < 1e-5 for job in record.jobs["candidate"].values())
        said = record.notes["pipeline_multi_adapter"]
        assert said["jobs_of_each_micro_batch"] == jobs and said["shape"] == [1, tokens[0]]
        (rule,) = record.applied.keys() & held.keys()
        assert record.applied[rule] == 2 and record.notes["tokens_of_each_micro_batch"] == tokens
        assert record.real_tokens == again.real_tokens == 128
        assert record.padding("candidate") == sum(tokens) - 128  # counted on one rank


@pytest.mark.exhaustive
def test_two_pipelines_divide_each_job_from_the_command_to_a_right_row_or_a_typed_record(tmp_path):
    done = sweep(
        "world_size=4", *COMMON[1:], "models=[tiny-llama]", "workload={lorafusion_mixed: {seq_len: 64}}",
        "ablations=[{pipeline_multi_adapter: {tokens: 128, ranks: 2}},"
        "[{pipeline_multi_adapter: {ranks: 2, kernels: true}},{lorafusion: {tokens: 192}}],"
        "{pipeline_multi_adapter: {ranks: 3}},{pipeline_multi_adapter: {ranks: 2, tokens: 32}}]",
        f"output={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again, *run = [record for record in read_records(tmp_path) if record.status == "ok"]
    refused = [record for record in read_records(tmp_path) if record.status != "ok"]
    assert len(run) == len(refused) == 2 and all(record.status == "unsupported" for record in refused)
    for record in run:
        jobs = record.jobs["candidate"]
        assert len(jobs) == 4 and all(job.numerics.grad_error < 1e-5 for job in jobs.values())
        assert tokens_of(record) == tokens_of(again)
        said, notes = record.notes["candidate"]["pipeline"], record.notes["pipeline_multi_adapter"]
        assert len(said["added_up_bytes_by_rank"]) == len(said["sent_bytes_by_rank"]) == 2
        assert notes["sent_bytes"] == notes["least_bytes"] and len(notes["sent_bytes"]) == 4
        # a ring of two sends each gradient once
        assert notes["handed_bytes"]["all_reduce"][:2] == said["added_up_bytes_by_rank"]
        assert notes["handed_bytes"]["send"][:2] == said["sent_bytes_by_rank"]
    reasons = sorted(record.reason for record in refused)
    assert reasons[0].startswith("pipeline_multi_adapter with ranks=3 needs a multiple of that, two at least")
    assert reasons[1] == "pipeline_multi_adapter: a sample of 64 tokens does not fit a row of 32"


@pytest.mark.parametrize(
    ("samples", "toggles"),  # the reference against itself is gated and measured as any toggle is
    [(2, ""), *(pytest.param(n, "adamw_fused", marks=pytest.mark.exhaustive) for n in (2, 1))],
)
def test_all_ranks_measure_the_noise_of_a_reference_that_is_divided_among_them(tmp_path, samples, toggles):
    """Of jobs alike once, with one job alone, or with all of them where one has fewer micro-batches than there are
    ranks."""
    done = sweep(
        "world_size=2", "models=[tiny-llama]",
        f"workload={{jobs_4: {{seq_len: 32, samples: {samples}, batch_size: 1}}}}",
        "dtype=bfloat16", "reference=[sdpa,adamw_foreach,padding,pipeline_multi_adapter]",
        f"ablations=[{toggles}]", "trials=3", "warmup=1", "report=false", f"output={tmp_path}",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, record = read_records(tmp_path)
    assert record.status == "ok", record.reason
    assert set(record.ranks) == {"reference", "candidate"}  # both step on both ranks
    assert all(job.numerics.depth_noise for job in record.jobs["candidate"].values())
    allowed = {check.name: check.allowed for check in record.numerics.checks}
    assert allowed["each gradient before the trials"] not in UNKNOWN.values()


@pytest.mark.parametrize(
    ("toggle", "size", "reason"),
    [
        ("pipeline_1f1b", 1, "pipeline_1f1b steps on several processes: give world_size=2 or more"),
        ("pipeline_1f1b", 4, "pipeline_1f1b needs 4 layers on 4 ranks; tiny-llama has 3"),
        ("pipeline_interleaved", 2, "pipeline_interleaved needs 4 layers on 2 ranks; tiny-llama has 3"),
    ],
)
def test_what_cannot_be_divided_is_known_before_a_start(toggle, size, reason):
    (cell,) = [c for c in cells(f"ablations=[{toggle}]", f"world_size={size}") if c.toggles]
    assert refusal(cell, MACHINE) == ("unsupported", reason)


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ("cuda_graph", "between the pieces that a graph would hold"),
        ("torch_compile", "swaps the layers"),
        ("packing", "buffers of one shape"),
        ("auto_batch_size", "every rank would find a size of its own"),
    ],
)
def test_what_a_pipeline_excludes_and_why(beside, why):
    (cell,) = [c for c in cells(f"ablations=[[pipeline_1f1b,{beside}]]", "world_size=2") if c.toggles]
    status, reason = refusal(cell, MACHINE)
    assert status == "conflict" and why in reason
