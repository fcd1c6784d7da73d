"""Where a step's time goes: each candidate of a sweep alone, timed, then one step under torch.profiler, by kernel.

    python benchmarks/profile_step.py suite=peers 'models=[llama-3.1-8b@4x2048]' \\
        'ablations=[frozen_limit,[lora_kernels,adapters_in_compute_dtype]]'
    python benchmarks/profile_step.py 'models=[tiny-llama@2x16]' 'ablations=[lora_kernels]' dtype=float32

Arguments are the sweep's (`python -m lorabench.sweep --help`). All arms run in this one process, one after another, so
that their kernels can be compared; toggles whose patches outlive their model (liger, unsloth) belong into a process of
their own. There is no gate here: a sweep says whether the numbers are right. To keep the output with its environment:
`python -m lorabench.log_command FILE python benchmarks/profile_step.py …`
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from lorabench.contract.arm import Arm
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.names import NameUnknown
from lorabench.measure import memory, trial
from lorabench.measure.kind import request_of
from lorabench.measure.machine import describe
from lorabench.measure.profile import device_spans, union, waits
from lorabench.plan.compose import ConfigError, load_config, plan

LARGEST = 45  # kernels that are listed; what is left is a line of its own
LONGEST = 8  # waits of the GPU, for the host mostly, that are listed


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        config = load_config(arguments)
        machine = describe()
        cells = plan(config, machine.device).cells
    except (ConfigError, NameUnknown) as error:
        print(f"lorabench: {error}", file=sys.stderr)
        return 2
    device, dtype = torch.device(machine.device), getattr(torch, machine.dtype(config.dtype))
    shared = sorted({a.name for cell in cells for a in cell.candidate if a.global_patch})
    if shared and len(cells) > 1:
        print(f"lorabench: {', '.join(shared)} patches more than its own model; name one candidate", file=sys.stderr)
        return 2
    print("ms, medians of the trials; then one profiled step. Forward and backward together: fb.")
    for cell in cells:
        if not cell.toggles and len(cells) > 1:
            continue  # the reference: asked for by ablations=[]
        for line in of(cell, dtype, device):
            print(line, flush=True)
        gc.collect()  # the arm is gone; the next one's peak must not hold what it left behind
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def of(cell: Cell, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """The lines of one candidate."""
    held = memory.allocated(device)
    arm = kind(cell.kind).build(request_of(cell, "candidate", dtype, device))
    trial.warm_up(arm, cell.warmup)
    arm.kind.clear(arm)
    used = memory.measure(arm, memory.allocated(device) - held, 0)
    done = [trial.run_trial(arm) for _ in range(cell.trials)]

    def median(phase: str, times: str) -> float:
        return statistics.median(getattr(t, times).get(phase, 0.0) for t in done)

    on_device, on_host = ({p: median(p, times) for p in arm.kind.phases} for times in ("device_ms", "host_ms"))
    yield f"\n{cell.title}"
    yield "  " + "  ".join(f"{p} {on_device[p]:.1f} (host {on_host[p]:.1f})" for p in arm.kind.phases)
    forward_backward = sum(on_device.get(p, 0.0) for p in ("forward", "backward"))
    yield (
        f"  fb {forward_backward:.1f}  loss {done[-1].loss:.4f}"
        + (
            f"  static {used.static / 2**30:.2f} GiB, peak {used.peak / 2**30:.2f} GiB"
            if used.static and used.peak
            else ""
        )
    )
    yield from by_kernel(arm)


def by_kernel(arm: Arm) -> Iterator[str]:
    """One step under the profiler: on a GPU its kernels and the time between them, on a CPU the operators."""
    cuda = arm.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        trial.run_trial(arm)
        trial.synchronize(arm.device)
    if cuda:
        spans = device_spans(trace)
        whole = max(end for _, end, _ in spans) - spans[0][0]
        idle = whole - union(spans)
        yield f"  from the first kernel to the last {whole / 1e6:.1f}, idle {idle / 1e6:.1f}, {len(spans)} kernels"
        for wait, before, after in waits(spans)[:LONGEST]:
            yield f"  idle {wait / 1e3:9.2f} µs  {before[:50]} … {after[:50]}"
    took = "device_time_total" if cuda else "self_cpu_time_total"
    rows = sorted(trace.key_averages(), key=lambda row: -getattr(row, took))
    total = sum(getattr(row, took) for row in rows)
    for row in rows[:LARGEST]:
        time = getattr(row, took)
        yield f"  {time / 1e3:9.2f} ms {time / total:6.1%} {row.count:5d} × {time / row.count:9.1f} µs  {row.key[:120]}"
    rest = rows[LARGEST:]
    left = sum(getattr(row, took) for row in rest)
    yield f"  {left / 1e3:9.2f} ms {left / total:6.1%} {sum(row.count for row in rest):5d} others"
    yield f"  {total / 1e3:9.2f} ms in all"


if __name__ == "__main__":
    raise SystemExit(main())
