"""Slot `checkpointing`, ours: each layer keeps its input and attention's result, and makes the rest again in backward.

python -m lorabench.sweep 'models=[tiny-llama]' 'ablations=[{long_context:{mlp_rows:8}}]'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, added
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.work import Recomputed

from .checkpointing import NO_CAPTURE, SLOT
from .lora_kernels import MARK, Kernel

if TYPE_CHECKING:
    from torch import nn

OTHERS = dict.fromkeys(
    ("liger", "axolotl", "axolotl_liger", "unsloth", "limit", "lora_linear"),
    "it changes the layers that long_context takes as a whole",
)
ONE_ADAPTER = dict.fromkeys(("jobs", "pipeline_multi_adapter"), "long_context runs one adapter at a time")
ONE_GPU = {"parallel": "long_context(offload_weights=True) brings a layer's weights to one GPU"}
OF_ITS_LINEARS = 0.73  # what is computed again of a layer's linears in Llama-3.1-8B, all but down


@dataclass(frozen=True, kw_only=True)
class LongContext(Kernel):
    """`lorakernels.apply(long_context=…)`, whose options these are, with the kernels of decoder layers that it needs.

    `keep_attention`: attention's output and log-sum-exp are kept, else it runs again. `mlp_rows`: how many rows of the
    MLP are made again at a time, without down. `offload`: what is kept waits in pinned host memory, copied on a stream
    of its own and fetched one layer ahead. `offload_weights`: so do the layers' frozen weights, all but those of the
    layer that computes and of the next one.
    """

    name: ClassVar[str] = "long_context"
    slot: ClassVar[str] = SLOT
    summary: ClassVar[str] = "ours: layers made again in backward, but for attention and the MLP's down projection"
    parts: ClassVar[tuple[str, ...]] = ("mlp", "qkv", "o", "rms_norm", "rope")
    worth_trying: ClassVar[Worth | None] = "memory"

    keep_attention: bool = True
    mlp_rows: PositiveInt = 8192
    offload: bool = False
    offload_weights: bool = added(False)

    @property
    def _moves(self) -> list[str]:
        """The options that move tensors to host memory."""
        return [name for name in ("offload", "offload_weights") if getattr(self, name)]

    @property
    def excludes(self) -> Mapping[str, str]:  # type: ignore[override]
        tiled = {"tiled_mlp": "long_context makes the MLP by tiles itself"}
        captured = NO_CAPTURE if self._moves else {}
        return OTHERS | ONE_ADAPTER | tiled | captured | (ONE_GPU if self.offload_weights else {})

    @property
    def recomputes(self) -> Recomputed:  # type: ignore[override]
        return Recomputed(linears=OF_ITS_LINEARS, attention=float(not self.keep_attention))

    def options(self) -> dict[str, Any]:
        from lorakernels import LongContext

        return {"long_context": LongContext(**asdict(self))}

    def patch(self, model: nn.Module) -> int:
        if self._moves and next(model.parameters()).device.type != "cuda":
            raise Unsupported(f"long_context({self._moves[0]}=True) needs a CUDA device: on a CPU nothing would move")
        super().patch(model)
        return getattr(model, MARK)["report"].counts.get("long_context", 0)

    def audit(self, evidence: Evidence) -> int:
        report = getattr(evidence.arm.model, MARK)["report"]
        ran = report.forwards.fused
        if missing := [e for e in report.left if e.part == "long_context"]:
            raise NotApplied(
                f"{len(missing)} layers keep every activation, {missing[0].name} first: {missing[0].reason}"
            )
        if not ran["layer made again"]:
            raise NotApplied("no layer was made again in backward")
        if self.keep_attention and ran["attention kept"] < ran["layer made again"]:
            raise NotApplied("attention came by as no one operator of torch, so that nothing of it was kept")
        if self.offload_weights and not ran["weights brought"]:
            raise NotApplied("no layer's weights waited in host memory: they are quantized or sharded")
        return evidence.patched or 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        ran = getattr(evidence.arm.model, MARK)["report"].forwards.fused
        counts = {"layers_run_again": "layer made again", "attention_kept": "attention kept"}
        counts |= {"weights_brought": "weights brought"} if self.offload_weights else {}
        return {self.name: {name: ran[count] for name, count in counts.items()}}

    def settings(self) -> Settings:
        changed = [f"{name}={value}" for name, value in asdict(self).items() if value != getattr(type(self)(), name)]
        given = f"lorakernels.LongContext({', '.join(changed)})" if changed else "True"
        return Settings(
            trainer={"gradient_checkpointing": False}, axolotl={"gradient_checkpointing": False},
            imports=("import lorakernels",), code=(f"lorakernels.apply(model, long_context={given})",),
        )  # fmt: skip
