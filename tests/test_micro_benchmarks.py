"""benchmarks/micro: every form runs, groups hold a kernel and a phase with its baselines, rates are what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import benchmark

ROOT = Path(__file__).resolve().parents[1]
MICRO = ROOT / "benchmarks/micro"


@pytest.fixture(scope="module")
def micro():
    spec = importlib.util.spec_from_file_location("micro_conftest", MICRO / "conftest.py")
    assert spec and spec.loader
    before, module = list(sys.path), importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Within a worker of xdist pytest-benchmark would measure nothing.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done


@pytest.mark.exhaustive
def test_every_form_runs_at_small_shapes():
    assert "100%" in run("benchmarks/micro", "--benchmark-disable").stdout


@pytest.mark.exhaustive
def test_groups_have_their_baseline_and_rates(tmp_path):
    """The comparison with an earlier run, as docs/micro-benchmarks.md says it, too."""
    store = f"--benchmark-storage=file://{tmp_path}/kept"
    files = [f"benchmarks/micro/bench_{name}.py" for name in ("rms_norm", "projection", "linear_cross_entropy")]
    run(*files, "--benchmark-save=before", store)
    again = run(*files, "--tokens=32", "--benchmark-compare", store, f"--benchmark-json={tmp_path / 'found.json'}")
    assert "(0001_before)" in again.stdout and "(NOW)" in again.stdout
    found: dict[str, dict] = {}
    written = json.loads((tmp_path / "found.json").read_text())
    said = [written[name] for name in ("tokens", "copy_gbs", "tflops")]
    assert written["machine"]["device"] == "cpu" and said == [32, None, None]
    for b in written["benchmarks"]:
        found.setdefault(b["group"], {})[b["extra_info"]["form"]] = b["extra_info"] | {"median": b["stats"]["median"]}
    norm, product = found["rms_norm: rms_norm, forward"], found["projection: projection, linear=o, forward+backward"]
    assert set(norm) == {"ours", "torch", "peft"} and set(product) == {"one", "addmm", "peft", "bare"}
    assert set(found["linear_cross_entropy: linear_cross_entropy, forward"]) == {"ours", "torch"}
    ours = norm["ours"]
    assert ours["least_bytes"] == 4 * 32 * 64 * 4, "x, residual, h and y of 32 x 64 in float32"
    assert ours["gb_per_s"] == pytest.approx(ours["least_bytes"] / ours["median"] / 1e9)
    assert product["one"]["flops"] == 2 * 2 * 32 * 64**2
    assert product["one"]["tflop_per_s"] == pytest.approx(product["one"]["flops"] / product["one"]["median"] / 1e12)
    assert all(info["share_of_ceiling"] is None for group in found.values() for info in group.values()), "on a CPU"


def test_rates_and_shares(micro):
    assert micro.rates(0.5, 10**9, None, 4.0, 100.0) == {
        "gb_per_s": 2.0, "tflop_per_s": None, "share_of_ceiling": 0.5,
    }  # fmt: skip
    found = micro.rates(0.5, None, 10**13, 4.0, 100.0)
    assert found == {"gb_per_s": None, "tflop_per_s": 20.0, "share_of_ceiling": 0.2}
    assert micro.rates(0.5, 10**9, 10**13, None, None)["share_of_ceiling"] is None, "an unknown limit, no share"


def test_a_group_is_all_but_the_form(micro):
    def item(**parameters):
        return SimpleNamespace(
            path=MICRO / "bench_rms_norm.py", originalname="test_rms_norm", callspec=SimpleNamespace(params=parameters)
        )

    assert micro.group_of(item(form="ours", phase="forward")) == "rms_norm: rms_norm, forward"
    assert micro.group_of(item(tile="fused", p=16)) == "rms_norm: rms_norm, p=16"


def test_a_phase_is_a_fresh_forward_each_time(micro):
    x, forwards = torch.ones(3, requires_grad=True), []

    def square():
        forwards.append(torch.is_grad_enabled())
        return x * x

    both, forward = micro.Phase("forward+backward"), micro.Phase("forward")
    call = both(square, (x,))
    call(), call()
    forward(square, (x,))()
    assert forwards == [True, True, False]
    assert (both.least(3, 5), forward.least(3, 5)) == (8, 3)


def test_the_devices_clock_goes_between_pairs_of_readings_only(micro, monkeypatch):
    recorded = []

    class Event:
        def __init__(self, **_):
            self.at = None

        def record(self):
            self.at = len(recorded)
            recorded.append(self)

        def synchronize(self):
            assert self.at is not None

        def elapsed_time(self, end):
            return 2.0 * (end.at - self.at)

    spun = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    monkeypatch.setattr(micro, "CACHE", 8)
    clock = micro.DeviceClock()
    for _ in range(3):
        start = clock()
        assert clock() - start == pytest.approx(0.002)
    assert spun == [micro.SPIN] * 3 and len(recorded) == 6


def test_the_table_has_the_fastest_form_of_ours_and_the_others(tmp_path, capsys):
    def timed(group, form, us, least=None, flops=None, share=None):
        extra = {"form": form, "least_bytes": least, "flops": flops, "share_of_ceiling": share}
        return {"group": group, "stats": {"median": us / 1e6}, "extra_info": extra}

    every = [
        timed("concat_operand: s", "fused", 30, 3 * 2**20), timed("concat_operand: s", "torch", 40, 3 * 2**20),
        timed("concat_operand: s", "fused_small", 20, 3 * 2**20, share=0.5),
        timed("adapter: load_layer", None, 8, 2**20), timed("projection: o", "one", 500, flops=10**12),
        timed("projection: o", "bare", 400, flops=10**12), timed("nf4: dequantize", "torch", 9, 2**20),
        timed("job_columns: keep", "ours", 9),
    ]  # fmt: skip
    run = {
        "benchmarks": every,
        "machine": {"name": "a GPU"},
        "tokens": 64,
        "copy_gbs": 1.0,
        "tflops": 2.0,
        "version": "5",
    }
    (tmp_path / "micro.json").write_text(json.dumps(run))
    with benchmark("kernel_table") as script:
        script.main([str(tmp_path / "micro.json"), "--json", str(tmp_path / "kernel_table.json")])
    shown = capsys.readouterr().out.splitlines()[2:]
    assert shown == [
        "| `concat_operand` | s, fused_small | 3 MiB | 20.0 | 157 GB/s | 50 % | torch 40.0 |",
        "| `adapter` | load_layer | 1 MiB | 8.0 | 131 GB/s |  |  |",
        "| `projection` | o, one | 1.00 TFLOP | 500.0 | 2000 TFLOP/s |  | bare 400.0 |",
    ], "a group without a form of ours, or without a least, has no row"
    made = json.loads((tmp_path / "kernel_table.json").read_text())
    assert {name: made[name] for name in made if name != "rows"} == {n: run[n] for n in made if n != "rows"}
    assert [row["bytes"] for row in made["rows"]] == [3 * 2**20, 2**20, 0]
