"""A job: one fine-tuning run with samples, adapter, optimizer and seed of its own, alone on a base or beside others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.workload import LEARNING_RATE, Workload

ADAPTER = "default"  # PEFT's own name for the only adapter of a model


@dataclass(frozen=True)
class Job:
    """A job, complete. `adapter` is the name under which PEFT holds its adapter; `name` is "" for a cell's only job."""

    name: str
    adapter: str
    workload: Workload
    lora: Lora
    learning_rate: float
    seed: int
    optimizer: str | dict[str, Any] | None = None


def jobs_of(model: ModelSpec, workload: Workload, seed: int) -> list[Job]:
    """The jobs of a cell: those that the workload names, or the workload itself with the model's adapter.

    Raises pydantic's ValidationError for a field of a job that a workload or an adapter has not, or a value it refuses.
    """
    if not workload.jobs:
        return [Job("", ADAPTER, workload, model.lora, LEARNING_RATE, seed)]
    base = workload.model_dump(exclude={"jobs"}, exclude_unset=True)
    return [
        Job(
            spec.name, spec.name, Workload.model_validate(base | spec.workload | {"name": spec.name}),
            Lora.model_validate(model.lora.model_dump() | spec.lora), spec.learning_rate,
            seed if spec.seed is None else spec.seed, spec.optimizer,
        )
        for spec in workload.jobs
    ]  # fmt: skip
