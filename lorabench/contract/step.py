"""The step: one optimizer step of one job over its batches, in calls that a toggle can wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.job import ADAPTER, Job
from lorabench.contract.parts import Part

if TYPE_CHECKING:  # a toggle's wrapper is a class at the top of its file, and a list of toggles does without torch
    import torch
    from torch import Tensor, nn


class Step:
    """Forward and backward of each batch, then one update. Toggles wrap it: see `Wrapped`.

    The loss of every batch is the sum over its trained tokens divided by the trained tokens of the whole step
    (`items`), over all batches and all ranks, so that the gradients do not depend on how the samples were put into
    batches.

    `loss_scale`: backward starts from the loss times this, and `update` divides it out again; 1 but in float16.
    """

    updates: bool = True  # False: the parameters stay as they are, and there is nothing to time after backward
    keeps_gradients: bool = False  # True: backward writes into the buffers of the trial before (a captured graph does)
    # Where the optimizer keeps its own copies, by rank (contract/parts.py); None: it updates the parameters themselves.
    parts: Sequence[Part] | None = None
    # While a trial is timed: says which phase begins, for an innermost step that mixes them within one call.
    begin: Callable[[str], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Sequence[Batch],
        loss_scale: float = 1.0,
        *,
        job: Job | None = None,
        samples: Sequence[Sample] = (),
        items: int | None = None,
    ) -> None:
        """`samples` are those that the batches were made of; `items` the step's trained tokens, of these batches if
        None. `job`: whose step it is; None for the only one."""
        self.model: Any = model
        self.call: Any = model  # what forward runs: the model, or a parallel wrapper around it (set on `innermost`)
        self.optimizer = optimizer
        self.batches = list(batches)
        self.samples = list(samples)
        self.items = sum(b.trained for b in batches) if items is None else items
        self.loss_scale = loss_scale
        self.job = job
        self.adapter = job.adapter if job else ADAPTER

    @property
    def name(self) -> str:
        """The job's name; "" for the only one."""
        return self.job.name if self.job else ""

    @property
    def innermost(self) -> Step:
        """The step without what toggles wrapped around it."""
        return self

    @property
    def rehearsed(self) -> Step:
        """The step with which sizes of micro-batches are tried: without what would be captured of each."""
        return self

    def clear(self) -> None:
        """Drop the gradients, for a toggle or a user that runs steps of its own. The harness drops them itself."""
        self.optimizer.zero_grad(set_to_none=True)

    def cleared(self) -> None:
        """The trained parameters' gradients have been dropped: drop what else a trial left. Only the innermost step is
        asked."""

    def forward(self, batch: Batch) -> Tensor:
        if self.name and self.model.active_adapter != self.adapter:  # another job's was on
            self.model.set_adapter(self.adapter)
        return self.call(**batch.inputs, num_items_in_batch=self.items).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward(None if self.loss_scale == 1 else loss.new_full(loss.shape, self.loss_scale))

    def update(self) -> None:
        if self.loss_scale != 1:
            import torch

            scaled = (p.grad for group in self.optimizer.param_groups for p in group["params"])
            torch._foreach_mul_([g for g in scaled if g is not None], 1 / self.loss_scale)
        self.optimizer.step()

    def loss_of(self, out: Tensor) -> float:
        """The number that stands for the loss, of what `forward` returned; the innermost step is asked for it."""
        return float(out)

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        """What is compared beside the adapter's gradients, in float32; `out` is what `forward` returned. The innermost
        step is asked."""
        return {}

    def said(self) -> dict[str, Any]:
        """After the timed trials: what a record says of this step beside its times, in what JSON can hold. The
        innermost step is asked, on every rank."""
        return {}


class Wrapped(Step):
    """A step around another step: override forward, backward and update. The harness calls nothing else of a wrapper:
    what a toggle does belongs inside the clock."""

    def __init__(self, inner: Step) -> None:
        self.inner = inner
        self.model, self.optimizer = inner.model, inner.optimizer
        self.batches, self.samples, self.items = inner.batches, inner.samples, inner.items
        self.updates, self.loss_scale = inner.updates, inner.loss_scale
        self.keeps_gradients = inner.keeps_gradients
        self.job, self.adapter = inner.job, inner.adapter

    @property
    def innermost(self) -> Step:
        return self.inner.innermost

    def clear(self) -> None:
        self.inner.clear()

    def forward(self, batch: Batch) -> Tensor:
        return self.inner.forward(batch)

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)

    def update(self) -> None:
        self.inner.update()
