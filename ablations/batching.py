"""Slot `batching`: how samples become batches. PEFT's users come with padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, NotApplied
from lorabench.contract.batch import IGNORE, Batch, Sample, pad
from lorabench.contract.settings import Code, Settings, Worth
from lorabench.contract.workload import Workload


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
class Packing(Ablation):
    """Samples end to end in rows of at most batch_size x seq_len tokens, first-fit-decreasing (Johnson 1973).

    Position ids restart at each sample and no mask is given, from which transformers derives the block-diagonal causal
    mask: no token attends to another sample. The first token of each sample is not predicted, as when it stands alone.
    """

    name: ClassVar[str] = "packing"
    slot: ClassVar[str] = "batching"
    kinds: ClassVar[tuple[str, ...]] = ("train", "op")
    summary: ClassVar[str] = "samples end to end instead of padding; no attention across samples"
    worth_trying: ClassVar[Worth | None] = "time"
    excludes: ClassVar[dict[str, str]] = {
        "cuda_graph": "packed rows have lengths of their own, and a captured step has one shape"
    }

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        capacity = workload.batch_size * workload.seq_len
        return [
            _row([samples[i] for i in fit]) for fit in first_fit_decreasing([len(s.tokens) for s in samples], capacity)
        ]

    def audit(self, evidence: Evidence) -> int:
        """The number of samples that share a row, where packing saved padding."""
        arm = evidence.arm
        if len({len(s.tokens) for s in arm.samples}) == 1:
            raise NotApplied("every sample has the same length, so there is no padding to save")
        return len(arm.samples)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        rows = evidence.arm.step.batches
        return {"packing": {"samples": len(evidence.arm.samples), "rows": len(rows), "tokens": [b.real for b in rows]}}

    def settings(self) -> Settings:
        """The samples of a batch end to end, as here; TRL's `packing` and Axolotl's `sample_packing` also fill each row
        with samples of the steps to come."""
        return Settings(
            sft={"padding_free": True, "max_length": None},  # TRL refuses a max_length that it would not enforce
            collator=Code("DataCollatorWithFlattening()"),
            imports=("from transformers import DataCollatorWithFlattening",),
            axolotl={"sample_packing": True},
            note="padding_free cuts no sample: cut those that are too long beforehand",
        )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the samples in each bin: longest first, each into the first bin with room.

    Raises ValueError for a sample longer than `capacity` tokens.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > capacity:
            raise ValueError(f"a sample of {lengths[index]} tokens does not fit a row of {capacity}")
        slot = next((i for i, free in enumerate(room) if free >= lengths[index]), None)
        if slot is None:
            slot = len(bins)
            bins.append([])
            room.append(capacity)
        bins[slot].append(index)
        room[slot] -= lengths[index]
    return bins


def _row(samples: Sequence[Sample]) -> Batch:
    import torch

    ids, labels, positions = [], [], []
    for sample in samples:
        ids += sample.tokens
        labels += [IGNORE, *sample.labels[1:]]
        positions += range(len(sample.tokens))
    rows = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return Batch(
        {name: torch.tensor([values]) for name, values in rows.items()},
        real=len(ids),
        padded=0,
        trained=sum(label != IGNORE for label in labels),
    )
