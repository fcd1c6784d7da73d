"""Slot `attention`: which implementation computes softmax(QK^T)V. PEFT and transformers come with `sdpa`.

Here are the eager one and SDPA's; flash_attention.py, flex_attention.py and varlen.py have the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Unsupported
from lorabench.contract.batch import Batch
from lorabench.contract.model import ModelSpec
from lorabench.contract.settings import Settings
from lorabench.contract.step import Step, Wrapped

if TYPE_CHECKING:
    from torch import Tensor

# The forward operators behind F.scaled_dot_product_attention, by backend. `math` is a composite of plain operators.
FUSED = {
    "flash": ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "efficient": ("aten::_scaled_dot_product_efficient_attention",),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "math": ("aten::_scaled_dot_product_attention_math",),
}


ALONE = "attention"  # the family that lorabench/measure/kinds/operations gives to attention without a model
CUDA: dict[str, Any] = {"device": "cuda", "capability": (8, 0), "dtypes": ("bfloat16", "float16")}  # of fused kernels


@dataclass(frozen=True, kw_only=True)
class RequiresSupport(Requires):
    """And a model that transformers has this attention for. It has SDPA for all but those that do something to the
    scores before the softmax, such as Gemma 2, which caps them."""

    words: str = "SDPA"
    attribute: str = "_supports_sdpa"  # of transformers' model classes

    def unmet_by(self, model: ModelSpec) -> str | None:
        from lorabench.plan.architecture import skeleton

        if model.family != ALONE and not getattr(skeleton(model, layers=1), self.attribute):
            return f"needs {self.words}, which transformers does not have for the family {model.family}; eager is there"
        return super().unmet_by(model)


def layers(evidence: Evidence) -> int:
    """How many of the model's layers have attention. Of a family that can have grouped queries each attention module
    has their number; of any other, every layer has attention."""
    config: Any = evidence.arm.model.config
    grouped = sum(hasattr(module, "num_key_value_groups") for module in evidence.arm.model.modules())
    return grouped or config.num_hidden_layers


def backends(ops: Counter[str]) -> dict[str, int]:
    """Which SDPA backends ran, and how often, from the operators of one step."""
    counts = {name: sum(ops[op] for op in names) for name, names in FUSED.items()}
    return {name: count for name, count in counts.items() if count}


def what_is_masked(batch: Batch) -> str:
    """What a batch's attention has to leave out besides what comes later."""
    positions = batch.inputs.get("position_ids")
    if batch.inputs.get("attention_mask") is not None:
        return "causal and padding"
    packed = positions is not None and bool((positions.diff() < 1).any())  # a rank's pieces of a row lie further apart
    return "causal and other samples of a row" if packed else "causal"


