"""Slot `attention`, over segments in place of a mask: torch's varlen kernel, cuDNN's, and xformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Requires
from lorabench.contract.settings import Settings
from lorabench_ablations.attention import CUDA, Fused, RequiresSupport

if TYPE_CHECKING:
    from lorabench.contract.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Segmented(Fused):
    """Base: an attention function of ours in transformers' registry. Every sample, and every row's padding, is a
    segment; where they begin is computed once a batch, on the host, so no layer waits for the device."""

    def load(self, kwargs: dict[str, Any]) -> None:
        from .segments import register

        kwargs["attn_implementation"] = register(self.name)

    def collate(self, batch: Batch) -> Batch:
        from .segments import with_segments

        return with_segments(batch)


@dataclass(frozen=True, kw_only=True)
class Varlen(Segmented):
    name: ClassVar[str] = "varlen"
    summary: ClassVar[str] = "torch.nn.attention.varlen: FlashAttention-2 over segments, no package needed"
    requires: ClassVar[Requires] = RequiresSupport(**CUDA)
    operators: ClassVar[tuple[str, ...]] = ("torch_attn::_varlen_attn",)


@dataclass(frozen=True, kw_only=True)
class VarlenCudnn(Segmented):
    """cuDNN's attention, which on a Hopper GPU is the fastest over dense rows, by the operator that torch has for its
    nested tensors. By its source torch of about 2.11 builds a plan anew in each call, and a newer one keeps it for each
    number of segments and each longest one. On a GPU torch 2.11's gradients were wrong."""

    name: ClassVar[str] = "varlen_cudnn"
    summary: ClassVar[str] = "cuDNN's attention over segments, no package needed"
    requires: ClassVar[Requires] = RequiresSupport(**CUDA)
    operators: ClassVar[tuple[str, ...]] = ("aten::_cudnn_attention_forward",)


@dataclass(frozen=True, kw_only=True)
class Xformers(Segmented):
    """It has no kernel of its own for this: it hands on to FlashAttention, flash-attn's or torch's, or to torch's
    memory-efficient one. K and V are repeated, because grouped queries have no backward there."""

    name: ClassVar[str] = "xformers"
    summary: ClassVar[str] = "xformers' memory_efficient_attention over segments"
    requires: ClassVar[Requires] = RequiresSupport(**CUDA, packages={"xformers": "pip install --no-deps xformers"})
    operators: ClassVar[tuple[str, ...]] = (
        "xformers_flash::flash_fwd", "xformers_flash3::flash_fwd", "aten::_efficient_attention_forward",
    )  # fmt: skip

    def collate(self, batch: Batch) -> Batch:
        from .segments import xformers_mask

        return xformers_mask(super().collate(batch))

    def settings(self) -> Settings:
        note = "transformers has no attention of this name: only Axolotl's trainer has it, by its key below"
        return Settings(axolotl={"xformers_attention": True}, note=note)
