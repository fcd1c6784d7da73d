"""Builders that several test modules share."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lorabench.measure.arm import Arm, build
from lorabench.plan import registry
from lorabench.plan.compose import DEFAULTS, SweepConfig, load_config, plan
from lorabench.plan.design import Cell
from lorabench.plan.workload import Sample, Workload
from lorabench.run.record import ARMS
from lorabench.run.worker import ArmResult, Job, Measurement

PEFT = ("sdpa", "adamw_foreach", "padding")


def config(*overrides: str) -> SweepConfig:
    return load_config(list(overrides))


def gate_of(cell: Cell, folder: Path, dtype: Callable[[str], str]) -> Measurement:
    """A measurement of the cell in this process, its numerics gate not yet run. folder: of the kept twins; dtype: the
    machine's answer to the dtype that a model wants."""
    machine: Any = SimpleNamespace(device="cpu", dtype=dtype)
    job = Job(
        cell, machine, ARMS, rounds=1, gate=True, ceiling_tflops=None, log="", twins=str(folder), spawned=0.0, sweep=0
    )
    measurement = Measurement(job, tell=lambda text: None)
    measurement.result.arms = {name: ArmResult() for name in ARMS}
    return measurement


def cells(*overrides: str) -> list[Cell]:
    """The cells of a sweep of tiny-llama with these overrides."""
    return plan(config("models=[tiny-llama]", "trials=3", "workload=2x16", *overrides), "cpu").cells


def arm(
    *names: Any,
    model: str = "tiny-llama",
    samples: list[Sample] | None = None,
    workload: Workload | None = None,
    dtype: torch.dtype = torch.float32,
    overrides: tuple[str, ...] = (),
    device: str = "cpu",
    **kwargs: Any,
) -> Arm:
    """An arm of a tiny model, with the ablations of these names and no others."""
    spec = plan(config(f"models=[{model}]", *overrides), "cpu").cells[0].model
    feed = workload or Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
    drawn = samples or feed.draw(spec.hf_config().vocab_size, 0)
    ablations = [registry.ablation(name) for name in names]
    return build("candidate", spec, feed, drawn, ablations, dtype=dtype, device=torch.device(device), seed=0, **kwargs)


@contextlib.contextmanager
def benchmark(name: str) -> Iterator[Any]:
    """The script benchmarks/NAME.py as a module, under its name while it is in use: dataclasses look theirs up."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def sweep(*overrides: str, cwd: Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m lorabench.sweep` as a user would."""
    command = [sys.executable, "-m", "lorabench.sweep", *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, **kwargs)


def random_samples(lengths: list[int], vocabulary: int = 256, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [Sample(tokens, list(tokens)) for tokens in drawn]


def md_rows(text: str, title: str) -> list[dict[str, str]]:
    """The first table below a heading of summary.md, cells unescaped."""
    block = text.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[re.sub(r"\\(.)", r"\1", c.strip()) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


CPU = DEFAULTS["cpu"]
