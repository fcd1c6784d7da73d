"""Slot `parallel`: the model's layers divided among several processes, each a stage that micro-batches run through.

python -m lorabench.sweep world_size=2 'ablations=[pipeline_gpipe]' 'workload={8x256: {batch_size: 1, samples: 8}}'

The schedules are torch's (`torch.distributed.pipelining`); docs/pipelines.md says what each is and costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, Requires, Unsupported, added
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.ranks import Ranks
from lorabench.contract.step import Step
from lorabench.contract.workload import Workload
from lorabench_ablations.batching import lengths_of
from lorabench_ablations.jobs import BOTH_SAY, MARK, ONE_JOB, FusedMultiLora, kernel_notes
from lorabench_ablations.packing import row
from lorabench_ablations.parallel import divided_among_groups, pieces, sent, trained_bytes
from lorabench_ablations.pipeline_rows import Rows, shortest_step

if TYPE_CHECKING:
    from torch import nn

    from lorabench.contract.arm import Arm

    from .pipeline_stages import Line, Stage

BESIDE_KERNELS = {
    **dict.fromkeys(("norm", "rope", "loss"), "kernels=true already has this part"),
    "selective_checkpointing": (
        "a layer's second pass has to run the operators of its first, and with kernels=true it may have to empty the "
        "slots of a job that came between them; gradient_checkpointing goes with it"
    ),
}
FLUSHED = "flush=true empties the pipeline behind each job, and its micro-batches hold several"
ONE_SHAPE = "a stage receives into buffers of one shape, and its rows have many; tokens= of the pipeline packs as well"


@dataclass(frozen=True, kw_only=True)
class Pipelined(Ablation):
    """Base. Each rank keeps its own decoder layers; the first one has the embedding, the last one norm, head and loss.

    A step's samples go in micro-batches of one shape, as many as the workload's `batch_size` gives, and smaller ones
    where the schedule needs more of them. tokens: samples end to end instead, in rows of at most so many tokens, as
    long as makes the step fastest, and filled up to the longest; None: side by side, padded to the longest of the step.
    layers: of each stage; None: as many that the slowest stage is as fast as can be, by a measured layer and a measured
    head. ranks: so many in a row are one pipeline, and the pipelines divide the samples; None: all are one.
    """

    slot: ClassVar[str] = "parallel"
    parallel: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True
    rank: ClassVar[int] = -10  # first, and innermost: what others wrap is the pipeline
    decides: ClassVar[tuple[str, ...]] = ("batching",)
    own_dropout_masks: ClassVar[bool] = True  # drawn stage by stage
    requires: ClassVar[Requires] = Requires(families=frozenset({"llama", "mistral", "qwen2", "qwen3"}))
    excludes: ClassVar[dict[str, str]] = {
        "capture": "its sends and receives lie between the pieces that a graph would hold",
        "compilation": "it swaps the layers of the model that is compiled, stage by stage",
        "batch_size": "it tries micro-batches one by one, and here they are in the pipeline together",
        "activation_offloading": "it keeps one forward and its backward in mind, and here others lie between the two",
        **dict.fromkeys(("packing", "padding_free", "group_by_length", "token_budget"), ONE_SHAPE),
    }
    order: ClassVar[str]  # of a rank's forwards and backwards

    tokens: PositiveInt | None = None
    layers: tuple[PositiveInt, ...] | None = None
    ranks: PositiveInt | None = added(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:  # a list as YAML has it
            object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def each(self) -> int:
        """Stages a rank."""
        return 1

    def least_layers(self, ranks: int) -> int:
        return self.each * (self.ranks or ranks)

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample] | None:
        return None if self.ranks is None else divided_among_groups(self.name, samples, self.ranks, ranks)

    @property
    def line(self) -> Line:
        from .pipeline_stages import Line

        return Line.of(self.name, self.ranks)

    def divide(self, base: nn.Module) -> int | None:
        from .pipeline_stages import leave_out

        return leave_out(base, self.line, self.each, self.layers)

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        from .pipeline_step import alike, counted_once

        return counted_once(alike(self._agreed(samples, workload)), self.line)

    def _agreed(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        return self.line.agreed(partial(self._batches, samples, workload))

    def _batches(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        """Of their own shapes."""
        ranks = self.line.ranks
        if self.tokens is None:
            return pad(samples, self._size(len(samples), workload.batch_size, ranks))
        return self._rows(samples)

    def _size(self, samples: int, wanted: int, ranks: int) -> int:
        """Samples a micro-batch: at most as many as wanted, so that the schedule can take the micro-batches."""
        for size in range(min(wanted, samples), 0, -1):
            if self.takes(-(-samples // size), ranks):
                return size
        raise Unsupported(f"{self.name} needs at least {ranks} micro-batches on {ranks} ranks; a step has {samples}")

    def _rows(self, samples: Sequence[Sample]) -> list[Batch]:
        (found,) = self.rows([lengths_of(samples)])
        return [row([samples[n] for n in fit]) for fit in found]

    def rows(self, lengths: Sequence[Sequence[int]]) -> list[Rows]:
        """Of each job the samples of each of its rows of at most `tokens` tokens. Raises Unsupported."""
        assert self.tokens is not None
        try:
            return shortest_step(lengths, self.tokens, partial(self.passes, ranks=self.line.ranks))
        except ValueError as error:
            raise Unsupported(f"{self.name}: {error}") from None

    def passes(self, counts: Sequence[int], ranks: int) -> float:
        """How many micro-batches' time a step takes in which each job has so many: the pipeline fills and drains."""
        (count,) = counts
        return count + (ranks - 1) / self.each if self.takes(count, ranks) else math.inf

    def takes(self, count: int, ranks: int) -> bool:
        """Whether the schedule can run so many micro-batches."""
        return count >= ranks

    def step(self, step: Step) -> Step:
        from .pipeline_step import PipelineStep

        if step.name:
            raise Unsupported(f"{self.name} knows one job a model; pipeline_multi_adapter has several")
        return PipelineStep(step, self.line, self.order, self.each, self._split())

    def _split(self) -> tuple[int, ...] | None:
        stages = self.each * self.line.ranks
        if self.layers is not None and len(self.layers) != stages:
            raise Unsupported(f"layers={list(self.layers)}: expected {stages} numbers, one a stage")
        return self.layers

    def audit(self, evidence: Evidence) -> int:
        """The stages of a pipeline, where each of its ranks has computed."""
        machinery: Any = evidence.arm.stepped[0].innermost.machinery  # type: ignore[attr-defined]
        ran = {stage for (_, stage) in machinery.clock.runs[-1]}
        return len(machinery.split) if len(ran) * self.line.ranks == len(machinery.split) else 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        import torch.distributed as dist

        machinery: Any = evidence.arm.stepped[0].innermost.machinery  # type: ignore[attr-defined]
        batches, clock = evidence.arm.micro_batches, machinery.clock
        return {
            self.name: {
                "world_size": dist.get_world_size(), "backend": dist.get_backend(), "layers": machinery.split,
                "micro_batches": len(batches), "shape": list(batches[0].inputs["input_ids"].shape),
                "handed_bytes": {"send": clock.sent, "all_reduce": clock.given},
                "sent_bytes": round(clock.sent + sent("all_reduce", clock.given, self.line.pipelines)),
                "least_bytes": round(self._least(evidence.arm, machinery.mine)),
                "held_bytes": evidence.arm.parameter_bytes(),
            }
        }  # fmt: skip

    def _least(self, arm: Arm, stages: Sequence[Stage]) -> float:
        """The bytes that a rank of these stages has to send in a step: of every position the hidden state behind each
        but the last one, the gradient before each but the first one, and the stages' own adapters' gradients over the
        pipelines."""
        config: Any = arm.model.config
        positions = sum(batch.inputs["input_ids"].numel() for batch in arm.micro_batches)
        sides = sum((not stage.first) + (not stage.last) for stage in stages)
        between = sides * positions * config.hidden_size * arm.dtype.itemsize
        return between + sent("all_reduce", trained_bytes(arm), self.line.pipelines)