@dataclass(frozen=True, kw_only=True)
class Attention(Ablation):
    """Base: sets transformers' `attn_implementation`."""

    slot: ClassVar[str] = "attention"
    kinds: ClassVar[tuple[str, ...]] = ("train", "evaluate", "op")
    implementation: ClassVar[str]

    def load(self, kwargs: dict[str, Any]) -> None:
        kwargs["attn_implementation"] = self.implementation

    def ran(self, ops: Counter[str]) -> dict[str, int]:
        """What computed the forwards, and how often each ran."""
        return backends(ops)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        """Which backend torch picks depends on what it is asked to leave out, so that is told, too."""
        asked = sorted({what_is_masked(b) for b in evidence.arm.micro_batches})
        return {
            "attention_backend": self.ran(evidence.ops) or self.implementation,
            **({"attention_mask": " and ".join(asked)} if asked else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Fused(Attention):
    """Base: a fused kernel that is not SDPA's, seen at work by the operators that it runs."""

    kinds: ClassVar[tuple[str, ...]] = ("train", "op")
    operators: ClassVar[tuple[str, ...]]  # of which one runs in each forward

    def ran(self, ops: Counter[str]) -> dict[str, int]:
        return {name: ops[name] for name in self.operators if ops[name]}

    def audit(self, evidence: Evidence) -> int:
        """Every layer of every batch has to have run it, and none SDPA."""
        if found := backends(evidence.ops):
            raise NotApplied(f"attention still ran in SDPA's {', '.join(found)}")
        expected = layers(evidence) * len(evidence.arm.micro_batches)
        if (calls := sum(self.ran(evidence.ops).values())) < expected:
            raise NotApplied(f"its operator ran {calls} times; attention runs {expected} times in a step")
        return layers(evidence)


@dataclass(frozen=True, kw_only=True)
class Eager(Attention):
    name: ClassVar[str] = "eager"
    summary: ClassVar[str] = "transformers' own matmul, softmax, matmul; holds the scores"
    implementation: ClassVar[str] = "eager"

    def settings(self) -> Settings:
        return Settings(model={"attn_implementation": "eager"}, axolotl={"eager_attention": True})

    def audit(self, evidence: Evidence) -> int:
        if found := backends(evidence.ops):
            raise NotApplied(f"attention still ran in SDPA's {', '.join(found)}")
        return layers(evidence)


@dataclass(frozen=True, kw_only=True)
class Sdpa(Attention):
    name: ClassVar[str] = "sdpa"
    summary: ClassVar[str] = "F.scaled_dot_product_attention with the backend that torch picks (recorded)"
    requires: ClassVar[Requires] = RequiresSupport()
    implementation: ClassVar[str] = "sdpa"

    def settings(self) -> Settings:
        return Settings(model={"attn_implementation": "sdpa"}, axolotl={"sdp_attention": True})

    def audit(self, evidence: Evidence) -> int:
        return min(sum(backends(evidence.ops).values()), layers(evidence))  # recomputed layers count once


class _Pinned(Wrapped):
    """Runs each phase under one SDPA backend: the backward too, where checkpointing runs attention again."""

    def __init__(self, inner: Step, backend: str) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        super().__init__(inner)
        self.backend = backend
        self.pinned = partial(sdpa_kernel, getattr(SDPBackend, backend))

    def forward(self, batch: Batch) -> Tensor:
        try:
            with self.pinned():
                return self.inner.forward(batch)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Unsupported(self._refusal(batch)) from error

    def _refusal(self, batch: Batch) -> str:
        config: Any = self.model.config
        grouped = config.num_attention_heads != config.num_key_value_heads
        why = ", which has grouped-query attention" if grouped else ""
        return (
            f"SDPA's {self.backend.lower()} backend refuses this model{why}: no kernel for its shapes, its dtype and a "
            f"mask that is {what_is_masked(batch)}"
        )

    def backward(self, loss: Tensor) -> None:
        with self.pinned():
            self.inner.backward(loss)


@dataclass(frozen=True, kw_only=True)
class PinnedSdpa(Attention):
    """Base: SDPA with one backend pinned. A shape that the backend refuses is an error, not another backend."""

    implementation: ClassVar[str] = "sdpa"
    requires: ClassVar[Requires] = RequiresSupport()
    backend: ClassVar[str]  # its name in torch's SDPBackend
    fused: ClassVar[str]

    def step(self, step: Step) -> Step:
        return _Pinned(step, self.backend)

    def audit(self, evidence: Evidence) -> int:
        found = backends(evidence.ops)
        if set(found) - {self.fused}:
            raise NotApplied(f"attention ran in SDPA's {', '.join(found)}, not in {self.fused} alone")
        return min(found.get(self.fused, 0), layers(evidence))


@dataclass(frozen=True, kw_only=True)
class SdpaMath(PinnedSdpa):
    name: ClassVar[str] = "sdpa_math"
    summary: ClassVar[str] = "SDPA pinned to its unfused reference"
    backend: ClassVar[str] = "MATH"
    fused: ClassVar[str] = "math"


@dataclass(frozen=True, kw_only=True)
class SdpaEfficient(PinnedSdpa):
    name: ClassVar[str] = "sdpa_efficient"
    summary: ClassVar[str] = "SDPA pinned to the memory-efficient backend (what a padding mask falls back to)"
    requires: ClassVar[Requires] = RequiresSupport(device="cuda")
    backend: ClassVar[str] = "EFFICIENT_ATTENTION"
    fused: ClassVar[str] = "efficient"


@dataclass(frozen=True, kw_only=True)
class SdpaFlash(PinnedSdpa):
    name: ClassVar[str] = "sdpa_flash"
    summary: ClassVar[str] = "SDPA pinned to torch's FlashAttention-2"
    requires: ClassVar[Requires] = RequiresSupport(device="cuda", capability=(8, 0))
    backend: ClassVar[str] = "FLASH_ATTENTION"
    fused: ClassVar[str] = "flash"


@dataclass(frozen=True, kw_only=True)
class SdpaCudnn(PinnedSdpa):
    name: ClassVar[str] = "sdpa_cudnn"
    summary: ClassVar[str] = "SDPA pinned to cuDNN's fused attention"
    requires: ClassVar[Requires] = RequiresSupport(device="cuda", capability=(8, 0))
    backend: ClassVar[str] = "CUDNN_ATTENTION"
    fused: ClassVar[str] = "cudnn"
