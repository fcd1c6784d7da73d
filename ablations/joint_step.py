"""The joint step of several jobs: their rows in one batch, one loss each.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.joint import Joint
from lorabench.contract.step import Step

OWN_WIDTH = "own_width"  # of a job's batch that was padded further: what its longest sample has


class Part(NamedTuple):
    """One job's rows of a joint batch, which lie one below the other: (rows, width) positions, of which the first
    `own_width` of each row may hold tokens."""

    job: int
    adapter: str
    rows: int
    width: int
    own_width: int

    @property
    def positions(self) -> int:
        return self.rows * self.width


class Router(Protocol):
    """Says to the model's linears which adapter the rows of the batches to come have."""

    def set(self, parts: Sequence[Part]) -> None: ...


class JointStep(Joint):
    """Packed: samples end to end in one row, positions starting again at each, which keeps attention inside a sample;
    samples that are all of one length lie side by side instead. Else every row is padded to the longest of all."""

    def __init__(self, steps: Sequence[Step], router: Router, *, packed: bool) -> None:
        super().__init__(steps)
        self.router, self.packed = router, packed
        self._items: Tensor | None = None

    def lay_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        made: list[list[Batch]] = [[] for _ in batches]
        for number in range(max(map(len, batches))):
            there = [i for i, own in enumerate(batches) if number < len(own)]
            laid = (_flat if self.packed else _widened)([batches[i][number] for i in there])
            for i, batch in zip(there, laid, strict=True):
                made[i].append(batch)
        return made

    def joined(self, batches: Sequence[Batch | None]) -> Batch:
        there = [(i, batch) for i, batch in enumerate(batches) if batch is not None]
        parts, inputs = [], [dict(batch.inputs) for _, batch in there]
        for (i, _), own in zip(there, inputs, strict=True):
            rows, width = own["input_ids"].shape
            parts.append(Part(i, self.steps[i].adapter, rows, width, own.pop(OWN_WIDTH, width)))
        along = 1 if "position_ids" in inputs[0] else 0
        together = {name: torch.cat([own[name] for own in inputs], along) for name in inputs[0]}
        counts = [sum(getattr(batch, name) for _, batch in there) for name in ("real", "padded", "trained")]
        return Batch(together | {"parts": tuple(parts)}, *counts)

    def forward(self, batch: Batch) -> Tensor:
        inputs = dict(batch.inputs)
        parts, labels = inputs.pop("parts"), inputs.pop("labels")
        self.router.set(parts)
        return self.losses(self.call(**inputs).logits, labels, parts)

    def losses(self, logits: Tensor, labels: Tensor, parts: Sequence[Part]) -> Tensor:
        """(jobs,) of logits (B, S, V) and labels (B, S): transformers' loss, summed up for each job. No sum goes over
        rows of two jobs, so that a NaN stays with its own."""
        following = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
        each = F.cross_entropy(logits.flatten(0, 1).float(), following, ignore_index=IGNORE, reduction="none")
        sums = {p.job: own.sum() for p, own in zip(parts, each.split([p.positions for p in parts]), strict=True)}
        nothing = each.new_zeros(())
        if self._items is None:
            self._items = each.new_tensor([step.items for step in self.steps])
        return torch.stack([sums.get(job, nothing) for job in range(len(self.steps))]) / self._items


def _widened(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of several jobs, all as wide as the widest of them."""
    if any("position_ids" in batch.inputs for batch in batches):
        raise Unsupported("the jobs' rows are packed, so there is nothing to pad; take batched_packed")
    width = max(batch.inputs["input_ids"].shape[1] for batch in batches)
    whole = all(not batch.padded and batch.inputs["input_ids"].shape[1] == width for batch in batches)
    return [batch if whole else _padded(batch, width) for batch in batches]


def _padded(batch: Batch, width: int) -> Batch:
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    rows, own = ids.shape
    mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
    more = (0, width - own)
    inputs = {
        "input_ids": F.pad(ids, more), "labels": F.pad(labels, more, value=IGNORE),
        "attention_mask": F.pad(mask, more), OWN_WIDTH: own,
    }  # fmt: skip
    return Batch(inputs, batch.real, rows * width - batch.real, batch.trained)


def _flat(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of several jobs without padding: each one row, or as they are where all samples have one length."""
    shapes = [batch.inputs["input_ids"].shape for batch in batches]
    packed = ["position_ids" in batch.inputs for batch in batches]
    if not any(packed) and not any(batch.padded for batch in batches) and len({width for _, width in shapes}) == 1:
        return list(batches)
    return [batch if done else _row(batch) for batch, done in zip(batches, packed, strict=True)]


def _row(batch: Batch) -> Batch:
    """A padded batch as one row: its real tokens, sample after sample."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"].clone()
    real = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
    labels[:, 0] = IGNORE  # in a row it would be predicted from the sample before
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    inputs: dict[str, Any] = {"input_ids": ids[real], "labels": labels[real], "position_ids": positions[real]}
    return Batch({name: x[None] for name, x in inputs.items()}, batch.real, 0, batch.trained)
