"""The joint step of jobs that train to their end, as CUDA graphs: lorakernels' captured backward and updates, with a
graph for each length of rows. `capture.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch. Run: python
-m pytest tests/train/test_training_captured.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lorakernels.capturing.backward import CapturedBackward
from lorakernels.capturing.inputs import BUCKETS
from lorakernels.capturing.status import Status
from lorakernels.capturing.step import graphs_of
from lorakernels.capturing.update import CapturedUpdate
from torch import Tensor

from lorabench.contract.batch import Batch
from lorabench.contract.step import Step, Wrapped


class CapturedTraining(Wrapped):
    """All rows of a micro-batch are padded to one of a few lengths, so that the same shapes come back; the first two of
    a shape run as they are, and train. `forward` runs the backward, too, and gives the losses. How many tokens a job
    trains in a step is an input of the graph.

    Nothing is looked at on the host inside. Where a gradient is not finite, which one job's rows can bring into the
    others' slots, the step is made again uncaptured before its update.
    """

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.joint: Any = inner.innermost
        self.joint.buckets = True
        self.status = Status()
        graphs, never = graphs_of(self.model)
        self.captured = CapturedBackward(self.model, self._run, BUCKETS, graphs, self.status, never)
        self.updaters = [CapturedUpdate(step.optimizer, graphs, self.status, never) for step in self.joint.steps]
        self.fed: list[Batch] = []  # this step's micro-batches
        self.finite: list[Tensor] = []  # of each, whether its gradients are, where the joint step asks that
        self.tables: dict[int, Any] = {}  # which graphs read

    @property
    def rehearsed(self) -> Step:
        return self.inner.rehearsed

    def forward(self, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner.forward(batch)
        items = {f"items {i}": torch.tensor(float(step.items)) for i, step in enumerate(self.joint.steps)}
        found = self.captured({**batch.inputs, **items})
        self.fed.append(batch)
        self.finite += [found["finite"]] if "finite" in found else []
        return found["losses"]

    def backward(self, loss: Tensor) -> None:
        """Done in `forward`."""

    def update(self) -> None:
        if self.finite and not bool(torch.stack(self.finite).all()):
            self.joint.clear()
            for batch in self.fed:
                self.inner.backward(self.inner.forward(batch))
            self.inner.update()
        else:
            for updater in self.updaters:
                updater.step(self.captured.gradients)
        self._forget()

    def clear(self) -> None:
        self._forget()
        self.inner.clear()

    def said(self) -> dict[str, Any]:
        found = self.status
        eager = "".join(f"; {count} not: {reason}" for reason, count in found.eager.items())
        return {"cuda_graph": f"{found.replays} of {found.replays + found.eager.total()} micro-batches replayed{eager}"}

    def _forget(self) -> None:
        self.fed.clear()
        self.finite.clear()

    def _run(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        steps: Sequence[Any] = self.joint.steps
        own = [step.items for step in steps]
        items = [inputs.pop(f"items {i}") for i in range(len(steps))]
        with self.joint.without_a_look():
            self._count(items, torch.stack(items))
            try:
                losses = self.inner.forward(Batch(inputs, 0, 0, 0))
                self.inner.backward(losses)
            finally:
                self._count(own, None)
        self.tables |= {id(table): table for table in self.joint.router.tables}
        finite = self.joint.gradients_finite()
        return {"losses": losses.detach()} | ({} if finite is None else {"finite": finite})

    def _count(self, items: Sequence[Any], together: Tensor | None) -> None:
        """So many tokens each job trains: numbers on the device, where a graph reads them."""
        for step, number in zip(self.joint.steps, items, strict=True):
            step.items = number
        self.joint.items_of_jobs = together
