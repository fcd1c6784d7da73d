"""A rough estimate of a cell's time, for dry_run=true: FLOPs over a rate measured just now, plus the fixed costs."""

from __future__ import annotations

from typing import Any

from lorabench.plan.design import Cell

FIXED_S = 8.0  # process, two builds, gate (measured: docs/lab-notes.md)
EFFICIENCY = 0.35  # of a square GEMM's rate: what plain PEFT reaches on real models, small ones less


def rate(machine: Any) -> float:
    """FLOP/s of a square GEMM on this device, measured now."""
    import torch

    from lorabench.measure.roofline import ceilings

    found = ceilings(torch.device(machine.device), getattr(torch, machine.dtype("auto")))
    return 1e12 * next(iter(found["gemm_tflops"].values()))


def seconds(cell: Cell, flop_per_s: float) -> float:
    from lorabench.measure.roofline import flops

    vocabulary = cell.model.hf_config().vocab_size
    samples = cell.workload.model_copy(update={"kind": "fixed"} if cell.workload.kind == "text" else {})
    one_step = 1e12 * sum(flops(cell.model.shape(), samples.draw(vocabulary, cell.seed)).values())
    rounds = cell.trials + 2 * cell.warmup + 4
    return FIXED_S + rounds * 2 * one_step / (flop_per_s * EFFICIENCY)
