"""A linear whose rows have several adapters, as the nodes take it: a slot for each of them over the one weight, read
anew on each forward. A slot whose job has no rows in the batch holds no adapter, so that this one gets no gradient.

Run: python -m pytest tests/lorakernels/test_multi.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..nodes.member import Member
from ..ops.job_rows import JobRows
from .forwards import NO_JOBS
from .lora_modules import LinearModule, adapter_weights, is_lora
from .module_checks import NotFused, is_unhooked


class Jobs(Protocol):
    """What says which rows are whose. adapters: by job; on: whether that was said; rows: of the batches to come;
    serving: the jobs whose adapters their rows have; resident: those whose adapters stay in their slots without rows;
    linear_forward: what is bound to PEFT's linears, and runs where a node steps back."""

    adapters: tuple[str, ...]
    on: bool
    rows: JobRows
    serving: frozenset[int]
    resident: frozenset[int]
    linear_forward: Callable[..., Any]


@dataclass
class SlotLinear(LinearModule):
    """jobs: whose adapters these are; slots: one for each that the linear has."""

    jobs: Any = None
    slots: list[Member] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        """The slots."""
        return self.slots

    def _unhooked(self) -> bool:
        return is_unhooked(self.module, self.jobs.linear_forward)

    def _adapter_changed(self) -> str | None:
        module, jobs, parts = self.module, self.jobs, self.module._modules
        if not jobs.on:
            return NO_JOBS
        if module._disable_adapters or module.merged_adapters:
            return "adapters are disabled" if module._disable_adapters else "adapters are merged"
        variants = module.__dict__.get("lora_variant", ())
        for slot in self.slots:
            name = jobs.adapters[slot.job]
            found = [parts[part]._modules.get(name) for part in ("lora_A", "lora_B", "lora_dropout")]
            if None in found or name in variants:
                return "an adapter is of another kind than at apply, or was deleted"
            a, b, drop = found
            if not (type(a) is type(b) is nn.Linear and is_unhooked(a) and is_unhooked(b) and is_unhooked(drop)):
                return "an adapter has hooks, or is of another kind than at apply"
            if type(drop) not in (nn.Identity, nn.Dropout):
                return "an adapter has a dropout of another kind"
            dropout = drop.p if type(drop) is nn.Dropout and drop.training else 0.0
            weight, shape = a._parameters["weight"], (self.ranks[slot.job], slot.shape[1])
            if weight.shape != shape:
                return "an adapter is of another rank than at apply; call remove and apply again"
            slot.weight, slot.quantized = self.member.weight, self.member.quantized
            both = weight, b._parameters["weight"]
            slot.resident = both if slot.job in jobs.resident else None
            a, b = both if slot.job in jobs.serving else (None, None)
            slot.adapter = a, b, None, float(module.scaling[name]), dropout, jobs.rows
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks = {slot.job: slot.rank for slot in self.slots}


def with_slots(linear: LinearModule, jobs: Jobs) -> LinearModule:
    """The same linear with a slot for each of the jobs' adapters; itself where it has no LoRA. Raises NotFused with the
    reason where its rows must go through it alone."""
    module, base = linear.module, linear.base
    if not is_lora(module):
        return linear
    if linear.member.gathered:
        raise NotFused("its weight is gathered by FSDP2, and its rows have several adapters")
    slots: list[Member] = []
    for job, name in enumerate(jobs.adapters):
        if name in module.lora_A:
            first = not slots
            slots.append(
                Member(
                    linear.name, base.weight, base.bias if first else None, *adapter_weights(module, name, base),
                    quantized=linear.member.quantized, compute_dtype=linear.member.compute_dtype, job=job,
                    shares=not first,
                )
            )  # fmt: skip
    if not slots:
        raise NotFused("it has LoRA, but none of the jobs' adapters")
    return SlotLinear(linear.name, module, base, None, slots[0], linear.parent, jobs=jobs, slots=slots)
