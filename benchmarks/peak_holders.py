"""What holds the peak of a step: every allocation that is alive when most is, by the lines of Python that made it.

    python benchmarks/peak_holders.py FOLDER --tokens 65536 'reference=[sdpa,adamw_fused,padding,lora_kernels]'

What is no option is an argument of the sweep, over suite=long_context; the step is that of its reference. The second
step of the process is looked at, in which nothing is pinned or tuned any more. Writes FOLDER/peak_holders.csv, a row
for each place, the largest first: MiB, how many allocations, columns (bytes for each token, over the bytes of a hidden
column in the step's dtype), and the frames of Python, the innermost first. What was there before the step is one row.
An operator's own backward has no frame of Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lorabench.contract.kind import kind
from lorabench.measure import trial
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.plan.compose import load_config, plan

MIB = 2**20
FRAMES = 5  # of an allocation, that are shown
ENTRIES = 1_000_000  # allocations and frees that are kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("sweep", nargs="*", help="arguments of the sweep")
    options = parser.parse_intermixed_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, whose allocator keeps a history")
    machine, models = describe(), f"models=[{options.model}@1x{options.tokens}]"
    cell = plan(load_config(["suite=long_context", *options.sweep, "ablations=[]", models]), machine.device).cells[0]
    dtype, device = getattr(torch, machine.dtype(cell.model.dtype)), torch.device(machine.device)
    arm = kind(cell.kind).build(request_of(cell, "candidate", dtype, device))
    trial.run_trial(arm)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python", clear_history=True)
    trial.run_trial(arm)
    torch.cuda.synchronize(device)
    trace = torch.cuda.memory._snapshot(device).get("device_traces", [])[device.index or 0]
    torch.cuda.memory._record_memory_history(enabled=None)
    found = holders(trace, before)
    found.insert(2, "columns", (found.mib * MIB / options.tokens / dtype.itemsize / _hidden(arm)).round(2))
    options.folder.mkdir(parents=True, exist_ok=True)
    found.to_csv(options.folder / "peak_holders.csv", index=False)
    print(found.head(30).to_string(index=False, max_colwidth=150))


def _hidden(arm: Any) -> int:
    """The model's columns."""
    return next(module.config.hidden_size for module in arm.model.modules() if hasattr(module, "config"))


def holders(trace: Iterable[Mapping[str, Any]], before: int = 0) -> pd.DataFrame:
    """Of an allocator's `trace`: what is alive where the sum is largest, by the frames that allocated it.

    `before`: bytes that were allocated when the trace began.
    """
    alive: dict[int, Mapping[str, Any]] = {}
    now = most = before
    peak: list[Mapping[str, Any]] = []
    grown = False  # whether what is alive is the most so far, and not written down
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
            grown = grown or now > most
            most = max(most, now)
        elif event["action"] == "free_completed":
            if grown:
                peak, grown = list(alive.values()), False
            alive.pop(event["addr"], None)
            now -= event["size"]
    peak = list(alive.values()) if grown else peak
    rows = [(event["size"], _place(event.get("frames", ()))) for event in peak]
    rows.append((most - sum(size for size, _ in rows), "there before the step"))
    by_place = pd.DataFrame(rows, columns=["bytes", "place"]).groupby("place")["bytes"].agg(["sum", "count"])
    by_place = by_place.sort_values("sum", ascending=False).reset_index()
    return pd.DataFrame({"mib": (by_place["sum"] / MIB).round(1), "count": by_place["count"], "place": by_place.place})


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    shown = [frame for frame in frames if frame["filename"].endswith(".py")][:FRAMES]
    return " < ".join(f"{Path(f['filename']).stem}:{f['line']} {f['name']}" for f in shown) or "no frame of Python"


if __name__ == "__main__":
    main()
