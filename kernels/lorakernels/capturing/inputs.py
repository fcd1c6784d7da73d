"""A batch made to fit a graph: padded to a bucket's length and copied into the tensors that the graph reads.

A batch is a dict. Tensors of the names in PADS are (rows, length) and are padded on the right; tensors of one number
(`num_items_in_batch`) are copied; numbers, flags and None are part of what was captured. All else fits no graph. What
decides the form (how long, where padded, packed or not) is read on the host: of a batch that lies on the GPU already,
that costs a wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from ..runtime import next_power_of_2

Batch = Mapping[str, Any]
BUCKETS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # at most a third is padding
PADS = {
    "input_ids": 0, "labels": -100, "shift_labels": -100, "attention_mask": 0, "token_type_ids": 0,
    "completion_mask": 0, "assistant_masks": 0, "position_ids": 0, "seq_idx": -1,
}  # fmt: skip
# What collators add for kernels that take lengths of packed samples; position_ids say the same.
LENGTHS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
CAUSAL, MADE, SEGMENTS = "causal", "from the inputs", "by segments"


class Eager(Exception):
    """Why a batch is not replayed, in words for whoever trains."""


@dataclass(frozen=True)
class Form:
    """What one graph is for: batches that differ in values only.

    masks: CAUSAL, where causality alone separates what must be; MADE, where a mask is made from attention_mask or
    position_ids inside the graph; SEGMENTS, where attention is told where samples begin; tensors: (name, dtype);
    constants: what else the step depends on.
    """

    rows: int
    length: int
    masks: str
    tensors: tuple[tuple[str, torch.dtype], ...]
    constants: tuple[Any, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What graphs of all sizes have in common."""
        return self.masks, self.tensors, self.constants


@dataclass
class Fitted:
    """A batch with its form: tensors, padded, where the batch was; constants: by name, as the batch has them."""

    form: Form
    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any] = field(default_factory=dict)
    padded: bool = False


def bucket_of(length: int, buckets: Sequence[int] = BUCKETS) -> int | None:
    """The smallest bucket that holds a row of so many tokens; None where there is none."""
    return min((bucket for bucket in buckets if bucket >= length), default=None)


def fit(batch: Batch, buckets: Sequence[int], attention: str, depends_on: tuple[Any, ...]) -> Fitted:
    """The batch in the smallest bucket that holds it. attention: transformers' name of the implementation; depends_on:
    hashable facts that are no inputs. Raises Eager with the reason where there is no such bucket."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise Eager("the batch has no input_ids of shape (rows, length)")
    rows, longest = ids.shape
    if (length := bucket_of(longest, buckets)) is None:
        raise Eager(f"longer than the largest bucket, {max(buckets)} tokens")
    segments = _by_segments(batch, attention)
    batch = _without_lengths(batch, attention, segments)
    tensors = {n: t for n, t in batch.items() if isinstance(t, torch.Tensor)}
    constants = {n: v for n, v in batch.items() if n not in tensors}
    padded = {name: _padded(name, t, (rows, longest), length) for name, t in tensors.items()}
    if segments:
        begins, masks = _begins(padded["position_ids"]), SEGMENTS
        padded |= {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
        constants |= {"max_length_q": length, "max_length_k": length}
        depends_on = (*depends_on, len(begins))
    else:
        masks = _masks(batch)
        if masks == MADE and attention.startswith("flash"):
            raise Eager("flash attention takes the lengths of left-padded samples, or of several rows', from the host")
    facts = (*depends_on, *sorted((n, v) for n, v in constants.items()))
    try:
        hash(facts)
    except TypeError:
        raise Eager(f"an input is neither tensor nor number: {', '.join(sorted(constants))}") from None
    form = Form(rows, length, masks, tuple(sorted((n, t.dtype) for n, t in padded.items())), facts)
    return Fitted(form, padded, constants, length > longest)


def _by_segments(batch: Batch, attention: str) -> bool:
    """Whether these are samples end to end in one row, and an attention that can be told where each begins."""
    told = attention.startswith("flash") and isinstance(batch.get("position_ids"), torch.Tensor)
    return told and len(batch["input_ids"]) == 1 and batch.get("attention_mask") is None


def _begins(positions: torch.Tensor) -> torch.Tensor:
    """(N + 1,), int32: where the N samples begin in a row of these positions (1, length), and where the last one ends.
    N is a power of two, so that few graphs are needed: samples that are added are empty, at the end."""
    starts = [0, *(torch.nonzero(positions[0].diff() != 1).flatten() + 1).tolist()]
    count = next_power_of_2(len(starts))
    length = positions.shape[1]
    return torch.tensor([*starts, *[length] * (count + 1 - len(starts))], dtype=torch.int32, device=positions.device)


def _without_lengths(batch: Batch, attention: str, segments: bool) -> Batch:
    """Kernels of other attentions than these would read the lengths that a collator adds; these make a mask, or are
    told the lengths of the padded row."""
    if not segments and (attention not in ("sdpa", "eager") or "position_ids" not in batch):
        return batch
    return {name: value for name, value in batch.items() if name not in LENGTHS}


def _padded(name: str, tensor: torch.Tensor, shape: tuple[int, int], length: int) -> torch.Tensor:
    if tensor.numel() == 1 and tensor.dim() <= 1:
        return tensor
    if name not in PADS or tensor.dim() != 2 or tensor.shape[1] != shape[1] or tensor.shape[0] not in (1, shape[0]):
        raise Eager(f"{name} {tuple(tensor.shape)} cannot be padded to a bucket")
    more = length - shape[1]
    if name == "position_ids" and more:  # they go on: nothing real comes behind them
        return torch.cat([tensor, tensor[:, -1:] + torch.arange(1, more + 1, device=tensor.device)], 1)
    return F.pad(tensor, (0, more), value=PADS[name])


def _masks(batch: Batch) -> str:
    """Whether causality alone keeps a batch's samples from padding and from one another."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, torch.Tensor):
        return CAUSAL if _right_padded(mask) and _untrained_padding(mask, batch.get("labels")) else MADE
    if isinstance(positions, torch.Tensor) and positions.shape[1] > 1:
        return CAUSAL if bool((positions.diff(dim=1) == 1).all()) else MADE
    return CAUSAL


def _right_padded(mask: torch.Tensor) -> bool:
    return mask.dim() == 2 and bool((mask[:, 1:] <= mask[:, :-1]).all())


def _untrained_padding(mask: torch.Tensor, labels: Any) -> bool:
    """Whether no padding has a label: without a mask it would see other padding, and its own loss would change."""
    return isinstance(labels, torch.Tensor) and labels.shape == mask.shape and bool((labels[mask == 0] == -100).all())


class StaticInputs:
    """The tensors that a graph reads, on the device, and the constants beside them."""

    def __init__(self, fitted: Fitted, device: torch.device):
        self._tensors = {name: torch.empty_like(t, device=device) for name, t in fitted.tensors.items()}
        self._constants = dict(fitted.constants)

    def feed(self, fitted: Fitted) -> None:
        for name, static in self._tensors.items():
            new = fitted.tensors[name]
            if static.is_cuda and not new.is_cuda:
                new = new.pin_memory()  # copied when the device comes to it, without a wait
            static.copy_(new, non_blocking=True)

    def batch(self) -> dict[str, Any]:
        """As the model takes it; a new dict each time, for trainers write into theirs."""
        return {**self._tensors, **self._constants}


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device."""
    return {n: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
