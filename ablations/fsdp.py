"""Slot `parallel`: FSDP2, torch's `fully_shard`. Every rank holds a part of each layer's weights, and gathers a layer
just before it computes.

python -m lorabench.sweep world_size=2 'ablations=[fsdp2,{fsdp2: {adapters: sharded}}]' workload=4x2048
python -m lorabench.sweep world_size=4 'ablations=[{fsdp2: {replicas: 2}}]' workload=4x2048
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from lorabench.contract.ablation import Evidence, Unsupported, added
from lorabench.contract.batch import Sample
from lorabench.contract.ranks import Ranks, whole
from lorabench.contract.step import Step
from lorabench_ablations.lora_kernels import LAY_OUT
from lorabench_ablations.parallel import (
    CAPTURED,
    COMPILED,
    Averaged,
    Parallel,
    Summed,
    alike,
    layers_of,
    mesh,
    sent,
    trained_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from lorabench.contract.arm import Arm

FSDP = "fsdp"  # PEFT knows by this name that a layer will compute with whole weights
PACKED = "FSDP2 shards float tensors; a packed weight would stay whole on every rank (accelerate 3983, trl 6343)"


@dataclass(frozen=True, kw_only=True)
class Fsdp2(Parallel):
    """Each decoder layer is a group, norm and head one, the embedding one.

    `adapters`: "replicated" shards the frozen weights alone, and the adapters' gradients are added in one all-reduce;
    the optimizer sees plain tensors. "sharded" makes the adapters DTensors, too, whose gradients are reduce-scattered.
    `reshard`: give a layer's weights back after its forward, and gather them again in backward; False keeps them.
    `replicas`: as many groups of ranks hold the weights once each, so that weights travel inside a group (HSDP, Zhao et
    al. 2023), and the adapters' gradients are added over all ranks. On one rank nothing travels, and what it costs to
    gather a layer beside that is left. `copy_engine`: the GPUs' copy engines gather, so that no multiprocessor is taken
    from what is computed meanwhile. `operands`: beside `lora_kernels` and replicated adapters, what is sharded is what
    its products read, frozen weights with room for adapters; off, each weight as it is, which shows what that is worth.
    """

    name: ClassVar[str] = "fsdp2"
    summary: ClassVar[str] = "FSDP2 (fully_shard): weights sharded by layer, gathered where they are used"
    excludes: ClassVar[dict[str, str]] = {
        "capture": CAPTURED,
        "compilation": COMPILED,
        "loading": PACKED,
        "fp8_base": "its scaled weights are no parameters that fully_shard knows",
    }
    one_rank: ClassVar[bool] = True
    adapters: Literal["replicated", "sharded"] = "replicated"
    reshard: bool = True
    replicas: PositiveInt = added(1)
    copy_engine: bool = added(False)
    operands: bool = added(True)

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample]:
        if self._part(ranks.size) == 1 and self.copy_engine:
            raise Unsupported("fsdp2 with copy_engine=True copies between ranks, and one rank holds all weights here")
        return super().shard(samples, ranks)

    def _part(self, world: int) -> int:
        """How many ranks hold the weights together. Raises Unsupported where that cannot be."""
        if world % self.replicas or 1 < world < 2 * self.replicas:
            raise Unsupported(
                f"fsdp2 with replicas={self.replicas} needs a multiple of that many ranks, twice as many at least; "
                f"there are {world} ranks"
            )
        return world // self.replicas

    def divide(self, base: nn.Module) -> int | None:
        """A rank's part of each weight, without FSDP2, which may shard the weights in other pieces once all are drawn.

        Adapters that are sharded belong into the groups of their layers, and come later; and over a mesh of two
        dimensions PEFT (0.21.2) takes a rank's part of a weight for the whole."""
        if self.adapters == "sharded" or self.replicas > 1:
            return None
        base.requires_grad_(False)
        layers = layers_of(base)
        for layer in layers:
            _replace_parameters(layer, self._part_of)
        return len(layers)

    def _part_of(self, weight: Tensor) -> Tensor:
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(weight, self._mesh(), [Shard(0)], src_data_rank=None)

    def patch(self, model: Any) -> int:
        """One layer after the other, so that a rank never holds more than one of them whole."""
        base = model.get_base_model()
        before = getattr(base, LAY_OUT, None) if self.operands and self.adapters == "replicated" else None
        layers, lay_out = layers_of(base), before and before(model)
        for layer in layers:
            _replace_parameters(layer, whole)
            if lay_out:
                lay_out(layer)
            self._fully_shard(layer, reshard_after_forward=self.reshard)
        self._fully_shard(model)
        return len(layers)

    def _fully_shard(self, module: nn.Module, **options: Any) -> None:
        """Makes the module a group, of what is in none yet."""
        from torch.distributed.fsdp import fully_shard

        trained = {p for p in module.parameters() if p.requires_grad}
        ignored = trained if self.adapters == "replicated" else None
        self._gather_in(fully_shard(module, mesh=self._mesh(), ignored_params=ignored, **options))

    def _gather_in(self, module: Any) -> None:
        """Has the weights of a group that was just made gathered as `copy_engine` says."""
        if self.copy_engine:
            from lorabench_ablations.copy_engine import gather_in

            module.set_custom_all_gather(gather_in(self._mesh().get_group(FSDP)))

    def _mesh(self) -> DeviceMesh:
        options = None
        if self.copy_engine:
            from lorabench_ablations.copy_engine import options
        grid = mesh(self._part(_world()), FSDP, options)
        return grid if self.replicas > 1 else grid[FSDP]

    def step(self, step: Step) -> Step:
        alike(self.name, step)
        return Averaged(step) if self.adapters == "sharded" else Summed(step)

    def least(self, arm: Arm, n: int) -> float:
        """Each layer is gathered in every forward, and again in every backward where it was given back; the rest once
        a micro-batch."""
        sharded = [p for p in arm.model.parameters() if self.adapters == "sharded" or not p.requires_grad]
        layers = sum(_bytes(layer, self.adapters) for layer in layers_of(_base(arm)))
        rest = sum(p.numel() * p.element_size() for p in sharded) - layers
        gathered = (layers * (2 if self.reshard else 1) + rest) * len(arm.step.batches)
        part, adapters = self._part(n), trained_bytes(arm)
        moved = sent("all_gather", gathered / part, part)
        if self.adapters == "replicated":
            return moved + sent("all_reduce", adapters, n)
        once = sent("reduce_scatter", adapters, part) + sent("all_reduce", adapters / part, self.replicas)
        return moved + once * len(arm.step.batches)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        found = super().notes(evidence)
        if operands := sum(name.endswith(".operand") for name, _ in evidence.arm.model.named_parameters()):
            found[self.name]["operands"] = operands
        return found

    def group(self, kind: str, n: int) -> int:
        if kind != "all_reduce":
            return self._part(n)
        return n if self.adapters == "replicated" else self.replicas

    def audit(self, evidence: Evidence) -> int:
        """The decoder layers whose frozen weights are parts of them."""
        from torch.distributed.tensor import DTensor

        layers = layers_of(_base(evidence.arm))
        return sum(all(isinstance(p, DTensor) for p in layer.parameters() if not p.requires_grad) for layer in layers)


def _replace_parameters(layer: nn.Module, made_of: Callable[[Tensor], Tensor]) -> None:
    """Each parameter by what is made of it, unless that is the tensor itself."""
    from torch import nn

    for module in layer.modules():
        for name, p in module._parameters.items():
            if p is not None and (made := made_of(p)) is not p:
                module._parameters[name] = nn.Parameter(made, p.requires_grad)


def _bytes(layer: nn.Module, adapters: str) -> int:
    held = [p for p in layer.parameters() if adapters == "sharded" or not p.requires_grad]
    return sum(p.numel() * p.element_size() for p in held)


def _base(arm: Arm) -> Any:
    model: Any = arm.model
    return model.get_base_model()


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size()
