"""A rough estimate of a cell's time, for dry_run=true: its work over rates measured just now, plus the fixed costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorabench.contract.cell import PROCESSES, Cell
from lorabench.contract.kind import kind
from lorabench.contract.work import Work

FIXED_S = 8.0  # process, two builds, gate (measured: docs/lab-notes.md)
EFFICIENCY = 0.35  # of a square GEMM's rate: what plain PEFT reaches on real models, small ones less


def seconds(cell: Cell, ceilings: Mapping[str, Any]) -> float:
    """Estimated seconds of a cell. `ceilings` as measured: TFLOP/s of a square GEMM by dtype, GB/s of a copy."""
    if cell.workload.kind == "text":  # its lengths are not worth a tokenizer's download here
        cell = replace(cell, workload=cell.workload.model_copy(update={"kind": "fixed"}))
    own = kind(cell.kind)
    work = sum(own.work(cell, own.samples(cell), cell.candidate), Work())
    tflops = next(iter(ceilings["gemm_tflops"].values()))
    one = sum(work.tflop.values()) / (tflops * EFFICIENCY) + sum(work.gbytes.values()) / ceilings["copy_gbs"]
    pairs = PROCESSES if cell.separate else 1  # of processes, each with its own warm-up
    return FIXED_S * pairs + (cell.trials + (2 * cell.warmup + 4) * pairs) * 2 * one