@dataclass(frozen=True, kw_only=True)
class PipelineGpipe(Pipelined):
    name: ClassVar[str] = "pipeline_gpipe"
    summary: ClassVar[str] = "layers divided among the ranks; all forwards, then all backwards (GPipe)"
    order: ClassVar[str] = "gpipe"


@dataclass(frozen=True, kw_only=True)
class Pipeline1F1B(Pipelined):
    name: ClassVar[str] = "pipeline_1f1b"
    summary: ClassVar[str] = "layers divided among the ranks; one forward, one backward in turn (PipeDream-Flush)"
    order: ClassVar[str] = "1f1b"


@dataclass(frozen=True, kw_only=True)
class PipelineInterleaved(Pipelined):
    """v: stages a rank."""

    name: ClassVar[str] = "pipeline_interleaved"
    summary: ClassVar[str] = "1F1B with several stages a rank, which makes the bubble smaller (Megatron-LM)"
    order: ClassVar[str] = "interleaved"

    v: PositiveInt = 2

    @property
    def each(self) -> int:
        return self.v

    def takes(self, count: int, ranks: int) -> bool:
        return count >= ranks and count % max(1, count // ranks) == 0


@dataclass(frozen=True, kw_only=True)
class PipelineMultiAdapter(Pipelined):
    """LoRAFusion's and mLoRA's: 1F1B over the micro-batches of all jobs, one job after the other without a flush, each
    job's optimizer step as soon as its last micro-batch is through. A trial is one global batch of every job. Beside a
    toggle of the slot `scheduler` that one says which samples go through together, in packed rows, and in what order.

    flush: the pipeline is emptied behind each job, as where the jobs are trained one after the other (Megatron-LM).
    kernels: the layers run on lorakernels' `apply_multi` in slots, as those of `fused_multi_lora` do, and the last
    stage has our chunked head. ranks: each job's samples are divided, and a job's gradients are added up over the
    pipelines before its own optimizer step.
    """

    name: ClassVar[str] = "pipeline_multi_adapter"
    summary: ClassVar[str] = (
        "1F1B over several jobs' micro-batches without a flush between the jobs (LoRAFusion, mLoRA)"
    )
    order: ClassVar[str] = "1f1b"
    excludes: ClassVar[dict[str, str]] = {
        **Pipelined.excludes,
        "jobs": "it says itself how the jobs are put together",
        **dict.fromkeys(
            ("fused_kernels", "mlp", "qkv", "o", "lora_linear"),
            "it runs one adapter at a time, and here each micro-batch has its own",
        ),
    }

    flush: bool = False
    kernels: bool = added(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        beside = BESIDE_KERNELS if self.kernels else {}
        if self.flush or self.tokens is not None:
            beside = beside | {"scheduler": FLUSHED if self.tokens is None else BOTH_SAY}
        object.__setattr__(self, "excludes", self.excludes | beside)
        if self.kernels:
            object.__setattr__(self, "requires", replace(self.requires, packages=FusedMultiLora.requires.packages))

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample] | None:
        """Those next to each other in the order of their length go to different pipelines, in the same place of each:
        so the pipelines have like work, and wait little for each other at each job's step. The order is otherwise the
        samples' own."""
        if self.ranks is None:
            return None
        count = ranks.size // pieces(self.name, self.ranks, ranks.size)
        by_length = sorted(range(len(samples)), key=lambda n: -len(samples[n].tokens))
        places = sorted((by_length[n : n + count] for n in range(0, len(samples), count)), key=min)
        return super().shard([samples[n] for place in places for n in place], ranks)

    def patch(self, model: nn.Module) -> int:
        from . import joint_kernels, joint_linears

        return joint_kernels.route(model, MARK, self.name) if self.kernels else joint_linears.route(model, MARK)

    def takes(self, count: int, ranks: int) -> bool:
        return not self.flush or super().takes(count, ranks)  # all jobs together have to fill it, see `join`

    def passes(self, counts: Sequence[int], ranks: int) -> float:
        alone = super().passes
        if self.flush:
            return sum(alone([count], ranks) for count in counts)
        return sum(counts) + ranks - 1 if sum(counts) >= ranks else math.inf

    def _rows(self, samples: Sequence[Sample]) -> list[Batch]:
        """One, of which the step of all jobs makes as many as are best for them together."""
        return [row(samples)]

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        """The joint step's layout gives them one shape: only it knows all jobs' samples, and whether a scheduler takes
        them."""
        from .pipeline_step import counted_once

        return counted_once(self._agreed(samples, workload), self.line)

    def join(self, steps: Sequence[Step]) -> list[Step]:
        from .pipeline_step import PipelineJoint

        if not all(step.name for step in steps):
            raise Unsupported(f"{self.name}: {ONE_JOB}")
        rows = None if self.tokens is None else self.rows
        router = getattr(steps[0].model, MARK)
        return [PipelineJoint(steps, self.line, router, self.order, self._split(), self.flush, rows)]

    def step(self, step: Step) -> Step:
        return step

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        made, joint = super().notes(evidence), evidence.arm.turns[0].innermost
        jobs_held = [len(batch.inputs["parts"]) for batch in evidence.arm.micro_batches]
        made[self.name] |= {
            "empty_micro_batches_of_an_endless_run": joint.empties,  # type: ignore[attr-defined]
            "jobs_of_each_micro_batch": jobs_held,
        }
        if joint.halved:  # type: ignore[attr-defined]
            made[self.name]["micro_batches_by_halving"] = joint.halved  # type: ignore[attr-defined]
        return made | (kernel_notes(getattr(evidence.arm.model, MARK)) if self.kernels else {})
