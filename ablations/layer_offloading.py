"""Slot `weight_placement`: the frozen weights wait in host memory, and each is on the device while it multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires
from lorabench.contract.settings import Settings

from .lora_kernels import MULTIPLY

if TYPE_CHECKING:
    from torch import nn

MARK = "_lorabench_streamed"  # on the model: what the toggle counts there


@dataclass(frozen=True, kw_only=True)
class LayerOffloading(Ablation):
    """What Axolotl calls `layer_offloading`, for each frozen linear below an adapter.

    It is copied from pinned host memory for its product in forward, again in backward, and kept in neither. Nothing is
    fetched ahead: the copies are on the compute stream, so a step is longer by twice the weights over PCIe.
    """

    name: ClassVar[str] = "layer_offloading"
    slot: ClassVar[str] = "weight_placement"
    summary: ClassVar[str] = "frozen linears wait in host memory, each on the device for its product alone"
    requires: ClassVar[Requires] = Requires(device="cuda")
    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys((*MULTIPLY, "base_precision"), "it multiplies with the frozen weights itself"),
        "loading": "quantized weights are no plain linears",
        "compilation": "the compiler would keep each copy for backward",
    }

    def patch(self, model: nn.Module) -> int:
        from .streamed_linear import stream

        streamed = stream(model, pin_memory=next(model.parameters()).is_cuda)
        setattr(model, MARK, streamed)
        return streamed.linears

    def audit(self, evidence: Evidence) -> int:
        streamed = getattr(evidence.arm.model, MARK)
        if not streamed.linears or not streamed.bytes_in:
            raise NotApplied("no frozen linear was copied to the device")
        return streamed.linears

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        streamed = getattr(evidence.arm.model, MARK)
        return {self.name: {"linears": streamed.linears, "host_bytes": streamed.held, "bytes_in": streamed.bytes_in}}

    def settings(self) -> Settings:
        return Settings(axolotl={"layer_offloading": True})
