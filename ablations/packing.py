"""Slot `batching`: samples end to end in one row, so that nothing is padded.

Position ids restart at each sample and no mask is given, from which transformers derives the block-diagonal causal
mask: no token attends to another sample. The first token of each sample is not predicted, as when it stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, added
from lorabench.contract.batch import IGNORE, Batch, Sample
from lorabench.contract.settings import Code, Settings, Worth
from lorabench.contract.workload import Workload
from lorabench_ablations.batching import OtherThanPadding, lengths_of, own_batches, padded_batches

FLATTENED = Settings(
    sft={"padding_free": True, "max_length": None},  # TRL refuses a max_length that it would not enforce
    collator=Code("DataCollatorWithFlattening()"),
    imports=("from transformers import DataCollatorWithFlattening",),
    axolotl={"batch_flattening": True},
    note="padding_free cuts no sample: cut those that are too long beforehand",
)


@dataclass(frozen=True, kw_only=True)
class Packing(OtherThanPadding):
    """The step's samples in rows of at most batch_size x seq_len tokens, or of `row_tokens`.

    strategy ffd: first-fit-decreasing, bfd: best-fit-decreasing (both Johnson 1973), arrival: a new row as soon as the
    next sample does not fit. None of them cuts a sample, where TRL's bfd cuts those that are longer than a row.
    """

    name: ClassVar[str] = "packing"
    summary: ClassVar[str] = "samples end to end instead of padding; no attention across samples"
    own_dropout_masks: ClassVar[bool] = True  # of rows without padding, which plain PEFT does not have
    worth_trying: ClassVar[Worth | None] = "time"

    strategy: Literal["ffd", "bfd", "arrival"] = added("ffd")
    row_tokens: PositiveInt | None = added(None)

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        capacity = self.row_tokens or workload.batch_size * workload.seq_len
        try:
            rows = STRATEGIES[self.strategy](lengths_of(samples), capacity)
        except ValueError as error:
            raise Unsupported(f"packing: {error}") from None
        return [row([samples[i] for i in fit]) for fit in rows]

    def audit(self, evidence: Evidence) -> int:
        """The number of samples that share a row, where that saves padding or micro-batches."""
        padded, own = padded_batches(evidence), own_batches(evidence)
        if sum(b.positions for b in padded) == sum(b.real for b in padded) and len(own) >= len(padded):
            raise NotApplied(
                "every sample of a micro-batch has the same length, so there is no padding to save, and "
                f"{len(own)} packed rows are not fewer than {len(padded)} micro-batches"
            )
        return sum(len(b.lengths) for b in own if len(b.lengths) > 1)

    def settings(self) -> Settings:
        """The samples of a batch end to end, as here. TRL's `packing` and Axolotl's `sample_packing` also fill each row
        with samples of the steps to come."""
        if self.strategy == "bfd":
            return replace(
                FLATTENED,
                sft={"packing": True, "packing_strategy": "bfd"},
                axolotl={"sample_packing": True},
                note="TRL's packing cuts samples longer than max_length, and an update then has more samples",
            )
        in_order = {"sample_packing_sequentially": True} if self.strategy == "arrival" else {}
        return replace(FLATTENED, axolotl={"sample_packing": True, **in_order})


@dataclass(frozen=True, kw_only=True)
class PaddingFree(OtherThanPadding):
    """The samples of each micro-batch end to end in one row, in their order, as transformers' flattening collator and
    TRL's `padding_free` put them: the micro-batches stay what they were, without their padding."""

    name: ClassVar[str] = "padding_free"
    summary: ClassVar[str] = "each micro-batch as one row without padding; no attention across samples"
    own_dropout_masks: ClassVar[bool] = True  # of rows without padding, which plain PEFT does not have

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        size = workload.batch_size
        return [row(samples[i : i + size]) for i in range(0, len(samples), size)]

    def audit(self, evidence: Evidence) -> int:
        """The number of samples that share a row where there was padding."""
        own = own_batches(evidence)
        if saved := sum(len(b.lengths) for b in own if len(set(b.lengths)) > 1):
            return saved
        alone = all(len(b.lengths) == 1 for b in own)
        why = "a micro-batch is one sample" if alone else "the samples of each have one length"
        raise NotApplied(f"no micro-batch has padding to leave out: {why}")

    def settings(self) -> Settings:
        return FLATTENED


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the samples in each row: longest first, each into the first row with room.

    Raises ValueError for a sample longer than `capacity` tokens.
    """
    return _decreasing(
        lengths, capacity, lambda room, needed: next((i for i, r in enumerate(room) if r >= needed), None)
    )


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The same, each into the row that it leaves the least room in."""

    def fullest(room: Sequence[int], needed: int) -> int | None:
        return min((i for i, r in enumerate(room) if r >= needed), key=lambda i: room[i], default=None)

    return _decreasing(lengths, capacity, fullest)


def arrival(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The same, in the samples' own order: a new row as soon as the next one does not fit."""
    _check(lengths, capacity)
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room or not rows:
            rows.append([])
            room = capacity
        rows[-1].append(index)
        room -= length
    return rows


STRATEGIES: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "ffd": first_fit_decreasing,
    "bfd": best_fit_decreasing,
    "arrival": arrival,
}


def _decreasing(
    lengths: Sequence[int], capacity: int, choose: Callable[[Sequence[int], int], int | None]
) -> list[list[int]]:
    _check(lengths, capacity)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        chosen = choose(room, lengths[index])
        if chosen is None:
            chosen = len(rows)
            rows.append([])
            room.append(capacity)
        rows[chosen].append(index)
        room[chosen] -= lengths[index]
    return rows


def _check(lengths: Sequence[int], capacity: int) -> None:
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit a row of {capacity}")


def row(samples: Sequence[Sample]) -> Batch:
    """Samples end to end, as a batch of one row."""
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
