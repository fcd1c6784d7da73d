"""How long one sample may be: each arm's peak at a few lengths, and by a line where memory is full.

    python -m lorabench.log_command FOLDER/log.txt python benchmarks/longest_sample.py FOLDER \\
        --tokens 8192,16384,32768 --memory-gib 24,48,80,141 --confirm-gib 24 'ablations=[tiled_mlp]'
    python benchmarks/longest_sample.py FOLDER --model tiny-llama --tokens 64,128 reference=long_cpu dtype=float32

What is no option is an argument of the sweep (`python -m lorabench.sweep --help`), over suite=long_context. Each arm,
the reference among them, runs in a process of its own: a step at each length from the first on, until one runs out of
memory. Shorter ones may have their peak elsewhere in the step, so the line goes through the two longest that ran.
--memory-gib is what torch's allocator has; the driver takes some more. Each of --confirm-gib is tried: under an
allocator of no more, a step 3 % below the length that the line says, and one 6 % above it. A step is not repeated
unless --steps says so, so its time has what an arm does once, as choosing kernels and pinning host memory, and is no
measurement of a speed. Writes steps.csv, a row a step, and longest_sample.csv, a row for each arm and memory;
--of-steps makes the second of the first and runs nothing. There is no gate here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.memory_fit import GIB
from lorabench.measure import memory, trial
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.plan.compose import load_config, plan

BELOW, ABOVE = 0.97, 1.06  # of the length that the line says: where a step is to fit, and where not
ROUND = 128  # tokens; lengths that are tried are multiples of it
OK, FULL = "ok", "out of memory"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=numbers, default=[8192, 16384, 32768])
    parser.add_argument("--memory-gib", type=numbers, default=[24, 48, 80, 141])
    parser.add_argument("--confirm-gib", type=numbers, default=[])
    parser.add_argument("--steps", type=int, default=1, help="at each length; the last one's time and peak count")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # what a process of one arm is told
    parser.add_argument("--cap-gib", type=int, help=argparse.SUPPRESS)
    parser.add_argument("sweep", nargs="*", help="arguments of the sweep")
    parser.add_argument("--of-steps", action="store_true")
    options = parser.parse_intermixed_args(argv)
    if wrong := [n for n in (*options.tokens, options.steps) if n < 1]:
        parser.error(f"{wrong[0]}: expected lengths and a number of steps from 1 on")
    if options.only is not None or options.of_steps:
        write_longest(options) if options.of_steps else run(options)
        return
    if options.confirm_gib and not torch.cuda.is_available():
        parser.error("--confirm-gib: expected a CUDA device, whose allocator can be bounded")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "steps.csv").unlink(missing_ok=True)
    for arm, name in enumerate(map(name_of, cells(options, options.tokens[0]))):
        tried = in_a_process(options, arm, name, options.tokens)
        found = longest(tried, options.memory_gib)
        for tokens, gib in zip(found.tokens, found.memory_gib, strict=True):
            if gib in options.confirm_gib:
                around = [int(tokens * share) // ROUND * ROUND for share in (BELOW, ABOVE)]
                in_a_process(options, arm, name, around, gib)
        print(found.to_string(index=False, header=False), flush=True)
        write_longest(options)


def write_longest(options: argparse.Namespace) -> None:
    steps = pd.read_csv(options.folder / "steps.csv")
    longest(steps, options.memory_gib).to_csv(options.folder / "longest_sample.csv", index=False)


def longest(steps: pd.DataFrame, memory_gib: Sequence[int]) -> pd.DataFrame:
    """By arm and memory: the tokens that the line says; where it was tried, those that ran, and those that did not."""
    rows = []
    for arm, own in steps.groupby("arm", sort=False):
        ran = own[(own.status == OK) & own.cap_gib.isna()].sort_values("tokens").tail(2)
        if len(ran) < 2 or ran.peak_gib.iloc[1] <= ran.peak_gib.iloc[0]:
            continue
        more = (ran.tokens.iloc[1] - ran.tokens.iloc[0]) / (ran.peak_gib.iloc[1] - ran.peak_gib.iloc[0])
        for gib in memory_gib:
            tokens = max(0, int(ran.tokens.iloc[1] + (gib - ran.peak_gib.iloc[1]) * more))
            tried = own[own.cap_gib == gib]
            rows.append(
                {"arm": arm, "memory_gib": gib, "tokens": tokens, "ran_at": tried.tokens[tried.status == OK].max(),
                 "out_of_memory_at": tried.tokens[tried.status == FULL].min()}
            )  # fmt: skip
    return pd.DataFrame(rows, columns=["arm", "memory_gib", "tokens", "ran_at", "out_of_memory_at"])


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def cells(options: argparse.Namespace, tokens: int) -> list[Cell]:
    """The reference's and one of each candidate, over one sample of `tokens`."""
    config = load_config(["suite=long_context", *options.sweep, f"models=[{options.model}@1x{tokens}]"])
    return list({cell.tested: cell for cell in plan(config, describe().device).cells}.values())


