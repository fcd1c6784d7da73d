"""The gate's gold and plain outcomes, kept between the cells of a sweep: cells that differ only in toggles share them.

They lie in a temporary folder of the sweep, which deletes it at its end: a safetensors file (nothing is unpickled) for
each model (and how it holds its frozen weights), workload, seed and precision. Always computed before any toggle has
patched anything in that process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lorabench.contract.ablation import Ablation
from lorabench.contract.model import ModelSpec
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import Outcome
from lorabench.record.store import StoreError, write_atomically


def path(
    folder: Path, spec: ModelSpec, workload: Workload, seed: int, dtype: torch.dtype, held: Sequence[Ablation] = (),
    cut: int = 0, layers: int | None = None,
) -> Path:  # fmt: skip
    """The file of these outcomes. Device and library versions are the sweep's, and so is the folder. `held`: toggles
    that both have, because they say how frozen weights are held. `cut`: to how many tokens samples were cut; `layers`:
    of the shallow model."""
    models = [spec.model_dump(mode="json"), [[a.name, asdict(a)] for a in held]]
    content = [*models, workload.model_dump(mode="json"), seed, str(dtype), cut, layers]
    return folder / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}.safetensors"


def cached(file: Path, device: torch.device, compute: Callable[[], tuple[Outcome, Outcome]]) -> tuple[Outcome, Outcome]:
    """(gold, plain PEFT in the compute dtype) out of the file; where there is none, computed and put there."""
    if file.exists():
        return _read(file, device)
    gold, low = compute()
    _write(file, gold, low)
    return gold, low


def _read(file: Path, device: torch.device) -> tuple[Outcome, Outcome]:
    with safe_open(file, framework="pt", device=str(device)) as stored:
        scalars = json.loads(stored.metadata()["scalars"])
        made: dict[str, Outcome] = {}
        for which, numbers in scalars.items():
            names = [n for n in stored.keys() if n.startswith(f"{which}/")]  # noqa: SIM118 (no mapping)
            gradients = {n.removeprefix(f"{which}/"): stored.get_tensor(n) for n in names}
            made[which] = Outcome(**numbers, gradients=gradients)
    return made["gold"], made.get("low", made["gold"])


def _write(file: Path, gold: Outcome, low: Outcome) -> None:
    """Whole or not at all. A cache that cannot be written costs time, not the cell."""
    both = {"gold": gold} if low is gold else {"gold": gold, "low": low}
    scalars: dict[str, Any] = {
        w: {"loss": o.loss, "update_error": o.update_error, "scales": o.scales} for w, o in both.items()
    }
    tensors = {f"{w}/{n}": g.contiguous() for w, o in both.items() for n, g in o.gradients.items()}
    with contextlib.suppress(StoreError, SafetensorError):
        write_atomically(file, save(tensors, {"scalars": json.dumps(scalars)}))
