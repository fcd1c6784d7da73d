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
    from torch.nn.utils.rnn import pad_sequence

    def padded(rows: Sequence[Sequence[int]], padding: int = 0) -> torch.Tensor:
        each = [torch.tensor(row, dtype=torch.long) for row in rows]
        return pad_sequence(each, batch_first=True, padding_value=padding)

    ids, labels = padded([s.tokens for s in samples]), padded([s.labels for s in samples], IGNORE)
    mask = padded([[1] * len(s.tokens) for s in samples])
    real = int(mask.sum())
    inputs = {"input_ids": ids, "labels": labels}
    if real < ids.numel():  # without padding there is no mask, so that attention may take its causal path
        inputs["attention_mask"] = mask
    return Batch(inputs, real=real, padded=ids.numel() - real, trained=int((labels[:, 1:] != IGNORE).sum()))
