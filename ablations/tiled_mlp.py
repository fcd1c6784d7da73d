"""Slot `mlp`: the MLP by tiles of rows, computed again inside its own backward (ALST's TiledMLP, arXiv 2506.13996).

    python -m lorabench.sweep 'models=[tiny-llama]' 'ablations=[{tiled_mlp:{shards:4}}]' lora.lora_dropout=0.1

The tiles of DeepSpeed, Liger and Axolotl keep no state of the random numbers. With `lora_dropout` above 0 their
backward draws other masks than their forward did: the gradients are wrong, and the loss looks right. Here it is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Unsupported
from lorabench.contract.work import Recomputed

if TYPE_CHECKING:
    from torch import nn

    from lorabench.contract.batch import Batch

SHARES = "both compute the MLP"
MARK = "_lorabench_tiles"  # on the model: how many tiles the last backward had, by MLP


@dataclass(frozen=True, kw_only=True)
class TiledMlp(Ablation):
    """Each MLP keeps its input alone; backward runs tile after tile forward and backward.

    `shards`: how many tiles; null: rows over the hidden size, rounded up, as DeepSpeed and Axolotl have it. Tiles draw
    masks of their own shapes, so the gate, which shares whole masks, looks at dropout 0.
    """

    name: ClassVar[str] = "tiled_mlp"
    slot: ClassVar[str] = "mlp"
    summary: ClassVar[str] = "the MLP by tiles of rows, computed again in its backward (ALST)"
    excludes: ClassVar[dict[str, str]] = {
        "fused_kernels": SHARES,
        "capture": "a graph cannot hold the state of the random numbers that every MLP keeps on the host",
        "compilation": "the compiler does not see into its backward",
    }
    own_dropout_masks: ClassVar[bool] = True
    recomputes: ClassVar[Recomputed | None] = Recomputed(linears=0.8)  # of the linears' FLOPs the MLP's share in Llama

    shards: PositiveInt | None = None

    def collate(self, batch: Batch) -> Batch:
        rows = batch.inputs["input_ids"].numel()
        if self.shards and self.shards > rows:
            raise Unsupported(f"{self.shards} shards divide nothing: a micro-batch has {rows} rows")
        return batch

    def patch(self, model: nn.Module) -> int:
        from .tiling import tile

        hidden = model.get_base_model().config.get_text_config().hidden_size  # type: ignore[operator,union-attr]
        counts: dict[str, int] = {}
        setattr(model, MARK, counts)
        mlps = {name: m for name, m in model.named_modules() if name.endswith(".mlp")}
        for name, mlp in mlps.items():
            tile(mlp, lambda rows: self.shards or math.ceil(rows / hidden), counts, name)
        return len(mlps)

    def audit(self, evidence: Evidence) -> int:
        counts = getattr(evidence.arm.model, MARK)
        if counts and max(counts.values()) < 2:
            raise NotApplied("one tile divides nothing: the rows are no more than the hidden size; give it shards=")
        return len(counts)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        counts = getattr(evidence.arm.model, MARK)
        return {self.name: {"mlps": len(counts), "tiles": max(counts.values(), default=0)}}
