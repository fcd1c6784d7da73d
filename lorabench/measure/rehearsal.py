"""A rehearsal: steps of an arm that is finished but for its batches, tried by a toggle; the arm is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from lorabench.contract.arm import bytes_of
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.hooks import first_line
from lorabench.contract.job import Job
from lorabench.contract.joint import Joint
from lorabench.contract.rehearsal import Reading
from lorabench.contract.step import Step
from lorabench.contract.workload import Workload
from lorabench.measure import memory
from lorabench.measure.kind import Request

LayOut = Callable[[Sequence[Sample], int], list[Batch]]  # (samples, batch size) → batches on the device


class Rehearsing:
    """What `contract/rehearsal.py` promises a toggle. A context: at its end all is put back."""

    def __init__(
        self, step: Step, samples: Sequence[Sample], workload: Workload, lay_out: LayOut, *, held: int, room: int,
        configuration: Mapping[str, Any], folder: Path, device: torch.device,
    ) -> None:  # fmt: skip
        """`held` and `room`: bytes that were held and free on the device before the arm was built."""
        self.step, self.samples, self.workload, self.lay_out = step, samples, workload, lay_out
        self.held, self.room, self.device, self.on_cpu = held, room, device, device.type == "cpu"
        self.configuration, self.folder = configuration, folder
        self.exit = ExitStack()
        self.warm = False

    def __enter__(self) -> Rehearsing:
        return self

    def __exit__(self, *raised: object) -> None:
        self.exit.close()

    def run(self, batches: Sequence[Batch], budget: int) -> Reading:
        if not self.warm:
            self._warm_up(budget)
        return self._tried(batches, budget)

    def _warm_up(self, budget: int) -> None:
        """One small step, not measured: what is made once and stays (the optimizer's state, the gradients' buffers,
        libraries' workspaces) is then there in all that are."""
        self.exit.callback(memory.give_back, self.device)
        self.exit.callback(_restorer(self.step))
        self.exit.enter_context(torch.random.fork_rng([] if self.on_cpu else [self.device]))
        self._tried(self.lay_out([min(self.samples, key=lambda s: len(s.tokens))], 1), budget)
        self.warm = True

    def _tried(self, batches: Sequence[Batch], budget: int) -> Reading:
        words = ""
        began = perf_counter()
        try:
            most = self._static() + memory.growth(self.device, lambda: self._gradients(batches))
            self.step.update()
            memory.synchronize(self.device)
        except Exception as error:
            if not memory.out_of_memory(error):
                raise
            words = first_line(error)
        else:
            if most <= budget:
                return Reading(most, perf_counter() - began)
            words = f"the step takes {most} bytes of {budget}"
        memory.give_back(self.device)  # only here, where no frame of the step is left that holds what it saved
        raise torch.OutOfMemoryError(f"the device is out of memory. {words}")  # by these words others know it

    def _static(self) -> int:
        """What the arm holds between two steps; of a CPU, whose allocator does not say, the sum of its tensors."""
        if not self.on_cpu:
            return memory.allocated(self.device) - self.held
        model = self.step.model
        states = [state for step in _members(self.step) for state in step.optimizer.state.values()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return bytes_of([*model.parameters(), *model.buffers(), *gradients, *kept])

    def _gradients(self, batches: Sequence[Batch]) -> None:
        """They add up from step to step: a later micro-batch of a step finds those of the ones before it, too."""
        for batch in batches:
            self.step.backward(self.step.forward(batch))


def _members(step: Step) -> list[Step]:
    """The steps that have an optimizer each."""
    inner = step.innermost
    return inner.steps if isinstance(inner, Joint) else [step]


def _restorer(step: Step) -> Callable[[], None]:
    """What puts the trained parameters and the optimizer back to where they are now, and drops the gradients."""
    optimizers = [member.optimizer for member in _members(step)]
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    start = [p.detach().cpu().clone() for p in params]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]

    def restore() -> None:
        with torch.no_grad():
            for param, value in zip(params, start, strict=True):
                param.grad = None
                param.copy_(value)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        step.innermost.cleared()

    return restore


def configuration(request: Request, job: Job) -> dict[str, Any]:
    """What the memory of a step depends on, but for how its samples are laid out."""
    device: list[Any] = ["cpu", psutil.virtual_memory().total]
    if request.device.type == "cuda":
        found = torch.cuda.get_device_properties(request.device)
        device = [found.name, found.total_memory]
    return {
        "model": request.model.with_lora(job.lora).model_dump(mode="json"),
        "dtype": str(request.dtype),
        "toggles": sorted([a.name, asdict(a)] for a in request.ablations),
        "job": [job.workload.model_dump(mode="json"), job.optimizer],
        "jobs": len(request.jobs),
        "device": device,
        "torch": torch.__version__,
    }
