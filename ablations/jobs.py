"""Slot `jobs`: how several fine-tuning jobs on one base are trained. Each keeps its own adapter, samples, optimizer and
learning rate, and each loss and gradient is what the job has alone; docs/several-adapters.md says when to share a base.

`sequential` is what plain PEFT does. The others put the jobs' micro-batches of one number into one pass: the frozen
weights are read once for all of them, and a job that has fewer micro-batches is not in the later passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from lorabench.contract.ablation import Ablation, Evidence, NotApplied, Requires, Unsupported, added
from lorabench.contract.step import Step
from lorabench_ablations.lora_kernels import Kernel

if TYPE_CHECKING:
    from torch import nn

ONE_JOB = "the workload has no jobs of its own; expected one with `jobs`, as workload=two_jobs has"
ONE_ADAPTER = "it runs one adapter at a time, and here each row has its own"
MARK = "_lorabench_jobs"  # on the model: what says which rows belong to which adapter


@dataclass(frozen=True, kw_only=True)
class Sequential(Ablation):
    name: ClassVar[str] = "sequential"
    slot: ClassVar[str] = "jobs"
    summary: ClassVar[str] = "one job after the other, as plain PEFT does by set_adapter"

    def join(self, steps: Sequence[Step]) -> list[Step]:
        return list(steps)

    def audit(self, evidence: Evidence) -> int:
        return _of_jobs(evidence)


BOTH_SAY = "tokens= and a scheduler both say which samples go together; leave one out"


@dataclass(frozen=True, kw_only=True)
class Together(Ablation):
    """Base: one pass for the rows of several jobs. `packed`: in which layout, see `JointStep`.

    tokens: the jobs' samples are shared out anew over micro-batches of at most so many positions, padding counted;
    None: as the workload has them. at_a_time: so many jobs go together, in their order; None: all.
    """

    slot: ClassVar[str] = "jobs"
    packed: ClassVar[bool]
    excludes: ClassVar[dict[str, str]] = {
        "batch_size": "it tries micro-batches of one job alone",
        "parallel": "a wrapper around the model shares out the samples of one job",
        **dict.fromkeys(("fused_kernels", "mlp", "qkv", "o", "lora_linear"), ONE_ADAPTER),
        "loss": "it gives one loss for all rows, and here each job has its own",
    }

    tokens: PositiveInt | None = None
    at_a_time: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            object.__setattr__(self, "excludes", self.excludes | {"scheduler": BOTH_SAY})

    def patch(self, model: nn.Module) -> int:
        from .joint_linears import route

        return route(model, MARK)

    def join(self, steps: Sequence[Step]) -> list[Step]:
        if not all(step.name for step in steps):
            raise Unsupported(f"{self.name}: {ONE_JOB}")
        router, size = getattr(steps[0].model, MARK), self.at_a_time or len(steps)
        return [self.joint(steps[i : i + size], router) for i in range(0, len(steps), size)]

    def joint(self, steps: Sequence[Step], router: Any) -> Step:
        from .joint_step import JointStep

        return JointStep(steps, router, packed=self.packed, tokens=self.tokens)

    def audit(self, evidence: Evidence) -> int:
        """The linears in which rows met their own adapters."""
        _of_jobs(evidence)
        return getattr(evidence.arm.model, MARK).linears

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        shapes = [list(batch.inputs["input_ids"].shape) for batch in evidence.arm.micro_batches]
        return {"joint_batches": shapes}


@dataclass(frozen=True, kw_only=True)
class Batched(Together):
    """m-LoRA's BatchLoRA: one product with each frozen weight, then each adapter on its own rows, one after the other.
    Its dropout is that of the job alone, in whose width it is drawn."""

    name: ClassVar[str] = "batched"
    summary: ClassVar[str] = "all jobs' rows in one batch, padded to the longest (m-LoRA's BatchLoRA)"
    packed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:  # the masks are of micro-batches that the job does not have alone
            object.__setattr__(self, "own_dropout_masks", True)


@dataclass(frozen=True, kw_only=True)
class BatchedPacked(Together):
    """The same without padding: all samples end to end in one row; where all are of one length, side by side."""

    name: ClassVar[str] = "batched_packed"
    summary: ClassVar[str] = "all jobs' samples in one batch without padding; no attention across samples or jobs"
    packed: ClassVar[bool] = True
    decides: ClassVar[tuple[str, ...]] = ("batching",)
    own_dropout_masks: ClassVar[bool] = True  # of a sample that has no padding beside it


@dataclass(frozen=True, kw_only=True)
class FusedMultiLora(BatchedPacked):
    """lorakernels' `apply_multi` in the same layout. chunked_head: each job's loss by our chunked head, where the
    family's logits are its plain product. form: `slots`, all that `lora_kernels` has, the adapters side by side in the
    one product of each linear; or `linears`, the model's own layers with S, dS, dA and dB of all adapters in one launch
    each. Its published records before `form` was there are of `linears`."""

    name: ClassVar[str] = "fused_multi_lora"
    summary: ClassVar[str] = "ours: every kernel for rows of several adapters, without padding; a chunked head a job"
    decides: ClassVar[tuple[str, ...]] = ("batching",)
    requires: ClassVar[Requires] = Kernel.requires
    rank: ClassVar[int] = 1  # behind the toggles of norms and RoPE, whose parts the slots take over

    chunked_head: bool = True
    form: Literal["slots", "linears"] = added("slots")

    def patch(self, model: nn.Module) -> int:
        from .joint_kernels import route

        return route(model, MARK, self.name, slots=self.form == "slots")

    def joint(self, steps: Sequence[Step], router: Any) -> Step:
        from .joint_kernels import KernelStep

        return KernelStep(steps, router, packed=self.packed, tokens=self.tokens, chunked_head=self.chunked_head)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        chunked = evidence.arm.turns[0].innermost.chunked  # type: ignore[attr-defined]
        notes: dict[str, Any] = {
            "loss_of_each_job": "chunked head" if chunked else "of the whole logits",
            "form": self.form,
        }
        return super().notes(evidence) | notes | kernel_notes(getattr(evidence.arm.model, MARK))


def kernel_notes(router: Any) -> dict[str, Any]:
    """What of a `KernelRouter`'s model runs on the nodes of the fused form; nothing of the linears' form."""
    if router.report is None:
        return {}
    left = sorted({f"{site.part}: {site.reason}" for site in router.report.left})
    return {
        "lorakernels": {"changed": dict(router.report.counts), "left": left, "forwards": str(router.report.forwards)}
    }


def _of_jobs(evidence: Evidence) -> int:
    """How many jobs there are. Raises NotApplied where the workload names none."""
    if not evidence.arm.step.name:
        raise NotApplied(ONE_JOB)
    return len(evidence.arm.steps)
