"""Slot `capture`: the whole step as CUDA graphs, replayed. Worth more than any kernel where the host is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Requires, Unsupported
from lorabench.contract.joint import Joint
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.step import Step

if TYPE_CHECKING:
    from lorabench.contract.batch import Batch


@dataclass(frozen=True, kw_only=True)
class CudaGraph(Ablation):
    name: ClassVar[str] = "cuda_graph"
    slot: ClassVar[str] = "capture"
    summary: ClassVar[str] = "forward, backward and optimizer captured once and replayed"
    requires: ClassVar[Requires] = Requires(device="cuda", capability=(7, 0))
    kinds: ClassVar[tuple[str, ...]] = ("train", "op")
    worth_trying: ClassVar[Worth | None] = "time"
    rank: ClassVar[int] = 100  # outermost: it captures whatever the other toggles made of the step

    def collate(self, batch: Batch) -> Batch:
        """A packed row padded to the buckets that `lorakernels.capture` has. Its layout is another at every step, so a
        graph of this one alone would be of no use to whoever trains."""
        if "position_ids" not in batch.inputs:
            return batch
        from .joint_batches import bucket
        from .segments import ARGUMENTS, for_graphs

        if "parts" in batch.inputs:
            raise Unsupported("rows of several jobs end to end have a layout of their own at every step")
        if others := batch.inputs.keys() - {"input_ids", "labels", "position_ids", *ARGUMENTS}:
            raise Unsupported(f"it cannot pad what else a packed row has: {', '.join(sorted(others))}")
        return for_graphs(batch, bucket("a packed row", batch.inputs["input_ids"].shape[1]))

    def step(self, step: Step) -> Step:
        from lorakernels.capturing.graph import CudaGraphs

        from .captured_jobs import CapturedJoint
        from .captured_step import CapturedStep

        captured = CapturedJoint if isinstance(step.innermost, Joint) else CapturedStep
        return captured(step, CudaGraphs(next(step.model.parameters()).device))

    def training(self, step: Step) -> Step:
        from .captured_training import CapturedTraining

        if not isinstance(step.innermost, Joint):
            raise Unsupported("cuda_graph trains jobs that share micro-batches; expected way: fused_multi_lora, say")
        return CapturedTraining(step)

    def audit(self, evidence: Evidence) -> int:
        return sum(len(getattr(step, "graphs", ())) for step in evidence.arm.stepped)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        turns: list[Any] = evidence.arm.stepped
        layouts = [layout for step in turns for layout in step.layouts]
        return {
            "cuda_graph": {
                "captured": sorted({phase for step in turns for phase in step.graphs}),
                "shapes": len(layouts),
                "masks_left_out": sum(sum(layout.masks.left_out) for layout in layouts),
            }
        }

    def settings(self) -> Settings:
        """TRL's own loss picks the trained tokens with a mask, for which the host waits; `lorakernels.apply` puts
        another in its place. Where lora_kernels is on, too, the model is patched once."""
        return Settings(
            imports=("import lorakernels",),
            code=("lorakernels.apply(model)", "lorakernels.captured(trainer)"),
            note="TRL's own loss waits for the host, so SFTTrainer's steps are captured only with lorakernels.apply; "
            "what was measured has its kernels only where lora_kernels is on, too",
        )
