"""Slot `batching`: how samples become batches. PEFT's users come with padding.

packing.py puts samples end to end, grouping.py puts samples of like lengths together; here is what they share. Each
trains the same samples as padding, and every loss is a sum over the step's trained tokens: the gradients are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.settings import Settings
from lorabench.contract.step import Step
from lorabench.contract.workload import Workload
from lorabench.plan.packing_gain import Layout, MicroBatch

if TYPE_CHECKING:
    from torch import nn

MASKED_WHOLE = ("sdpa", "eager")  # attention that computes every pair of a row and masks what is not wanted


@dataclass(frozen=True, kw_only=True)
class Padding(Ablation):
    name: ClassVar[str] = "padding"
    slot: ClassVar[str] = "batching"
    kinds: ClassVar[tuple[str, ...]] = ("train", "op")
    summary: ClassVar[str] = "samples side by side, padded on the right to the longest of the batch"

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        return pad(samples, workload.batch_size)

    def audit(self, evidence: Evidence) -> int:
        return len(evidence.arm.step.batches)

    def settings(self) -> Settings:
        return Settings(axolotl={})  # what all of them do anyway


@dataclass(frozen=True, kw_only=True)
class OtherThanPadding(Ablation):
    """Base of the others, with the note from which a report predicts what they gain."""

    slot: ClassVar[str] = "batching"
    kinds: ClassVar[tuple[str, ...]] = ("train", "op")

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return layout(evidence)


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def own_batches(evidence: Evidence) -> list[MicroBatch]:
    """The micro-batches of all jobs, as they are."""
    return [micro_batch(batch) for step in evidence.arm.steps for batch in step.batches]


def padded_batches(evidence: Evidence) -> list[MicroBatch]:
    """The micro-batches that padding would have made of the same samples, as many of them side by side."""
    made = []
    for index, step in enumerate(evidence.arm.steps):
        if step.job:
            sizing = evidence.arm.sizings[index]
            size = sizing.batch_size if sizing else step.job.workload.batch_size
            made += [micro_batch(batch) for batch in pad(_share(evidence, step), size)]
    return made


def _share(evidence: Evidence, step: Step) -> Sequence[Sample]:
    """The samples of a step that are this rank's."""
    shares = (a.shard(step.samples, evidence.arm.ranks) for a in evidence.arm.ablations)
    return next((own for own in shares if own is not None), step.samples)


def micro_batch(batch: Batch) -> MicroBatch:
    """The shape of a batch, and the lengths of its samples: by the mask of the padding, by the positions that start
    again at 0, or (without either) the whole width. Of attention alone a batch has the places of its tokens. Padding
    behind a packed row starts at 0 as well, and is no sample."""
    inputs = batch.inputs
    rows, width = inputs["input_ids" if "input_ids" in inputs else "token"].shape
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if mask is not None:
        return MicroBatch(rows, width, tuple(mask.sum(1).tolist()))
    starts = [0] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
    lengths = [end - start for start, end in itertools.pairwise([*starts, width])]
    if len(lengths) > 1 and lengths[-1] == batch.padded:
        lengths.pop()
    return MicroBatch(rows, width, tuple(lengths * rows))


def layout(evidence: Evidence) -> dict[str, Any]:
    """The note from which a report predicts the gain."""
    token, pair = _flops(evidence.arm.model)
    workloads = [step.job.workload for step in evidence.arm.steps if step.job]
    made = Layout(
        padded=padded_batches(evidence),
        own=own_batches(evidence),
        knows_borders=not _attention(evidence).startswith(MASKED_WHOLE),
        token_flop=token,
        pair_flop=pair,
        lengths=next((w.lengths_are for w in workloads if w.lengths_are), None),
    )
    return {"layout": made.model_dump(mode="json")}


def _attention(evidence: Evidence) -> str:
    """The implementation, by transformers' name for it."""
    return str(getattr(evidence.arm.model.config, "_attn_implementation", ""))


def _flops(model: nn.Module) -> tuple[int, int]:
    """Forward and backward FLOPs of one token in the linears, where a frozen weight gets no gradient, and of one pair
    of positions in attention (two products forward, five backward, as in lorabench/measure/flops.py)."""
    from torch.nn import Linear

    config: Any = model.config
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    token = sum(m.in_features * m.out_features * (6 if m.weight.requires_grad else 4) for m in linears)
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return token, 14 * config.num_hidden_layers * heads * head_dim
