"""Several ranks of one cell, really several processes: DDP's gradient is one process's, and a rank that fails is
named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from helpers import cells, sweep, workers_in

from lorabench.contract.ranks import NO_MULTICAST, multicast
from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Made
from lorabench.measure.trial import Trial
from lorabench.plan.design import refusal
from lorabench.record.store import read_records, read_sessions
from lorabench.run.ranks import Place, free_port, joined, notes_by_rank, slowest, spread_of, whole_batch

COMMON = (
    "models=[tiny-llama]",
    "workload=8x256",
    "world_size=2",
    "trials=3",
    "warmup=1",
    "dtype=float32",
    "report=false",
)
ONE_BY_ONE = "workload={alpaca: {samples: 8, batch_size: 1, seq_len: 64}}"


def test_ddp_s_gradient_is_that_of_one_process_with_the_same_global_batch(plugin, tmp_path):
    """Samples of unequal length: normalized by the tokens of all of them, not rank by rank."""
    feed = "workload={alpaca:{samples:8,batch_size:4,seq_len:160}}"  # long enough for a turn of few trials
    toggles = "ablations=[ddp,unsummed,{fsdp2: {copy_engine: true}}]"
    done = sweep(*COMMON, feed, toggles, f"output={tmp_path}", cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    order = ["", "ddp", "unsummed", "fsdp2(copy_engine=True)"]  # what a busy machine disturbs comes last
    again, ddp, unsummed, copied = sorted(read_records(tmp_path), key=lambda r: order.index(" + ".join(r.ablations)))
    assert ddp.status == "ok", ddp.reason
    told = ddp.notes["ddp"]
    assert ddp.applied["ddp"] == 2 and (told["world_size"], told["backend"]) == (2, "gloo")
    adapters = told["held_bytes"]["adapters"]  # of each rank, and a ring of two sends each gradient once
    assert told["least_bytes"] == adapters
    assert told["handed_bytes"]["all_reduce"] == adapters
    assert told["sent_bytes"] == pytest.approx(adapters, rel=0.01)
    assert len(adapters) == len(told["held_bytes"]["weights"]) == 2
    assert ddp.numerics.tensors == 2 * 7 * 2 and ddp.numerics.grad_error < 1e-5 and ddp.numerics.loss_error < 1e-6
    found = {check.name: check.found for check in ddp.numerics.checks}
    assert found["each gradient before the trials"] < 1e-5 and found["the loss of each trial"] < 1e-6
    assert found["the candidate's update against AdamW on its own gradients"] < 1e-4
    assert ddp.real_tokens == again.real_tokens
    assert ddp.tokens["candidate"].trained == again.tokens["candidate"].trained
    assert ddp.roofline["candidate"]["forward"].tflop == again.roofline["candidate"]["forward"].tflop
    spread = ddp.ranks["candidate"]
    assert (
        spread.size == 2
        and len(spread.slowest) >= 3
        and set(spread.slowest) <= {0, 1}
        and 0 <= spread.spread < 1
        and set(ddp.ranks) == {"candidate"}
    )
    assert again.ranks == {}
    (session,) = read_sessions(tmp_path)
    curve = {(link["collective"], link["bytes"]) for link in session["ceilings"]["links"] if link["ranks"] == 2}
    assert {("all_reduce", 4096), ("all_gather", 1 << 20), ("reduce_scatter", 4096), ("send", 1 << 20)} < curve
    assert unsummed.status == "wrong_numerics"
    assert unsummed.numerics.grad_error == pytest.approx(0.5, rel=1e-3)
    assert copied.status == "unsupported"
    assert "copy engines copy between GPUs, and these ranks send over gloo" in copied.reason


@pytest.mark.parametrize("toggles", ["ddp", pytest.param("ddp,fsdp2", marks=pytest.mark.exhaustive)])
def test_under_dropout_a_rank_s_samples_are_gated_without(plugin, tmp_path, toggles):
    """Its samples have other masks than plain PEFT draws for all of them."""
    few = ("workload=8x64", "trials=2", "lora.lora_dropout=0.1")
    done = sweep(*COMMON, *few, f"ablations=[{toggles}]", f"output={tmp_path}", cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    _, *found = read_records(tmp_path)
    assert len(found) == len(toggles.split(","))
    assert {record.status for record in found} == {"ok"}, [record.reason for record in found]
    for record in found:
        assert record.notes["gate"].startswith("at dropout 0: "), record.notes


def test_notes_have_each_rank_s_bytes_of_what_divides_a_step_and_rank_0_s_of_all_else():
    first = {"pipe": {"layers": [1, 2], "sent_bytes": 5, "handed_bytes": {"send": 4}}, "other": {"kept_bytes": 1}}
    second = {"pipe": {"layers": [1, 2], "sent_bytes": 7, "handed_bytes": {"all_reduce": 7}}, "other": 2}
    assert notes_by_rank([first, second], ["pipe", "none"]) == {
        "pipe": {"layers": [1, 2], "sent_bytes": [5, 7], "handed_bytes": {"send": [4, 0], "all_reduce": [0, 7]}},
        "other": {"kept_bytes": 1},
    }
    assert notes_by_rank([first, {}], ["pipe"]) == first, "one that says nothing"


@pytest.mark.exhaustive
def test_on_weights_in_4_bits_each_is_right_or_says_why_it_cannot_be(tmp_path):
    pytest.importorskip("bitsandbytes")
    zero = [f"{{deepspeed_zero: {{stage: {n}}}}}" for n in (1, 2, 3)] if find_spec("deepspeed") else []
    right = ["ddp", "ulysses", "pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", *zero[:2]]
    few = ("models=[tiny-llama-8-layers]", ONE_BY_ONE, "trials=2", "reference=peft_nf4")
    toggles = ",".join([*right, "fsdp2", "tensor_parallel", *zero[2:]])
    done = sweep(*COMMON, *few, f"ablations=[{toggles}]", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [record for record in read_records(tmp_path) if record.ablations]
    ok = [record for record in records if record.status == "ok"]
    assert len(ok) == len(right), [record.reason for record in records]
    for record in ok:
        assert record.numerics.grad_error < 1e-5 and "nf4_base" in record.notes
    refused = {(record.ablations[0], record.status): record.reason for record in records if record.status != "ok"}
    assert "a packed weight would stay whole on every rank" in refused.pop(("fsdp2", "conflict"))
    assert "no tensor that transformers' plan can split" in refused.pop(("tensor_parallel", "conflict"))
    for (_, status), reason in refused.items():
        assert status == "unsupported" and reason.startswith(
            "stage 3 divides plain weights; this model has a Params4bit"
        )


@pytest.mark.exhaustive
def test_on_four_ranks_each_passes_the_gate(tmp_path):
    zero = ",".join(f"{{deepspeed_zero: {{stage: {n}}}}}" for n in (1, 2, 3) if find_spec("deepspeed"))
    toggles = f"[ddp,{{fsdp2: {{adapters: sharded}}}},[{{fsdp2: {{reshard: false}}}},lora_kernels],{zero}]"
    few = ("world_size=4", "workload=8x64", "trials=2")
    done = sweep(*COMMON, *few, f"ablations={toggles}", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, *records = read_records(tmp_path)
    assert len(records) == 3 + 3 * bool(zero)
    for record in records:
        assert record.status == "ok", (record.ablations, record.reason)
        assert record.numerics.grad_error < 1e-5 and record.ranks["candidate"].size == 4


@pytest.mark.exhaustive  # in make test both arms are pipelines: see test_pipeline_ranks.py
def test_ddp_against_itself_steps_on_both_ranks_in_both_arms(plugin, tmp_path):
    reference = "reference=[sdpa,adamw_foreach,padding,ddp]"
    few = ("workload=8x64", "trials=2")
    done = sweep(*COMMON, *few, reference, "ablations=[]", f"output={tmp_path}", cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path)
    assert set(record.ranks) == {"reference", "candidate"}, record.reason
    assert record.status == "ok", record.reason


@pytest.mark.parametrize(
    ("toggle", "status", "reason"),
    [
        pytest.param(
            "rank_raises",
            "crash",
            "rank 1: the toggle rank_raises's step raised LookupError: only here",
            marks=pytest.mark.exhaustive,
        ),
        # In make test a rank is killed in the middle of a pipeline's schedule: see QUICK.
        pytest.param("rank_killed", "crash", "rank 1: the worker was killed by SIGKILL", marks=pytest.mark.exhaustive),
        pytest.param("rank_greedy", "oom", "rank 1: it ran out of memory", marks=pytest.mark.exhaustive),
        pytest.param(
            "rank_hangs_early",
            "timeout",
            "rank 1: no answer after {limit} s; it was numerics gate",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "rank_hangs", "timeout", "rank 1: no answer after {limit} s; it was ", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_rank_that_fails_is_one_typed_record_that_names_it_and_leaves_no_process(
    plugin, tmp_path, toggle, status, reason
):
    fails_once(plugin, tmp_path, toggle, status, reason)


needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
FAILURES = {
    "raise": ("crash", "rank 1: LookupError: only here (while "),
    "kill": ("crash", "rank 1: the worker was killed by SIGKILL"),
    "exit": ("crash", "rank 1: the worker exited with code 0 while "),
    "oom": ("oom", "rank 1: it ran out of memory"),
    "hang": ("timeout", "rank 1: no answer after {limit} s; it was "),
}


PIPELINES = {
    "pipeline_gpipe": (ONE_BY_ONE,),
    "pipeline_1f1b": (ONE_BY_ONE,),
    "pipeline_interleaved": (ONE_BY_ONE, "models=[tiny-llama-8-layers]"),
    "pipeline_multi_adapter": ("workload=two_jobs",),
}
ON_GPUS = {"context_parallel": ("models=[smollm2-135m]", "weights=random", "workload=4x512", "dtype=bfloat16")}
QUICK = ("pipeline_gpipe", "kill")
needs_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: torch's ring has CUDA's operators alone"),
]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        pytest.param(strategy, how, marks=marks if (strategy, how) == QUICK else [*marks, pytest.mark.exhaustive])
        for strategy, marks in [
            *((name, []) for name in ("ddp", "fsdp2", "{fsdp2: {adapters: sharded}}", "ulysses", "tensor_parallel")),
            *((f"{{deepspeed_zero: {{stage: {n}}}}}", [needs_deepspeed]) for n in (1, 2, 3)),
            *((name, []) for name in PIPELINES),
            *((name, needs_gpus) for name in ON_GPUS),
        ]
        for how in FAILURES
    ],
)
def test_each_strategy_s_rank_that_fails_is_named(plugin, tmp_path, strategy, how):
    """In a pipeline in the middle of its schedule, while the other rank waits for gradients."""
    beside = "stage_fails" if strategy in PIPELINES else "rank_fails"
    more = (PIPELINES | ON_GPUS).get(strategy, ())
    fails_once(plugin, tmp_path, f"{strategy},{{{beside}: {{how: {how}}}}}", *FAILURES[how], *more)


def fails_once(plugin, tmp_path, toggle, status, reason, *more):
    """It is in both arms, so the reference meets it first. Only what hangs waits for the time-out."""
    slow = any(name in toggle for name in ("deepspeed", *ON_GPUS))  # to start
    limit = 180 if status != "timeout" else 15 if slow else 9
    reference = f"reference=[sdpa,adamw_foreach,padding,{toggle}]"
    output = f"output={tmp_path}"
    done = sweep(*COMMON, *more, f"timeout_s={limit}", reference, "ablations=[]", output, cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path)
    assert record.status == status, record.reason
    assert record.reason.startswith(reason.format(limit=limit))
    assert record.rank == 1 and record.phases == {}
    deadline = time.monotonic() + 20
    while workers_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers_in(tmp_path)
    assert not list(tmp_path.glob(".worker.log*"))


def made(*trials):
    phases = [{"forward": forward, "backward": backward} for forward, backward in trials]
    return [Made(Trial(ms, ms, {}, 0.0, 1.0)) for ms in phases]


@pytest.mark.parametrize(("one_gpu", "threads"), [(False, 2), (True, 8)])
def test_ranks_of_one_machine_divide_its_threads(one_gpu, threads, monkeypatch):
    """Two processes that each compute with all cores made an arm ten times as slow; jobs that share one CPU do so."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: None)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        joined(Place(0, 4, 1, "", 0, 9.0), "cpu", lambda: None, one_gpu)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_times_are_the_slowest_rank_s_and_the_spread_is_kept():
    ranks = [made((1.0, 2.0), (5.0, 5.0)), made((2.0, 2.0), (1.0, 4.0))]
    which, found = slowest(ranks)
    assert which == [1, 0] and [one.trial.total_ms for one in found] == [4.0, 10.0]
    assert spread_of(ranks) == pytest.approx((0.25 + 0.5) / 2)


