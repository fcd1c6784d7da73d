"""Kind `train`: one optimizer step of a PEFT model over its workload; of several jobs, one step each, one after the
other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from lorabench.contract.arm import Arm
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.cell import Cell
from lorabench.contract.job import Job
from lorabench.contract.joint import Joint
from lorabench.contract.machine import Machine
from lorabench.contract.memory_fit import Edge
from lorabench.contract.model import ModelSpec
from lorabench.contract.step import Step
from lorabench.contract.work import Recomputed, Work
from lorabench.measure import flops
from lorabench.measure.build import build, causal_lm, feeds, float16_scale, to_device
from lorabench.measure.edge import edge
from lorabench.measure.gradient_kind import GradientKind
from lorabench.measure.kind import Begin, Request
from lorabench.plan.architecture import skeleton
from lorabench.plan.samples import draw

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class Train(GradientKind):
    """Never a second backward over one graph: in-place kernels overwrite what they saved, and it would time garbage."""

    name: ClassVar[str] = "train"
    summary: ClassVar[str] = "one optimizer step: forward, backward, update"
    phases: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD, STEP)
    total: ClassVar[str] = "forward + backward + step"
    carries: ClassVar[tuple[str, ...]] = ("tokens", "numerics")
    in_key: ClassVar[bool] = False

    def older(self, record: Mapping[str, Any]) -> bool:
        return not record.get("limit") and not str(record.get("model", "")).startswith(("linear-", "norm-linear-"))

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        if cell.workload.kind == "weights":
            return f"the workload {cell.workload.name} has no samples to train on; it is for kind=load"
        return None

    def samples(self, cell: Cell) -> list[list[Sample]]:
        vocabulary = cell.model.hf_config().vocab_size
        return [draw(job.workload, vocabulary, job.seed) for job in cell.jobs]

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        again, jobs = [a.recomputes for a in ablations if a.recomputes], zip(cell.jobs, samples, strict=True)
        return [_work(flops.decoder(cell.model, job.lora), own, again) for job, own in jobs]

    def build(self, request: Request) -> Arm:
        base = lambda load, device: causal_lm(request.model, load, device, request.layers)  # noqa: E731
        config = request.model.hf_config(request.layers)
        arm = build(request, self, base, partial(_step, request), config)
        arm.feeds = [*feeds(request, arm, config.vocab_size)]
        return arm

    def edge(self, request: Request, until: float) -> Edge | None:
        return edge(request, self, until)

    def imports(self, request: Request) -> None:
        super().imports(request)
        skeleton(request.model, layers=1)

    def bytes_per_token(self, model: ModelSpec) -> int:
        """The logits are by far the largest: as they are, in float32, as probabilities, as gradients."""
        config = model.hf_config()
        return 4 * (4 * config.vocab_size + 60 * config.hidden_size)

    def feed(self, arm: Arm, number: int) -> None:
        for feed in arm.feeds:
            feed(number)

    def trial(self, arm: Arm, begin: Begin) -> list[list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        for turn in arm.stepped:
            inner = turn.innermost
            inner.begin = begin
            try:
                if isinstance(inner, Joint):
                    outs = one_step(turn, inner.count, inner.micro_batch, begin)
                    found |= {step.name: inner.losses_of(index, outs) for index, step in enumerate(inner.steps)}
                else:
                    found[turn.name] = one_step(turn, len(turn.batches), turn.batches.__getitem__, begin)
            finally:
                inner.begin = None
        return [found[step.name] for step in arm.steps]


def _work(shape: flops.Shape, samples: Sequence[Sample], again: Sequence[Recomputed]) -> Work:
    lengths = flops.lengths_of(samples)
    forward, backward = flops.forward_tflop(shape, lengths), flops.backward_tflop(shape, lengths)
    recomputed = sum(flops.recomputed_tflop(shape, lengths, each) for each in again)
    return Work({FORWARD: forward, BACKWARD: backward}, recompute_tflop={BACKWARD: recomputed} if again else {})


def _step(
    request: Request, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], job: Job,
    samples: list[Sample],
) -> Step:  # fmt: skip
    """`samples` are the whole step's, of which another rank may have its own share of the batches."""
    items = sum(s.trained for s in samples)
    scale = float16_scale(items) if request.dtype == torch.float16 else 1.0
    own = [to_device(b, request.device) for b in batches]
    return Step(model, optimizer, own, scale, job=job, samples=samples, items=items)


def one_step(step: Step, count: int, batch: Callable[[int], Batch], begin: Begin) -> list[torch.Tensor]:
    """The losses of so many batches, as `forward` returned them. A batch that is only now made is made while the
    forward is timed."""
    outs = []
    for number in range(count):
        begin(FORWARD)
        out = step.forward(batch(number))
        begin(BACKWARD)
        step.backward(out)
        outs.append(out.detach())
    if step.updates:
        begin(STEP)
        step.update()
    return outs
