"""Slot `parallel`: how one step is divided among several processes, one a GPU.

python -m lorabench.sweep world_size=2 'ablations=[ddp]' workload=4x2048
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Unsupported
from lorabench.contract.batch import Sample
from lorabench.contract.ranks import Ranks
from lorabench.contract.step import Step, Wrapped

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ddp(Ablation):
    """torch's DistributedDataParallel: every rank holds the model, takes its share of the samples, and the adapters'
    gradients are averaged while backward runs.

    Each rank's loss is its sum over the trained tokens of the whole step, so the ranks' gradients have to be added, not
    averaged: backward starts from the loss times the number of ranks.
    """

    name: ClassVar[str] = "ddp"
    slot: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "DistributedDataParallel: samples divided among the ranks, gradients all-reduced"
    excludes: ClassVar[dict[str, str]] = {"capture": "its buckets are reduced outside of the captured stream"}
    parallel: ClassVar[bool] = True
    rank: ClassVar[int] = -10  # innermost: other wrappers see the model that it runs

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
        if len(samples) % ranks.size:
            raise Unsupported(f"ddp divides {len(samples)} samples among {ranks.size} ranks: give a multiple")
        return list(samples[ranks.rank :: ranks.size])

    def step(self, step: Step) -> Step:
        from torch.nn.parallel import DistributedDataParallel

        if step.name:
            raise Unsupported("ddp knows one job a model")
        step.innermost.call = DistributedDataParallel(step.model)
        return _Summed(step)

    def audit(self, evidence: Evidence) -> int:
        return evidence.arm.ranks.size if hasattr(evidence.arm.step.innermost.call, "reducer") else 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        import torch.distributed as dist

        return {"ddp": {"world_size": dist.get_world_size(), "backend": dist.get_backend()}}


class _Summed(Wrapped):
    def backward(self, loss: Tensor) -> None:
        import torch.distributed as dist

        self.inner.backward(loss * dist.get_world_size())