def test_positions_are_counted_over_all_ranks_and_trained_tokens_once():
    whole = whole_batch([{"": JobCounts(real=10, padded=2, trained=18)}, {"": JobCounts(real=8, padded=4, trained=18)}])
    assert whole == {"": JobCounts(real=18, padded=6, trained=18)}


@pytest.mark.parametrize("toggle", ["fsdp2", pytest.param("deepspeed_zero", marks=pytest.mark.exhaustive)])
def test_on_one_rank_a_toggle_shows_what_its_machinery_costs(tmp_path, toggle):
    if "deepspeed" in toggle:
        pytest.importorskip("deepspeed")
    done = sweep(
        "models=[tiny-llama]", "workload=8x64", "trials=3", "warmup=1", "dtype=float32", f"ablations=[{toggle}]",
        "report=false", f"output={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, one = read_records(tmp_path)
    assert one.status == "ok", one.reason
    assert one.ranks == {} and (one.notes[toggle]["world_size"], one.notes[toggle]["backend"]) == (1, "gloo")
    assert one.numerics.grad_error < 1e-5 and one.applied[toggle] > 0


def test_what_cannot_be_divided_is_known_before_a_start():
    class Cpu:
        device, gpus, capability = "cpu", 0, None
        dtype = staticmethod(lambda name: "float32")

    class Gpu(Cpu):
        device, gpus = "cuda", 1

    (cell,) = [c for c in cells("ablations=[ddp]") if c.toggles]
    assert refusal(cell, Cpu) == ("unsupported", "ddp steps on several processes: give world_size=2 or more")
    (two,) = [c for c in cells("ablations=[ddp]", "world_size=2") if c.toggles]
    assert refusal(two, Cpu) is None and two.ranks == 2 and two.ranks_of("reference") == 1
    assert refusal(two, Gpu) == ("unsupported", "world_size=2 needs 2 GPUs; this machine has 1")


def test_one_rank_changes_no_key():
    plain, several = cells("ablations=[eager]")[1], cells("ablations=[eager]", "world_size=2")[1]
    assert plain.key == several.key  # neither arm has a parallel toggle, so the cell is the same measurement
    two, four = (cells("ablations=[ddp]", f"world_size={n}")[1] for n in (2, 4))
    assert two.key != four.key
    assert torch.distributed.is_available()


@pytest.mark.parametrize(("variable", "off"), NO_MULTICAST.items())
def test_nvlink_multicast_is_refused_on_several_gpus_and_switched_off_by_us(monkeypatch, variable, off):
    class Two:
        device, gpus, capability = "cuda", 2, (9, 0)
        dtype = staticmethod(lambda name: "bfloat16")

    two = cells("ablations=[ddp]", "world_size=2")[1]
    for name in NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    assert refusal(two, Two) is None and multicast({}) is None
    monkeypatch.setenv(variable, off)
    assert refusal(two, Two) is None
    on = str(1 - int(off))
    monkeypatch.setenv(variable, on)
    status, reason = refusal(two, Two) or ("", "")
    assert status == "unsupported" and reason.startswith(f"{variable}={on} in the environment; ")
    assert refusal(cells("ablations=[eager]", "world_size=2")[1], Two) is None  # one rank: nothing to ask


@pytest.mark.parametrize("variable", NO_MULTICAST)
def test_a_rank_without_a_variable_refuses_to_start_over_nccl(monkeypatch, variable):
    for name, off in NO_MULTICAST.items():
        monkeypatch.setenv(name, off)
    monkeypatch.delenv(variable)
    place = Place(0, 2, free_port(), "", os.getpid(), 1.0)
    with pytest.raises(RuntimeError, match=f"^{variable} is not in the environment; on several GPUs it has to be "):
        joined(place, "cuda", lambda: None)
    assert variable not in os.environ and not torch.distributed.is_initialized()


def test_workers_have_the_variables_though_nobody_has_set_them():
    """From the start of the server that they are forked from."""
    code = """
import os
from lorabench.run.process import Workers
context = Workers()._context
context.set_forkserver_preload([])  # whose imports are not needed here
with context.Pool(1) as pool:
    print(pool.map(os.getenv, {names}))
"""
    bare = {name: value for name, value in os.environ.items() if name not in NO_MULTICAST}
    script = code.format(names=list(NO_MULTICAST))
    done = subprocess.run([sys.executable, "-c", script], env=bare, capture_output=True, text=True, check=True)
    assert done.stdout.split() == str(list(NO_MULTICAST.values())).split()
