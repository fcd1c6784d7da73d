"""`capture(model, optimizer)`: a training step that is captured as CUDA graphs and replayed.

    step = lorakernels.capture(model, optimizer, buckets=(256, 512, 1024), max_grad_norm=1.0, accumulate=1)
    for batch in loader:        # on the host: the step copies it without waiting
        loss = step(batch)      # forward, backward; every `accumulate` batches clipping and the update
        if step.updated:
            scheduler.step()
    print(step.status())

Small models wait for the host, which launches thousands of kernels a step; a replay is one call. Where nothing can be
captured the same calls run as they are, and `status()` says why.
Run: python -m pytest tests/lorakernels/test_capture.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .backward import CapturedBackward
from .graph import CudaGraphs, Outputs, graphs_for
from .inputs import BUCKETS, Batch
from .state import why_uncapturable
from .status import Status
from .update import CapturedUpdate

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]


class CapturedStep:
    """What `capture` gives: call it with one batch after the other.

    updated: whether the last batch ended in an update; grad_norm: of the last clipping, before it, or None.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, buckets: Sequence[int], max_grad_norm: float | None,
        accumulate: int, loss: Loss,
    ):  # fmt: skip
        self.model, self.optimizer, self.max_grad_norm, self.accumulate = model, optimizer, max_grad_norm, accumulate
        self._loss, self._status = loss, Status()
        graphs, never = graphs_of(model)
        self._backward = CapturedBackward(model, self._run, buckets, graphs, self._status, never)
        self._update = CapturedUpdate(optimizer, graphs, self._status, never)
        self._waiting = 0  # batches whose gradients no update has used
        self.updated = False
        self.grad_norm: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """The batch's loss, of one number, on the model's device; nothing waits for it. With `accumulate`, a loss that
        is a mean is divided for its gradients, not for what is returned; with `num_items_in_batch` in the batch it is
        normalized already."""
        share = 1 if "num_items_in_batch" in batch else self.accumulate
        out = self._backward(batch, (share,))["loss"]
        self._waiting += 1
        self.updated = False
        if self._waiting >= self.accumulate:
            self.update()
        return out

    def update(self) -> None:
        """Clips, steps and clears the gradients now: for an epoch that ends within an accumulation."""
        if not self._waiting:
            return
        if self.max_grad_norm is not None:
            limit = self.max_grad_norm
            self.grad_norm = self._update.clip(self._clip, self._backward.gradients, limit)
        self._update.step(self._backward.gradients)
        self.optimizer.zero_grad(set_to_none=True)
        self._waiting, self.updated = 0, True

    def status(self) -> Status:
        """What was captured, replayed and left; prints as a few lines."""
        return self._status

    def release(self) -> None:
        """Frees graphs and their memory; the next batches capture anew."""
        self._backward.release()
        self._update.release()

    def _run(self, batch: dict[str, Any]) -> Outputs:
        share = 1 if "num_items_in_batch" in batch else self.accumulate
        kind = self._backward.device.type
        # Without autocast's cache: a cast made outside a capture would be read by every replay.
        on = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=on, cache_enabled=False):
            loss = self._loss(self.model, batch)
        (loss / share if share > 1 else loss).backward()
        return {"loss": loss.detach()}

    def _clip(self) -> Tensor:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        assert self.max_grad_norm is not None
        return nn.utils.clip_grad_norm_(params, self.max_grad_norm)


def capture(
    model: nn.Module, optimizer: Optimizer, *, buckets: Sequence[int] = BUCKETS, max_grad_norm: float | None = None,
    accumulate: int = 1, loss: Loss | None = None,
) -> CapturedStep:  # fmt: skip
    """A step over batches (dicts with input_ids (rows, length), labels, and attention_mask or position_ids where
    needed), padded on the right to the next of `buckets` (tokens a row), one graph each.

    max_grad_norm: as `clip_grad_norm_`, None does not clip; accumulate: batches an update; loss(model, batch): the
    scalar to train on, by default `model(**batch).loss`; it must depend on the model and the batch alone. Raises
    ValueError where buckets or numbers make no sense.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, not {accumulate}")
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ValueError(f"max_grad_norm must be positive or None, not {max_grad_norm}")
    return CapturedStep(model, optimizer, checked(buckets), max_grad_norm, accumulate, loss or _own_loss)


def checked(buckets: Sequence[int]) -> list[int]:
    """Sorted. Raises ValueError unless they are lengths in tokens."""
    if not buckets or any(not isinstance(b, int) or b < 2 for b in buckets):
        raise ValueError(f"buckets are lengths of rows in tokens, as (256, 512, 1024), not {buckets!r}")
    return sorted(set(buckets))


def graphs_of(model: nn.Module) -> tuple[CudaGraphs | None, str | None]:
    """(what captures this model's steps, None) or (None, why there is nothing)."""
    if reason := why_uncapturable(model):
        return None, reason
    device = next(model.parameters()).device
    graphs = graphs_for(device)
    return graphs, None if graphs else f"CUDA graphs need a CUDA device; the model is on {device}"


def _own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).loss
