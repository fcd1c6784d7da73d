"""Jobs that step together: what the toggles make of their next samples, and one forward and backward of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lorabench.contract.ablation import Ablation
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.joint import Joint
from lorabench.contract.step import Step
from lorabench.measure import memory
from lorabench.measure.build import find_capacity, joints, put_together, to_device
from lorabench.measure.hooks import Hooks
from lorabench.train.job import Training


class Crew:
    """The steps of some jobs, joined as the toggles say. It stays as long as the same jobs go on."""

    def __init__(self, hooks: Hooks, model: Any, jobs: Sequence[Training], device: torch.device) -> None:
        self.hooks, self.jobs, self.device = hooks, list(jobs), device
        self.own = {job.name: Step(model, job.optimizer, (), job=job.job, items=1) for job in jobs}
        turns: list[Step] = hooks.first(Ablation.join, list(self.own.values())) or list(self.own.values())
        self.turns = [hooks.wrapped(Ablation.training, turn) for turn in turns]
        self._untried = joints(self.turns)

    def fill(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Lay these samples of each job out. Raises Unsupported where they cannot go together."""
        layouts = {}
        for job in self.jobs:
            step, own = self.own[job.name], list(samples[job.name])
            step.samples, step.items = own, sum(sample.trained for sample in own)
            workload = job.job.workload.model_copy(update={"batch_size": job.micro_batch_size})
            layouts[job.name] = self.hooks.first(Ablation.batch, own, workload) or pad(own, job.micro_batch_size)
        together = [step.name for joint in joints(self.turns) for step in joint.steps]
        for joint in joints(self.turns):
            names = [step.name for step in joint.steps]
            own = [layouts[name] for name in names]
            put_together(self.hooks, joint, names, list(own), self.device)
            if joint in self._untried:  # once: what fits does not change while the same jobs go on
                self._untried.remove(joint)
                self._find_capacity(joint, names, own)
        for name, batches in layouts.items():
            if name not in together:
                made = [self.hooks.through(Ablation.collate, batch) for batch in batches]
                self.own[name].batches[:] = [to_device(batch, self.device) for batch in made]

    def _find_capacity(self, joint: Joint, names: Sequence[str], layouts: Sequence[list[Batch]]) -> None:
        turn = next(turn for turn in self.turns if turn.innermost is joint)
        room = memory.free(self.device) + memory.allocated(self.device)
        find_capacity(self.hooks, turn.rehearsed, names, layouts, Path(), held=0, room=room)

    @property
    def capacity(self) -> int | None:
        """Positions of a micro-batch, where they were found by trying."""
        return min((joint.capacity.tokens for joint in joints(self.turns) if joint.capacity), default=None)

    def losses(self, backward: bool = True) -> dict[str, float]:
        """Each job's loss over what it has been filled with, its gradients left in its parameters."""
        found: dict[str, torch.Tensor] = {}
        for turn in self.turns:
            joint = turn.innermost
            if isinstance(joint, Joint):
                outs = [_one(turn, joint.micro_batch(number), backward) for number in range(joint.count)]
                found |= {s.name: torch.stack(joint.losses_of(i, outs)).sum() for i, s in enumerate(joint.steps)}
            else:
                found[turn.innermost.name] = torch.stack([_one(turn, b, backward) for b in turn.batches]).sum()
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    def update(self) -> None:
        for turn in self.turns:
            turn.update()

    def said(self) -> dict[str, str]:
        """What toggles have to say of the steps so far, by their names."""
        return {name: str(words) for turn in self.turns for name, words in turn.said().items()}

    def clear(self) -> None:
        for step in self.own.values():
            step.clear()
        for turn in self.turns:
            turn.innermost.cleared()


def _one(turn: Step, batch: Any, backward: bool) -> torch.Tensor:
    out = turn.forward(batch)
    if backward:
        turn.backward(out)
    return out.detach().float()
