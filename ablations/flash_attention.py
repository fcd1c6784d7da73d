"""Slot `attention`: the FlashAttention packages, through transformers.

    pip install flash-attn --no-build-isolation
    python -m lorabench.sweep 'models=[llama-3.1-8b]' 'ablations=[flash_attention_2]'

With padding transformers gathers the tokens, calls the varlen kernel and scatters what it gives, in every layer; there
the host waits for the device. A row of several samples, or of one, is given with where its samples begin.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Requires
from lorabench.contract.settings import Settings
from lorabench_ablations.attention import CUDA, Fused, RequiresSupport

if TYPE_CHECKING:
    from lorabench.contract.batch import Batch

FA2 = "pip install flash-attn --no-build-isolation (it compiles for as long as an hour, unless a wheel fits)"
FA3 = (
    "no wheel of the Python package index has its backward pass; build the folder hopper/ of the flash-attention "
    "repository"
)
FA4 = "pip install --pre flash-attn-4"
HOPPER = CUDA | {"capability": (9, 0)}
SUPPORT: dict[str, Any] = {"words": "FlashAttention", "attribute": "_supports_flash_attn"}


@dataclass(frozen=True, kw_only=True)
class FlashAttention(Fused):
    """Base: a package that transformers knows."""

    def collate(self, batch: Batch) -> Batch:
        from .segments import with_segments

        flat = "position_ids" in batch.inputs or len(batch.inputs["input_ids"]) == 1
        return with_segments(batch) if flat and "attention_mask" not in batch.inputs else batch

    def settings(self) -> Settings:
        return Settings(model={"attn_implementation": self.implementation})


@dataclass(frozen=True, kw_only=True)
class FlashAttention2(FlashAttention):
    name: ClassVar[str] = "flash_attention_2"
    summary: ClassVar[str] = "the package flash-attn, FlashAttention-2: dense, padded (varlen) and packed (varlen)"
    # The second name is the compiled part: flash-attn-4 installs into the folder of the first.
    requires: ClassVar[Requires] = RequiresSupport(
        **CUDA, **SUPPORT, packages={"flash_attn": FA2, "flash_attn_2_cuda": FA2}
    )
    implementation: ClassVar[str] = "flash_attention_2"
    operators: ClassVar[tuple[str, ...]] = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")

    def settings(self) -> Settings:
        return Settings(model={"attn_implementation": self.implementation}, axolotl={"flash_attention": True})


@dataclass(frozen=True, kw_only=True)
class FlashAttention3(FlashAttention):
    name: ClassVar[str] = "flash_attention_3"
    summary: ClassVar[str] = "FlashAttention-3 for Hopper, built from the source's folder hopper/"
    requires: ClassVar[Requires] = RequiresSupport(**HOPPER, **SUPPORT, packages={"flash_attn_interface": FA3})
    implementation: ClassVar[str] = "flash_attention_3"
    operators: ClassVar[tuple[str, ...]] = ("flash_attn_3::fwd",)


@dataclass(frozen=True, kw_only=True)
class FlashAttention4(FlashAttention):
    """Its kernels are written in Python and are no operators of torch: seen are its autograd functions. They compile at
    the first call of each class of shapes."""

    name: ClassVar[str] = "flash_attention_4"
    summary: ClassVar[str] = "the package flash-attn-4 (CuTe DSL), a pre-release"
    requires: ClassVar[Requires] = RequiresSupport(
        **HOPPER, **SUPPORT, packages={"flash_attn.cute": FA4, "cutlass": FA4}
    )
    implementation: ClassVar[str] = "flash_attention_4"
    operators: ClassVar[tuple[str, ...]] = ("FlashAttnFunc", "FlashAttnVarlenFunc")

    def ran(self, ops: Counter[str]) -> dict[str, int]:
        older = sum(ops[name] for name in FlashAttention2.operators)  # whose functions have the same names
        return {} if older else super().ran(ops)
