"""Kind `op`: one operation out of a model (a linear, attention), instead of a whole training step.

    python -m lorabench.sweep 'models=[linear-4096x14336@1x8192]' reference=linear 'ablations=[lora_addmm,lora_kernels]'
    python -m lorabench.sweep 'models=[attention-32x8x128@1x4096]' 'ablations=[sdpa_cudnn,flash_attention_2]'

Its inputs and the gradient of its output are drawn with unit variance, anew in every trial, the same for both arms. No
loss is reduced: a pass over the output would hide what the arms differ in. There is no optimizer step either, so the
total is forward + backward. operations/ has what each operation is.

On a GPU the L2 cache is cold when a trial begins, as it is in a model, where the layers before have passed through
it; backward begins with what forward left there. What empties the cache also keeps the device busy until forward has
been launched, so that the times have no launch latency in them (a captured arm's: see `reference=linear_captured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.cell import Cell
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.names import NameUnknown
from lorabench.contract.work import Work
from lorabench.measure import flops
from lorabench.measure.build import build
from lorabench.measure.feed import check_type, marked
from lorabench.measure.gradient_kind import GradientKind
from lorabench.measure.kind import Begin, Request
from lorabench.measure.kinds.operations.attention import Attention
from lorabench.measure.kinds.operations.linear import Linear
from lorabench.measure.kinds.operations.operation import Operation
from lorabench.measure.kinds.train import BACKWARD, FORWARD, one_step
from lorabench.plan.samples import draw

OPERATIONS: dict[str, Operation] = {made.family: made for made in (Linear(), Attention())}


class Op(GradientKind):
    name: ClassVar[str] = "op"
    summary: ClassVar[str] = "one operation out of a model: forward, backward"
    phases: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD)
    total: ClassVar[str] = "forward + backward"
    carries: ClassVar[tuple[str, ...]] = ("tokens", "numerics")
    in_key: ClassVar[bool] = False

    def model(self, name: str) -> dict[str, Any] | None:
        """The fields of a ModelSpec for the name of an operation."""
        operation = OPERATIONS.get(name.removeprefix("norm-").partition("-")[0])
        if operation is None or "-" not in name or name.endswith((".yaml", ".yml")):
            return None
        config = operation.config(name)
        if config is None:
            raise NameUnknown(f"no model named {name!r}; a single {operation.family} is {operation.form}")
        source = f"a single {operation.family}, no published model"
        return {"source": source, "config": {"model_type": operation.family, **config}, "weights": "random"}

    def older(self, record: Mapping[str, Any]) -> bool:
        return not record.get("limit") and str(record.get("model", "")).startswith(("linear-", "norm-linear-"))

    def takes(self, ablation: Any, model: ModelSpec) -> bool:
        operation = OPERATIONS.get(model.family)
        return super().takes(ablation, model) and (operation is None or operation.takes(ablation.slot))

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        operation = OPERATIONS.get(cell.model.family)
        if operation is None:
            forms = "; ".join(known.form for known in OPERATIONS.values())
            return f"{cell.model.name} is a whole model; an operation is {forms}"
        if cell.workload.jobs:
            return "a single operation has one job"
        if cell.workload.kind == "weights":
            return f"the workload {cell.workload.name} has no samples; it is for kind=load"
        idle = [a.name for a in (*cell.candidate, *cell.reference) if not operation.takes(a.slot)]
        return f"a single {operation.family} has nothing that {idle[0]} could change" if idle else None

    def adapts(self, model: ModelSpec) -> bool:
        return OPERATIONS[model.family].adapts

    def adapter(self, model: ModelSpec) -> dict[str, Any]:
        return model.lora.model_dump() | {"target_modules": [model.family]}

    def samples(self, cell: Cell) -> list[list[Sample]]:
        """Of the tokens only the places count."""
        return [marked(draw(job.workload, 2, job.seed)) for job in cell.jobs]

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        shape, lengths = OPERATIONS[cell.model.family].shape(cell.model), flops.lengths_of(samples[0])
        forward, backward = flops.forward_tflop(shape, lengths), flops.backward_tflop(shape, lengths)
        return [Work({FORWARD: forward, BACKWARD: backward})]

    def imports(self, request: Request) -> None:
        super().imports(request)
        OPERATIONS[request.model.family].imports()

    def build(self, request: Request) -> Arm:
        operation = OPERATIONS[request.model.family]
        base = lambda load, device: operation.base(replace(request, device=device), load)  # noqa: E731
        step = partial(operation.step, request)
        return build(request, self, base, step, operation.configuration(request.model))

    def bytes_per_token(self, model: ModelSpec) -> int:
        return OPERATIONS[model.family].bytes_per_token(model)

    def feed(self, arm: Arm, number: int) -> None:
        for step in arm.steps:
            innermost: Any = step.innermost
            for name, value in vars(innermost).items():
                if isinstance(value, Tensor):
                    check_type(value, Tensor, name)
            innermost.fill(number)

    def trial(self, arm: Arm, begin: Begin) -> list[list[Tensor]]:
        empty_l2(arm.device)
        return [one_step(arm.step, len(arm.step.batches), arm.step.batches.__getitem__, begin)]


def empty_l2(device: torch.device) -> None:
    """Read four times the L2 cache's size of something else, without waiting for it. Read, not written: lines that have
    to be written back would be so during the trial. On an H200 it takes some 60 us."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).L2_cache_size
        torch.empty(size, dtype=torch.int32, device=device).amax()
