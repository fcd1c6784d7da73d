"""What is expected of each contender before anything is measured, by published results: expected.yaml, which
benchmarks/expected_gains.py makes from results/."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lorabench.contract.ablation import Ablation
from lorabench.contract.model import ModelSpec
from lorabench.plan.architecture import skeleton

Toggles = tuple[Ablation, ...]  # a contender: mostly one toggle

TABLE = Path(__file__).with_name("expected.yaml")
SLOW_START_S = 15.0  # longer than the usual: compilers


class Expected(NamedTuple):
    """`speedup` over a stack without it. `start_s`: how many seconds longer than others it takes until its rounds."""

    speedup: float = 1.0
    start_s: float = 0.0


def parameters(spec: ModelSpec) -> int:
    """How many parameters a model has, without its adapter."""
    return sum(p.numel() for p in skeleton(spec).parameters())


def expected(toggles: Iterable[Ablation], size: int) -> Expected:
    """Of toggles together, by the published model whose number of parameters is nearest to `size`. Nothing is expected
    of what was never published."""
    rows = [published(toggle, size) for toggle in toggles]
    return Expected(math.prod(row.get("speedup", 1.0) for row in rows), sum(row.get("start_s", 0.0) for row in rows))


def slow(toggles: Iterable[Ablation], size: int) -> bool:
    """Whether a contender takes long until its first round: it sits alone, in several processes, or compiles."""
    return any(t.global_patch or t.slow_start for t in toggles) or expected(toggles, size).start_s > SLOW_START_S


def in_order(contenders: Iterable[Toggles], size: int) -> list[Toggles]:
    """The best first, and after them those that are slow to start, the best of these first."""
    return sorted(contenders, key=lambda toggles: (slow(toggles, size), -expected(toggles, size).speedup))


def published(toggle: Ablation, size: int) -> dict[str, Any]:
    """A toggle's own row of the table, of the model nearest in size; {} of what was never published."""
    rows = _table().get(toggle.name, [])
    return min(rows, key=lambda row: abs(math.log(row["billions"] * 1e9 / max(size, 1))), default={})


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load(TABLE.read_text())