def name_of(cell: Cell) -> str:
    return cell.tested if cell.toggles else "reference"


def in_a_process(
    options: argparse.Namespace, arm: int, name: str, tokens: Sequence[int], gib: int | None = None
) -> pd.DataFrame:
    """The steps of one arm; one that ends its process has a row that says so."""
    file = options.folder / "steps.csv"
    before = len(pd.read_csv(file)) if file.exists() else 0
    command = [sys.executable, __file__, str(options.folder), "--only", str(arm), "--model", options.model]
    command += ["--steps", str(options.steps), "--tokens", ",".join(map(str, tokens))]
    command += [] if gib is None else ["--cap-gib", str(gib)]
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}  # as a sweep's processes have it
    ended = subprocess.run([*command, *options.sweep], check=False, env=env).returncode
    if ended:
        write(options.folder, {"arm": name, "cap_gib": gib, "tokens": tokens[0], "status": f"ended with {ended}"})
    return pd.read_csv(file).iloc[before:]


def run(options: argparse.Namespace) -> None:
    """In a process of its own: the steps of the arm `options.only`."""
    machine = describe()
    device = torch.device(machine.device)
    if options.cap_gib is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.cap_gib * GIB / whole, 1.0))
    for tokens in options.tokens:
        cell = cells(options, tokens)[options.only]
        row = {"arm": name_of(cell), "cap_gib": options.cap_gib, "tokens": tokens}
        try:
            row |= step(cell, getattr(torch, machine.dtype(cell.model.dtype)), device, options.steps)
        except Exception as error:  # an arm that cannot run is a row
            known = memory.out_of_memory(error)
            row["status"] = FULL if known else f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        write(options.folder, row)
        print(json.dumps(row), flush=True)
        if row["status"] != OK:
            return
        memory.give_back(device)


def step(cell: Cell, dtype: torch.dtype, device: torch.device, steps: int) -> dict[str, str | float]:
    held = memory.allocated(device)
    arm = kind(cell.kind).build(request_of(cell, "candidate", dtype, device))
    for _ in range(steps - 1):
        trial.run_trial(arm)
    static, peaks = memory.allocated(device) - held, memory.Peaks(arm)
    ms = peaks.trial().total_ms
    used = peaks.memory(static, 0)
    peak = used.peak if used.peak is not None else used.process
    return {"status": OK, "seconds": round(ms / 1e3, 3), "peak_gib": round((peak or 0) / GIB, 3)}


def write(folder: Path, row: dict[str, object]) -> None:
    file = folder / "steps.csv"
    names = ("arm", "cap_gib", "tokens", "status", "seconds", "peak_gib")
    pd.DataFrame([{name: row.get(name) for name in names}]).to_csv(
        file, mode="a", header=not file.exists(), index=False
    )


if __name__ == "__main__":
    main()
