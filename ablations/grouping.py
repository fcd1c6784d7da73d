"""Slot `batching`: samples of like lengths side by side, so that little is padded. The step's samples stay the same;
which of them share a micro-batch changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.settings import Settings
from lorabench.contract.workload import Workload
from lorabench_ablations.batching import OtherThanPadding, lengths_of, own_batches, padded_batches

NO_CAPTURE = {
    "cuda_graph": "grouped micro-batches have widths of their own at every step, and each width would be a graph"
}


@dataclass(frozen=True, kw_only=True)
class GroupByLength(OtherThanPadding):
    """As transformers' `train_sampling_strategy="group_by_length"`: the samples in mega-batches of `mega_batches`
    micro-batches, sorted by length inside each, the step's longest sample first; then padded.

    transformers draws a mega-batch from the whole data set, and takes each micro-batch of it for another update. Here
    the step's own samples are sorted, so that the step trains what the reference's trains: with few micro-batches more
    padding stays than with transformers' fifty.
    """

    name: ClassVar[str] = "group_by_length"
    summary: ClassVar[str] = "the step's samples sorted by length, then padded"
    excludes: ClassVar[dict[str, str]] = NO_CAPTURE

    mega_batches: PositiveInt = 50

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        order = grouped(lengths_of(samples), self.mega_batches * workload.batch_size)
        return pad([samples[i] for i in order], workload.batch_size)

    def audit(self, evidence: Evidence) -> int:
        """The number of micro-batches, where their widths have changed."""
        padded, own = padded_batches(evidence), own_batches(evidence)
        if sorted(b.width for b in padded) != sorted(b.width for b in own):
            return len(own)
        why = "each is as wide as without it"
        if all(b.rows == 1 for b in own):
            why = "a micro-batch of one sample has no padding"
        elif len(own) == len(evidence.arm.steps):
            why = "the step is one micro-batch; give the workload more samples"
        raise NotApplied(f"sorting changes no micro-batch: {why}")

    def settings(self) -> Settings:
        return Settings(
            trainer={"train_sampling_strategy": "group_by_length"},
            axolotl={"group_by_length": True},
            note="samples of like lengths then come in one update: the loss curve is jagged",
        )


@dataclass(frozen=True, kw_only=True)
class TokenBudget(OtherThanPadding):
    """Padded micro-batches of at most `tokens` positions, padding included, of the samples sorted by length: many short
    samples or few long ones. None: batch_size x seq_len, what padding takes at most."""

    name: ClassVar[str] = "token_budget"
    summary: ClassVar[str] = "sorted by length, as many samples a micro-batch as a number of padded tokens allows"
    excludes: ClassVar[dict[str, str]] = NO_CAPTURE

    tokens: PositiveInt | None = None

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch]:
        try:
            parts = budgeted(lengths_of(samples), self.tokens or workload.batch_size * workload.seq_len)
        except ValueError as error:
            raise Unsupported(f"token_budget: {error}") from None
        return [pad([samples[i] for i in part], len(part))[0] for part in parts]

    def audit(self, evidence: Evidence) -> int:
        """The number of micro-batches, where they are others than padding's."""
        own = own_batches(evidence)
        if sorted(b[:2] for b in own) == sorted(b[:2] for b in padded_batches(evidence)):
            raise NotApplied("the budget makes micro-batches of the same shapes as padding does")
        return len(own)


def grouped(lengths: Sequence[int], mega_batch: int) -> list[int]:
    """Indices of the samples, sorted by length inside each `mega_batch` of them, longest first; the longest of all
    changes places with the first, so that a step that runs out of memory does so at once."""
    parts = [range(i, min(i + mega_batch, len(lengths))) for i in range(0, len(lengths), mega_batch)]
    order = [i for part in parts for i in sorted(part, key=lambda i: -lengths[i])]
    if order:
        longest = max(range(len(order)), key=lambda place: lengths[order[place]])
        order[0], order[longest] = order[longest], order[0]
    return order


def budgeted(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of the samples in each micro-batch: longest first, as many as fit when all are as wide as the first.

    Raises ValueError for a sample longer than `tokens`.
    """
    if lengths and max(lengths) > tokens:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit a budget of {tokens}")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    parts: list[list[int]] = []
    while order:
        count = tokens // lengths[order[0]]
        parts.append(order[:count])
        order = order[count:]
    return parts
