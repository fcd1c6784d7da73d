"""The joint step of several jobs as CUDA graphs: each micro-batch's forward and backward, and the updates of all jobs.
`capture.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch. Run: python
-m pytest tests/ablations/test_captured_jobs.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lorakernels.capturing.graph import CudaGraphs, Recording
from lorakernels.capturing.state import Gradients
from torch import Tensor

from lorabench.contract.batch import Batch
from lorabench.contract.step import Step
from lorabench_ablations.captured_step import CapturedStep, Layout, alike


class CapturedJoint(CapturedStep):
    """Captured at the first forward of a trial. Whoever asks job by job, or tries micro-batches of another size, gets
    the step as it is. A trial's micro-batches are of the lengths that were captured, so whatever they hold is copied.

    What the joint step looks at on the host, losses and gradients that are not finite, it looks at behind the update,
    whose graph changes nothing where one is not (`guarded`); that step is then made again, uncaptured. Of optimizers
    that cannot be told so it looks at the losses behind each forward, and at the gradients before the update.
    """

    each_trains_all = False  # a job without rows in one of several micro-batches gets no gradient from it

    def __init__(self, inner: Step, recorder: CudaGraphs) -> None:
        self.joint: Any = inner.innermost
        super().__init__(inner, recorder)
        self.number = 0  # of a trial's next micro-batch
        self.read: Sequence[Any] = ()
        self.looking: Recording | None = None  # whether all gradients are finite, where the joint step asks that
        self.guarded = False
        self.seen = torch.zeros(())  # (jobs,), of this step: 0 while a job's losses are finite, then NaN

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [step.optimizer for step in self.joint.steps]

    @property
    def several(self) -> bool:
        return self.joint.count > 1

    def micro_batches(self) -> list[Batch]:
        return [self.joint.micro_batch(number) for number in range(self.joint.count)]

    def forward(self, batch: Batch) -> Tensor:
        if self.joint.begin is None:
            with self.recorder.aside():
                return self.inner.forward(batch)
        if not self.captured:
            self._capture()
        if self.guarded and not self.number:
            self.seen.zero_()
        _, self.now = self.captured[self.number]
        self.number = (self.number + 1) % len(self.captured)
        return self.joint.looked_at(batch, self._replayed, later=self.guarded)

    def backward(self, loss: Tensor) -> None:
        if self.joint.begin is None:
            with self.recorder.aside():
                self.inner.backward(loss)
            return
        assert self.now is not None and self.gradients is not None
        if loss.requires_grad:  # the step looked, and made it anew
            self.gradients.attach()
            self.inner.backward(loss)
            return
        self.gradients.attach() if self.several else self.gradients.put()
        self.now.graphs["backward"].replay()

    def update(self) -> None:
        if self.joint.begin is None:
            with self.recorder.aside():
                self.inner.update()
            return
        assert self.gradients is not None and self.graph_of_update is not None
        if not self.guarded:
            self.joint.settle(bool(self.looking.replay()["finite"]) if self.looking else None)
        self.gradients.attach()
        found = self.graph_of_update.replay()
        if self.guarded:
            finite = bool(found["finite"])
            self.joint.settle(finite)
            if not finite:
                with self.recorder.aside():
                    self.inner.update()

    def _replayed(self, batch: Batch) -> Tensor:
        assert self.now is not None
        for name, held in self.now.inputs.items():
            given: Any = batch.inputs.get(name)
            if not alike(held, given):
                raise ValueError(f"cuda_graph captured another {name} than this micro-batch has")
            if isinstance(held, Tensor):
                held.copy_(given)
        return self.now.graphs["forward"].replay()["loss"].clone()

    def _record(self) -> None:
        looks = self.joint.gradients_finite() is not None
        self.guarded = looks and all(getattr(o, "_step_supports_amp_scaling", False) for o in self.optimizers)
        self.seen = torch.zeros(len(self.joint.steps), device=self.recorder.device)
        super()._record()
        if self.gradients is None:
            self.gradients = Gradients(self.trained, [p.grad for p in self.trained if p.grad is not None])
        self.keeps_gradients = False  # the joint step's own marks go with its gradients
        self.gradients.attach()
        if looks and not self.guarded:
            self.looking = self.recorder.record(lambda: {"finite": self.joint.gradients_finite()})
        self.clear()
        self.read = self.joint.router.tables  # by the graphs, so they stay

    def _forward(self, layout: Layout) -> dict[str, Tensor]:
        with self.joint.without_a_look():
            found = super()._forward(layout)
        if self.guarded:
            self.seen.add_(found["loss"] * 0)
        return found

    def _update(self) -> dict[str, Tensor]:
        """One adapter's optimizer fills a part of the GPU. Guarded, they are told what a gradient scaler would."""
        found, told = {}, self.optimizers if self.guarded else []
        if told:
            found["finite"] = self.joint.gradients_finite() & self.seen.isfinite().all()
        for optimizer in told:
            optimizer.found_inf = (~found["finite"]).float()  # pyright: ignore[reportAttributeAccessIssue]
        self.joint.run_each = self.recorder.in_branches
        try:
            with self.joint.without_a_look():
                return super()._update() | found
        finally:
            del self.joint.run_each
            for optimizer in told:
                del optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
