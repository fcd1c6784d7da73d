"""Samples and batches, and the plain way from one to the other: padding.

Padding positions never count as work done: real and padded tokens are kept apart everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

IGNORE = -100  # the label that cross-entropy leaves out


@dataclass(frozen=True)
class Sample:
    """One training sample: `tokens` and `labels` of equal length; the first token is never predicted."""

    tokens: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """Positions that contribute to the loss, however the sample is batched."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the model's inputs (input_ids and labels (B, S), int64; attention_mask or position_ids where
    needed; what a toggle's `collate` adds), and its counts of real, padding and trained positions."""

    inputs: dict[str, Any]
    real: int
    padded: int
    trained: int


def pad(samples: Sequence[Sample], batch_size: int) -> list[Batch]:
    """Plain batching: `batch_size` samples side by side, in order, padded on the right to the longest of them."""
    return [_pad_one(samples[i : i + batch_size]) for i in range(0, len(samples), batch_size)]


def _pad_one(samples: Sequence[Sample]) -> Batch:
    import torch

    width = max(len(s.tokens) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        n = len(sample.tokens)
        ids[row, :n] = torch.tensor(sample.tokens)
        labels[row, :n] = torch.tensor(sample.labels)
        mask[row, :n] = 1
    real = int(mask.sum())
    inputs = {"input_ids": ids, "labels": labels}
    if real < ids.numel():  # without padding there is no mask, so that attention may take its causal path
        inputs["attention_mask"] = mask
    return Batch(inputs, real=real, padded=ids.numel() - real, trained=int((labels[:, 1:] != IGNORE).sum()))
