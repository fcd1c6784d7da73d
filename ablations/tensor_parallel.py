"""Slot `parallel`: tensor parallelism as transformers and PEFT do it. Every rank holds a part of each linear.

python -m lorabench.sweep world_size=2 'ablations=[tensor_parallel]' workload=4x2048
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Evidence, Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.ranks import local
from lorabench.contract.step import Step
from lorabench_ablations.parallel import CAPTURED, COMPILED, Averaged, InGroups, Summed, alike, sent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lorabench.contract.arm import Arm

OTHER_OPTIMIZERS = (
    "adamw", "adamw_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "torchao_adamw_8bit", "loraplus",
)  # fmt: skip
OLDEST_PEFT = (0, 21, 1)  # before it adapters under transformers' plan train with wrong gradients (peft 3614)


@dataclass(frozen=True, kw_only=True)
class TensorParallel(InGroups):
    """transformers' plan of the architecture over `ranks` ranks (None: all): q, k, v, gate, up and the head are split
    by their outputs, o and down by their inputs, and PEFT splits lora_B or lora_A likewise. The ranks beyond that
    divide the samples.

    Some adapters are DTensors then, and torch's foreach AdamW refuses a mix of them with plain tensors: it is given
    them in two groups, in place of the optimizer that the reference names.
    """

    name: ClassVar[str] = "tensor_parallel"
    summary: ClassVar[str] = "transformers' tensor parallelism: each linear split among the ranks"
    excludes: ClassVar[dict[str, str]] = {
        "capture": CAPTURED,
        "compilation": COMPILED,
        "loading": "a packed or quantized weight is no tensor that transformers' plan can split",
        "fp8_base": "a quantized weight is no tensor that transformers' plan can split",
        "save_on_cpu": "torch's save_on_cpu copies what is saved into plain tensors, which a split tensor refuses",
        **dict.fromkeys(
            OTHER_OPTIMIZERS, "it gives its adapters, DTensors among them, to torch's foreach AdamW itself"
        ),
    }
    decides: ClassVar[tuple[str, ...]] = ("optimizer",)

    def prepare(self, base: Any, *, upcast: bool) -> None:
        from transformers.distributed.configuration_utils import DistributedConfig

        size = self.together
        _check(base.config, size)
        base.config.distributed_config = DistributedConfig(tp_size=size)
        base._device_mesh, base._tp_size = self.mesh("tp")["tp"], size
        _split(base)

    def patch(self, model: nn.Module) -> int:
        """PEFT makes the factor that is split with a rank's own width, and transformers (from 5.21 on) takes the width
        of the whole from the module: it is put right. Returns the split linears."""
        split = {n: p for n, p in model.named_parameters() if hasattr(p, "to_local")}
        for name, weight in split.items():
            if "lora_" in name:
                module: Any = model.get_submodule(name.rpartition(".")[0])
                module.out_features, module.in_features = weight.shape
        return sum(name.endswith("base_layer.weight") for name in split)

    def collate(self, batch: Batch) -> Batch:
        """All ranks of a group compute the same positions: each counts its share of them."""
        size, first = self.together, self.place == 0
        own = lambda count: count // size + first * (count % size)  # noqa: E731
        return replace(batch, real=own(batch.real), padded=own(batch.padded), trained=own(batch.trained))

    def optimize(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        import torch
        from torch.distributed.tensor import DTensor

        split = [p for p in params if isinstance(p, DTensor)]
        plain = [p for p in params if not isinstance(p, DTensor)]
        return torch.optim.AdamW([{"params": split}, {"params": plain}], lr=lr, foreach=True)

    def least(self, arm: Arm, n: int) -> float:
        """Megatron's four all-reduces a layer of one activation each (Shoeybi et al. 2019), and over the groups the
        gradients that a rank holds. Inside of a group those of the factors that every rank has are not in it."""
        config: Any = arm.model.config
        size = self.together
        positions = sum(batch.inputs["input_ids"].numel() for batch in arm.step.batches)
        activations = 4 * config.num_hidden_layers * positions * config.hidden_size * arm.dtype.itemsize
        return sent("all_reduce", activations, size) + sent("all_reduce", _held(arm), n // size)

    def sends(self, evidence: Evidence, n: int) -> float:
        """Its all-reduces are of two sizes of groups: the last one, of the gradients, is among the groups."""
        size, own = self.together, _held(evidence.arm)
        handed = evidence.handed.get("all_reduce", 0) - own
        other = sum(sent(kind, b, size) for kind, b in evidence.handed.items() if kind != "all_reduce")
        return sent("all_reduce", handed, size) + sent("all_reduce", own, n // size) + other

    def step(self, step: Step) -> Step:
        alike(self.name, step)
        return Summed(_Whole(step, self.together), self.mesh("tp")["data"].get_group())


def _held(arm: Arm) -> int:
    """Bytes of the gradients that this rank holds."""
    return sum(local(p).nbytes for _, p in arm.adapters())


class _Whole(Averaged):
    """Around a step whose loss is that of all samples on every one of `size` ranks: each says its share of it, and
    starts backward from the whole again."""

    def forward(self, batch: Batch) -> Tensor:
        return self.inner.forward(batch) / self.size


def _split(base: Any) -> None:
    """Applies transformers' plan to `base`, which has its mesh and its distributed_config.

    From 5.23 on `_resolve_parallel_plans` makes the plan, with a name for each layer, and apply_tensor_parallelism must
    be given it. Before, that reads `base.tp_plan`: 5.17 and 5.18 take no plan as an argument, 5.19 to 5.22 need none.
    """
    from transformers.distributed import tensor_parallel

    apply: Any = tensor_parallel.apply_tensor_parallelism
    if not base.tp_plan:  # with an empty one the older versions would split nothing and say nothing
        raise Unsupported(f"tensor_parallel needs a plan, and transformers has none for {type(base).__name__}")
    if hasattr(base, "_resolve_parallel_plans"):
        plan, _, _ = base._resolve_parallel_plans(base.config.distributed_config)
        apply(base, base._device_mesh, plan)
    else:
        apply(base, base._device_mesh)


def _check(config: Any, size: int) -> None:
    import peft
    from packaging.version import Version

    if Version(peft.__version__).release < OLDEST_PEFT:
        raise Unsupported(f"needs peft 0.21.1 or newer, this is {peft.__version__}: pip install 'peft>=0.21.1'")
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    if any(number % size for number in heads):
        raise Unsupported(
            f"tensor_parallel splits {heads[0]} heads and {heads[1]} of keys among {size} ranks: no multiples"
        )
