"""How long a cell will take, for dry_run=true: as cells like it took on this machine, else computed from shapes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lorabench.contract.cell import PROCESSES, Cell
from lorabench.contract.kind import kind
from lorabench.contract.work import Work

FIXED_S = 8.0  # process, two builds, gate (measured: docs/lab-notes.md)
EFFICIENCY = 0.35  # of a square GEMM's rate: what plain PEFT reaches on real models, small ones less
UNITS = (("day", 86_400.0), ("hour", 3_600.0), ("minute", 60.0))


class Estimate(NamedTuple):
    """Seconds, and by what they are known."""

    seconds: float
    basis: str


@dataclass(frozen=True)
class Seen:
    """What a cell took that was measured on this machine: its wall time, and the part of it in `trials` timed ones."""

    kind: str
    model: str
    workload: str
    candidate: frozenset[str]
    separate: bool
    wall_s: float
    trials_s: float
    trials: int

    def seconds(self, trials: int) -> float:
        """With another number of trials."""
        return self.wall_s + (trials - self.trials) * self.trials_s / self.trials


def by_records(cell: Cell, seen: Sequence[Seen]) -> Estimate | None:
    """The median of the same candidate's cells, else of all cells of this model and workload; None without any."""
    subject = cell.kind, cell.model.name, cell.workload.name
    alike = [s for s in seen if (s.kind, s.model, s.workload) == subject]
    candidate = {a.label for a in cell.candidate}
    for found, basis in (
        ([s for s in alike if s.candidate == candidate], "as it took here before"),
        ([s for s in alike if s.separate == cell.separate], "as others of its model and workload took here"),
    ):
        if found:
            return Estimate(statistics.median(s.seconds(cell.trials) for s in found), basis)
    return None


def computed(cell: Cell, ceilings: Mapping[str, Any]) -> Estimate:
    """Its work over this machine's rates, plus the fixed costs; rough. `ceilings` as measured: TFLOP/s of a square GEMM
    by dtype, GB/s of a copy."""
    own = kind(cell.kind)
    work = sum(own.work(cell, own.samples(cell), cell.candidate), Work())
    tflops = next(iter(ceilings["gemm_tflops"].values()))
    one = sum(work.tflop.values()) / (tflops * EFFICIENCY) + sum(work.gbytes.values()) / ceilings["copy_gbs"]
    pairs = PROCESSES if cell.separate else 1  # of processes, each with its own warm-up
    seconds = FIXED_S * pairs + (cell.trials + (2 * cell.warmup + 4) * pairs) * 2 * one
    return Estimate(seconds, "computed, rough")


def longest(cell: Cell, timeout_s: float) -> float:
    """Seconds after which the last of a cell's worker processes would be ended."""
    return timeout_s * (2 * PROCESSES if cell.separate else 2)


def duration(seconds: float) -> str:
    """In a unit that can be imagined: `40 s`, `3.5 minutes`, `2 days`."""
    for unit, length in UNITS:
        if seconds >= 1.5 * length:
            number = f"{seconds / length:.0f}" if seconds >= 10 * length else f"{seconds / length:.1f}"
            return f"{number} {unit}s"
    return f"{seconds:.0f} s"
