"""What a step of n adapters takes beside one adapter's over as many tokens, in the same rounds, both on our kernels.

    python -m lorabench.log_command FOLDER/log.txt python benchmarks/adapters_step.py FOLDER
    python benchmarks/adapters_step.py FOLDER --model tiny-llama --seq-len 16 --samples 4 --adapters 2 --dtype float32

One adapter has all samples in one micro-batch, by `lora_kernels`; of n adapters each has an n-th of them in a joint
step, by `fused_multi_lora`. --captured replays both as CUDA graphs. A sweep cannot hold these steps against each
other, because its arms all train the same jobs; its gate says whether their numbers are right. Writes
adapters_step.csv: how many times one adapter's step a step takes, with its 95 % interval, the same of one adapter's
step against itself, and both medians in milliseconds, from forward to update.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from lorabench.contract.arm import Arm
from lorabench.contract.kind import kind
from lorabench.measure import trial
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.plan.compose import load_config, plan
from lorabench.record.contrast import MIN_TRIALS, contrast

SHARED = ["sdpa", "adamw_fused", "padding", "adapters_in_compute_dtype"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16, help="of one step, of all its adapters together")
    parser.add_argument("--adapters", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trials", type=int, default=15)
    options = parser.parse_args(argv)
    if wrong := [n for n in options.adapters if n < 2 or options.samples % n]:
        parser.error(f"--adapters {wrong[0]}: expected at least 2 that divide the {options.samples} samples of a step")
    if options.trials < MIN_TRIALS:
        parser.error(f"--trials {options.trials}: expected at least {MIN_TRIALS}")
    one, rows = built(options, 1), []
    warm = trial.warm_up(one, 3)[-1].total_ms
    for adapters in options.adapters:
        several = built(options, adapters)
        trial.warm_up(several, 3)
        arms = {"one": one, "again": one, "several": several}
        found = trial.run_rounds(arms, options.trials, seed=adapters, a_turn=trial.trials_a_turn(warm))
        ms = {name: [sum(turn) for turn in zip(*own.ms.values(), strict=True)] for name, own in found.items()}
        row = {"adapters": adapters, "rounds": options.trials}
        for name, times in (("times_one_adapter", ms["several"]), ("same", ms["again"])):
            between = contrast(times, ms["one"], paired=True)
            assert between is not None  # there are as many rounds
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), between.speedup, strict=True))
        rows.append(row | {"one_ms": statistics.median(ms["one"]), "ms": statistics.median(ms["several"])})
        print(*(f"{name} {value:.4g}" for name, value in rows[-1].items()), sep=", ", flush=True)
        options.folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(options.folder / "adapters_step.csv", index=False, float_format="%.5g")
        del arms, several
        gc.collect()  # its adapters, and a captured one's pool


def built(options: argparse.Namespace, adapters: int) -> Arm:
    """The arm of that many adapters."""
    samples = options.samples // adapters
    sizes = f"seq_len: {options.seq_len}, samples: {samples}, batch_size: {samples}"
    jobs = f"{{jobs_1: {{{sizes}, jobs: [{{name: job, copies: {adapters}}}]}}}}"
    workload = jobs if adapters > 1 else f"{{4x2048: {{{sizes}}}}}"
    way = "lora_kernels" if adapters == 1 else "fused_multi_lora"
    reference = [*SHARED, way, *(["cuda_graph"] if options.captured else [])]
    config = load_config(
        [f"models=[{options.model}]", f"workload={workload}", "ablations=[]",
         f"dtype={options.dtype}", f"reference=[{','.join(reference)}]"]
    )  # fmt: skip
    machine = describe()
    cell = plan(config, machine.device).cells[0]
    dtype = getattr(torch, machine.dtype(config.dtype))
    return kind(cell.kind).build(request_of(cell, "reference", dtype, torch.device(machine.device)))


if __name__ == "__main__":
    main()
