"""Builders that several test modules share."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sweep_server import Server

from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.family import Family, Stack
from lorabench.contract.job import ADAPTER, jobs_of
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import ONE, Ranks
from lorabench.contract.workload import Workload
from lorabench.measure.judging import numerics
from lorabench.measure.kind import Request
from lorabench.measure.seat import Ready, Seat, Seating
from lorabench.plan import registry
from lorabench.plan.compose import DEFAULTS, SweepConfig, load_config, plan
from lorabench.record.schema import ArmRecord
from lorabench.run.runner import record_of

PEFT = ("sdpa", "adamw_foreach", "padding")
MACHINE = Machine(  # a small one that measures in float32
    device="cpu", name="this one", cpu="this one", cores=2, memory_bytes=1 << 30, os="", python="", packages={},
    native_bfloat16=False,
)  # fmt: skip


def config(*overrides: str) -> SweepConfig:
    return load_config(list(overrides))


def seat_of(cell: Cell, scratch: Path, machine: Any = None) -> tuple[Seat, Stack]:
    """(a seat in this process, nothing done in it yet but its imports; the cell's candidate). `machine`: None is a CPU
    that computes in float32."""
    machine = machine or SimpleNamespace(device="cpu", dtype=lambda wanted: "float32")
    family = Family((cell,))
    seat = Seat(Seating(family, machine, False, None, str(scratch)), tell=lambda text: None)
    seat.open()
    return seat, family.stacks[-1]


def gate_of(cell: Cell, scratch: Path, machine: Any = None) -> Ready:
    """What the gate says of the cell's candidate, in this process. Raises WrongNumerics, with what was found in it."""
    seat, stack = seat_of(cell, scratch, machine)
    into = Ready()
    seat._gate(stack, into)
    return into


def cells(*overrides: str) -> list[Cell]:
    """The cells of a sweep of tiny-llama with these overrides."""
    return plan(config("models=[tiny-llama]", "trials=3", "workload=2x16", *overrides), "cpu").cells


def only(request: Request, index: int) -> Request:
    """The same with one of its jobs, as if it were the only one on its base."""
    job = replace(request.jobs[index], name="", adapter=ADAPTER)
    return replace(request, jobs=[job], samples=[request.samples[index]])


def request(
    *names: Any,
    model: str = "tiny-llama",
    samples: list[Sample] | None = None,
    workload: Workload | None = None,
    dtype: torch.dtype = torch.float32,
    overrides: tuple[str, ...] = (),
    device: str = "cpu",
    layers: int | None = None,
    upcast: bool = False,
    ranks: Ranks = ONE,
    scratch: Path = Path(),
    depth: int | None = None,
) -> Request:
    """What an arm of a tiny model is built from, with the ablations of these names and no others. `depth`: of a model
    that has three layers; unless a test says so it has two on a CPU, between which what passes from one to the next
    shows as well."""
    cell = plan(config(f"models=[{model}]", *overrides), "cpu").cells[0]
    feed = workload or Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
    cell = replace(cell, workload=feed, model=_of_depth(cell.model, depth or (2 if device == "cpu" else 3)))
    ablations = tuple(registry.ablation(name) for name in names)
    drawn = [samples] if samples else kind(cell.kind).samples(cell)
    return Request(
        name="candidate", cell=cell, model=cell.model, jobs=jobs_of(cell.model, feed, 0), samples=drawn,
        ablations=ablations, dtype=dtype, device=torch.device(device), seed=0, scratch=scratch, layers=layers,
        upcast=upcast, ranks=ranks,
    )  # fmt: skip


def _of_depth(model: ModelSpec, depth: int) -> ModelSpec:
    if model.config.get("num_hidden_layers") != 3:
        return model
    return model.model_copy(update={"config": {**model.config, "num_hidden_layers": depth}})


def arm(*names: Any, **kwargs: Any) -> Arm:
    """An arm of a tiny model: see `request`."""
    wanted = request(*names, **kwargs)
    return kind(wanted.cell.kind).build(wanted)


deep_arm = functools.partial(arm, depth=3)  # what is counted by the layer, or needs one between the first and the last


def shared_step(*names: Any, **kwargs: Any) -> numerics.Outcome:
    """One step of an arm under the dropout masks that the gate's models share."""
    made = arm(*names, **kwargs)
    numerics.share_masks(made.model)
    return numerics.one_step(made)


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


def word_model(folder: Path, hidden: int = 32, intermediate: int = 48) -> tuple[Path, Path]:
    """(folder of a tiny Llama with a tokenizer of whole words, a text of 40 rows), in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<unk>", "</s>", *(f"w{n}" for n in range(60))])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=62, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)  # of some models no loss differs in float32 with our kernels
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    rows = [" ".join(f"w{n}" for n in random.integers(0, 60, random.integers(5, 12))) for _ in range(40)]
    lines = [json.dumps({"question": r, "answer": r}) + "\n" for r in rows]
    (folder / "text.jsonl").write_text("".join(lines))
    return folder / "model", folder / "text.jsonl"


def sweep(
    *overrides: str, cwd: Path, timeout: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m lorabench.sweep`, from a process that has imported what it needs."""
    return module("lorabench.sweep", *overrides, cwd=cwd, timeout=timeout, env=env)


def module(
    name: str, *arguments: str, cwd: Path, timeout: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m NAME`, from such a process, in which no test has run."""
    environment = dict(os.environ if env is None else env)
    if (server := _sweep_server()).can(environment):
        return server.run(arguments, cwd, environment, timeout, module=name)
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, env=env)


def killed_sweep(
    *overrides: str, cwd: Path, when: Callable[[], bool], timeout: float, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """The same, killed as soon as `when` says so."""
    assert _sweep_server().can(env)
    return _sweep_server().run(overrides, cwd, env, timeout, when)


@functools.cache
def _sweep_server() -> Server:
    return Server()


def installed(folder: Path, package: str, files: Mapping[str, Path], points: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a third party's package of toggles is installed, really: a wheel, pip, entry points.

    `files` by their place in the package, `points` the class of each toggle as `module:Class`.
    """
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    lines = "".join(f"{name} = {where}\n" for name, where in points.items())
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, file in files.items():
            archive.write(file, name)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", f"[lorabench.ablations]\n{lines}")
        archive.writestr(f"{info}/RECORD", "")
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(command, check=True, capture_output=True)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


def refused(cell: Cell, session: str, status: str, reason: str) -> ArmRecord:
    """The record of a cell's candidate that was not measured."""
    family = Family((cell,))
    return record_of(family, family.stacks[-1], session, status=status, reason=reason)


class InProcess:
    """Workers for a Runner whose seats are in this process."""

    def open(self, seating: Seating, timeout_s: float, tell: Any, log: Path) -> Any:
        return SeatHere(Seat(seating, tell))


class SeatHere:
    """The runner's side of a seat in this process."""

    ranks = ()
    unseen_s = 0.0

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def ask(self, what: str, *arguments: Any, ranks: int = 1) -> list[Any]:
        return [self.seat.call(what, *arguments)]

    def send(self, what: str, *arguments: Any, ranks: int = 1) -> None:
        self.answer = self.ask(what, *arguments)

    def answers(self, ranks: int = 1) -> list[Any]:
        return self.answer

    def turn(self, name: str, numbers: list[int], on: bool, each: bool, ranks: int) -> list[Any]:
        return [self.seat.call("turn", name, numbers, on, each)]

    def close(self) -> None:
        """Nothing to end."""


def workers_in(folder: Path) -> list[str]:
    """Processes whose output goes into a worker's log of this results folder, of any rank."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1").startswith(str(folder / ".worker.log")):
                found.append(process.name)
        except OSError:
            continue
    return found


def random_samples(lengths: list[int], vocabulary: int = 256, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [Sample(tokens, list(tokens)) for tokens in drawn]


def md_rows(text: str, title: str) -> list[dict[str, str]]:
    """The first table below a heading of summary.md, cells unescaped; of a group in parts, those of all its parts."""
    parts = rf"^## {re.escape(title)}(?:, references of [^\n]* ms|, without times)?\n\n(.*?)(?:\n\n|\n?\Z)"
    rows: list[dict[str, str]] = []
    for block in re.findall(parts, text, re.MULTILINE | re.DOTALL):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        headings, _, *cells = [[re.sub(r"\\(.)", r"\1", c.strip()) for c in line] for line in lines]
        rows += [dict(zip(headings, row, strict=True)) for row in cells]
    assert rows, f"no table is called {title}"
    return rows


CPU = DEFAULTS["cpu"]
