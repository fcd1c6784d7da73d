"""The kind `load`, its toggles and its gate; what every kind has to say; and sweeps that mix kinds."""

from __future__ import annotations

import pytest
import torch
from helpers import InProcess, cells, config

from lorabench.contract.kind import kind, registered
from lorabench.contract.names import NameUnknown
from lorabench.measure.kind import Kind, request_of
from lorabench.measure.kinds import load
from lorabench.measure.machine import describe
from lorabench.measure.trial import run_trial
from lorabench.plan.compose import ConfigError, plan
from lorabench.plan.design import refusal
from lorabench.run.runner import Runner

CPU = torch.device("cpu")


def records(tmp_path, *overrides):
    planned = plan(config("trials=3", "warmup=1", "dtype=float32", *overrides), "cpu").cells
    with Runner(InProcess(), describe(), None, "test", 60, tmp_path) as runner:
        return [runner.measure(cell) for cell in planned]


def loading(tmp_path, *names, workload="warm_cache"):
    wanted = f"ablations=[{','.join(names)}]"
    cell = cells("kind=load", f"workload={workload}", wanted)[-1]
    return kind("load").build(request_of(cell, "candidate", torch.float32, CPU, tmp_path))


def test_there_are_five_kinds_and_each_says_its_phases():
    found = registered()
    assert {n: k.phases for n, k in found.items()} == {
        "train": ("forward", "backward", "step"),
        "op": ("forward", "backward"),
        "limit": ("forward", "backward"),
        "load": ("read", "place"),
        "evaluate": ("generate", "decode", "metrics", "score"),
    }
    assert [n for n, k in found.items() if not k.candidate] == ["limit"]
    assert all(isinstance(k, Kind) and k.summary and k.total for k in found.values())
    with pytest.raises(NameUnknown, match="did you mean evaluate"):
        kind("evaluation")


def test_a_wrong_kind_is_one_line():
    with pytest.raises(ConfigError, match="no kind named 'lode'; did you mean load"):
        cells("kind=lode")
    with pytest.raises(ConfigError, match="no kind named 'eval'"):
        cells("models=[eval:tiny-llama]")


@pytest.mark.parametrize("workload", ["warm_cache", pytest.param("cold_cache", marks=pytest.mark.exhaustive)])
def test_loading_is_measured_and_every_tensor_is_compared_bit_for_bit(tmp_path, workload):
    """Another file system than a disk's may refuse to forget; then the record says so."""
    again, parallel = records(tmp_path, "kind=load", "models=[tiny-llama]", f"workload={workload}",
                              "ablations=[parallel_reading]")  # fmt: skip
    refused = [record for record in (again, parallel) if record.status == "unsupported"]
    if workload == "cold_cache" and refused:
        assert all("does not forget" in record.reason for record in refused)
        return
    for record in (again, parallel):
        assert (record.status, record.kind, record.pairing) == ("ok", "load", "paired"), record.reason
        assert list(record.phases) == ["read", "place", "total"]
        assert record.numerics.passed and record.numerics.unequal == 0 and record.numerics.tensors == 30
        assert record.tokens == {} and record.memory["candidate"].weights > 250_000
        held = record.memory["candidate"].weights / 1e9
        assert record.roofline["candidate"]["read"].gbytes == pytest.approx(held, rel=0.02)
    assert 1 <= parallel.applied["parallel_reading"] <= 4


def test_a_checkpoint_is_several_files_made_once(tmp_path):
    one, two = loading(tmp_path), loading(tmp_path, "parallel_reading")
    assert one.source == two.source and len(one.source.files) >= load.SHARDS - 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda loaded, name: loaded[name].view(torch.uint8)[-1].bitwise_xor_(1), "1 of 30 tensors"),
        (lambda loaded, name: loaded.pop(name), "1 of 29 tensors"),
        (lambda loaded, name: loaded.update(more=torch.zeros(1)), "1 of 31 tensors"),
        (lambda loaded, name: loaded.update({name: loaded[name].double()}), "1 of 30 tensors"),
    ],
    ids=["one bit", "missing", "added", "dtype"],
)
def test_one_bit_that_differs_is_no_speed(tmp_path, spoil, says):
    arm, own = loading(tmp_path), kind("load")

    def run():
        run_trial(arm)
        name = next(n for n, t in arm.loaded.items() if t.dim() == 1)
        arm.loaded = {n: t.clone() for n, t in arm.loaded.items()}
        spoil(arm.loaded, name)

    found = own.first_trial(arm, run, None)[""]
    right = own.first_trial(arm, lambda: run_trial(arm), None)[""]
    verdict = own.agree(None, None, right, found, torch.float32)
    assert not verdict.passed and own.explain(verdict).startswith(says)
    assert own.agree(None, None, right, right, torch.float32).passed


def test_a_sweep_mixes_kinds_and_each_toggle_goes_where_it_is_known():
    models = "models=[tiny-llama@2x16,load:tiny-llama,evaluate:tiny-llama@2x16,linear-8x8@1x4]"
    toggles = "ablations=[eager,parallel_reading,no_kv_cache,frozen_limit,bare_linear,liger]"
    made = plan(config(models, toggles), "cpu")
    rows = [(c.kind, c.workload.name, [t.name for t in c.toggles]) for c in made.cells]
    assert rows == [
        ("train", "2x16", []), ("train", "2x16", ["eager"]), ("limit", "2x16", ["frozen_limit"]),
        ("train", "2x16", ["liger"]),
        ("load", "warm_cache", []), ("load", "warm_cache", ["parallel_reading"]),
        ("evaluate", "2x16", []), ("evaluate", "2x16", ["eager"]), ("evaluate", "2x16", ["no_kv_cache"]),
        ("op", "1x4", []), ("limit", "1x4", ["bare_linear"]),
    ]  # fmt: skip
    assert len({c.key for c in made.cells}) == len(made.cells)


def test_what_a_kind_cannot_measure_is_known_before_a_start():
    machine = describe()
    by_kind = {
        "load": ("workload=2x16", "takes warm_cache or cold_cache"),
        "train": ("workload=warm_cache", "has no samples to train on"),
        "op": ("workload=2x16", "is a whole model"),
        "evaluate": ("workload=two_jobs", "one job's checkpoint"),
    }
    for name, (workload, words) in by_kind.items():
        status, reason = refusal(cells(f"kind={name}", workload)[0], machine)
        assert status == "unsupported" and words in reason
    one = cells("kind=load", "workload=warm_cache", "weights=smollm2-135m-instruct", "models=[smollm2-135m]")[0]
    assert "random weights that it saves itself" in refusal(one, machine)[1]
