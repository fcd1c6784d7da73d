"""A joint step: several jobs' rows go through the model together, and each job still has its own loss, gradients,
optimizer and data. A toggle's `join` makes one; how rows are put together and how they meet their adapters is the
toggle's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lorabench.contract.batch import Batch
from lorabench.contract.rehearsal import Capacity
from lorabench.contract.step import Step

if TYPE_CHECKING:  # as in step.py
    from torch import Tensor

Place = tuple[int, int]  # a sample of several jobs': (number of the job, number of the sample in it), both from 0
# What the toggles answer to `schedule`: (lengths by job and sample, padded, capacity) → micro-batches.
Schedule = Callable[[Sequence[Sequence[int]], bool, int | None], list[list[Place]] | None]


class Joint(Step):
    """One step of several jobs. Override `lay_out`, `joined` and `forward`.

    `steps` are the jobs' own, each with its batches, optimizer and trained tokens. `places` says of each job in which
    micro-batch each of its batches is, in ascending order; by default those of one number are one. `collated` holds, by
    micro-batch, what the toggles' `collate` has added to it. `schedule` asks the toggles which samples of all jobs go
    together; `lay_out` may call it. `capacity` is what a toggle found that a micro-batch holds. `by_job` is the
    job's number while the jobs are asked one by one: each job's update is then asked for apart, and may not come
    before.
    """

    by_job: int | None = None

    def __init__(self, steps: Sequence[Step]) -> None:
        first = steps[0]
        samples = [sample for step in steps for sample in step.samples]
        super().__init__(first.model, first.optimizer, (), samples=samples, items=sum(s.items for s in steps))
        self.steps = list(steps)
        self.collated: list[dict[str, Any]] = []
        self.places: list[list[int]] = []
        self.schedule: Schedule = lambda lengths, padded, capacity: None
        self.capacity: Capacity | None = None
        self._scales: Tensor | None = None

    @property
    def count(self) -> int:
        """Micro-batches of the step."""
        return 1 + max(max(places) for places in self._places())

    def _places(self) -> list[list[int]]:
        return self.places or [list(range(len(step.batches))) for step in self.steps]

    def lay_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        """Each job's batches, on the host, as they are to lie in the joint ones: padded further, packed, or of other
        samples of the job, with `places` set. A job's real and trained tokens stay. It goes by lengths alone."""
        return [list(own) for own in batches]

    def joined(self, batches: Sequence[Batch | None]) -> Batch:
        """One micro-batch of the jobs' own, laid out and in the jobs' order; None: a job that has none."""
        raise NotImplementedError

    def micro_batch(self, number: int) -> Batch:
        """The joint batch of this number from 0, of the tokens that the jobs' batches hold now."""
        own = (dict(zip(places, s.batches, strict=True)) for places, s in zip(self._places(), self.steps, strict=True))
        made = self.joined([batches.get(number) for batches in own])
        return replace(made, inputs=made.inputs | self.collated[number]) if number < len(self.collated) else made

    def place(self, index: int, number: int) -> int:
        """The micro-batch that a job's batch of this number is in."""
        return self._places()[index][number]

    def forward(self, batch: Batch) -> Tensor:
        """(jobs,) losses, each over its own job's trained tokens of the step; of a job without rows 0."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Every job's loss at once, each times its own scale."""
        if self._scales is None:
            self._scales = loss.new_tensor([step.loss_scale for step in self.steps])
        loss.backward(self._scales)

    def update(self) -> None:
        self.run_each([step.update for step in self.steps])

    @staticmethod
    def run_each(updates: Sequence[Callable[[], None]]) -> None:
        """The jobs' own updates; a captured step has another way."""
        for update in updates:
            update()

    def clear(self) -> None:
        for step in self.steps:
            step.clear()

    def cleared(self) -> None:
        for step in self.steps:
            step.cleared()

    def losses_of(self, index: int, outs: Sequence[Tensor]) -> list[Tensor]:
        """Of what `forward` returned for each micro-batch, the losses of one job, one of each of its batches."""
        return [outs[place][index] for place in self._places()[index]]

    def compared_of(self, index: int, out: Tensor) -> dict[str, Tensor]:
        """`compared` of one job, under the names that it would have alone; `out` is one of its losses."""
        return {}


class Share(Step):
    """One job's part of a joint step, for whoever asks job by job: each forward and backward is that of all jobs, and
    the update that of this one."""

    def __init__(self, own: Step, joint: Step) -> None:
        """`joint`: with what toggles have wrapped around it."""
        super().__init__(
            own.model, own.optimizer, (), own.loss_scale, job=own.job, samples=own.samples, items=own.items
        )
        self.batches = own.batches  # the list itself: a feed fills it, and the joint step reads it
        self.own, self.joint = own, joint
        self.updates, self.keeps_gradients = joint.updates, joint.keeps_gradients
        self._outs: Tensor | None = None

    def forward(self, batch: Batch) -> Tensor:
        together: Any = self.joint.innermost
        index, number = together.steps.index(self.own), next(i for i, b in enumerate(self.batches) if b is batch)
        together.by_job = index
        try:
            self._outs = self.joint.forward(together.micro_batch(together.place(index, number)))
        finally:
            together.by_job = None
        return self._outs[index]

    def backward(self, loss: Tensor) -> None:
        assert self._outs is not None  # forward comes first
        self.joint.backward(self._outs)
        self._outs = None

    def update(self) -> None:
        self.own.update()

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        together: Any = self.joint.innermost
        return together.compared_of(together.steps.index(self.own), out)

    def cleared(self) -> None:
        self.own.cleared()
