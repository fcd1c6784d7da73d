"""Kind `op`: one operation out of a model, a linear or one behind an RMSNorm, instead of a whole training step.

    python -m lorabench.sweep 'models=[linear-4096x14336@1x8192]' reference=linear 'ablations=[lora_addmm,lora_kernels]'

X (1, M, K) comes in and wants its gradient, dY (1, M, N) comes back; both are drawn once, from the seed, with unit
variance. Forward is Y = linear(X). Backward makes dX and the adapter's gradients from dY. No loss is reduced: a pass
over Y would hide what the arms differ in. There is no optimizer step either, so the total is forward + backward.

On a GPU the L2 cache is cold when a trial begins, as it is in a model, where the layers before have passed through
it; backward begins with what forward left there. What empties the cache also keeps the device busy until forward has
been launched, so that the times have no launch latency in them (a captured arm's: see `reference=linear_captured`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.contract.batch import Batch, Sample
from lorabench.contract.cell import Cell
from lorabench.contract.job import Job
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.names import NameUnknown
from lorabench.contract.step import Step
from lorabench.contract.work import Work
from lorabench.measure import flops
from lorabench.measure.build import build, named_generator
from lorabench.measure.gradient_kind import GradientKind
from lorabench.measure.kind import Begin, Request
from lorabench.plan.samples import draw

FORWARD, BACKWARD = "forward", "backward"
LINEAR = "linear"  # model_type of a single linear, and the name of its module


class Op(GradientKind):
    name: ClassVar[str] = "op"
    summary: ClassVar[str] = "one operation out of a model: forward, backward"
    phases: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD)
    total: ClassVar[str] = "forward + backward"
    carries: ClassVar[tuple[str, ...]] = ("tokens", "numerics")
    in_key: ClassVar[bool] = False

    def model(self, name: str) -> dict[str, Any] | None:
        """`linear-4096x14336` -> the fields of a ModelSpec: one frozen linear of 4096 inputs and 14336 outputs under
        LoRA; `norm-linear-4096x14336`: the same behind an RMSNorm, as a model has it."""
        if not name.startswith((f"{LINEAR}-", f"norm-{LINEAR}-")) or name.endswith((".yaml", ".yml")):
            return None
        match = re.fullmatch(rf"(norm-)?{LINEAR}-([1-9]\d*)x([1-9]\d*)", name)
        if not match:
            raise NameUnknown(
                f"no model named {name!r}; a single linear is {LINEAR}-INxOUT, such as {LINEAR}-4096x14336"
            )
        config = {"model_type": LINEAR, "in_features": int(match[2]), "out_features": int(match[3])}
        if match[1]:
            config["rms_norm_eps"] = 1e-6
        return {"source": "a single linear, no published model", "config": config, "weights": "random"}

    def older(self, record: Mapping[str, Any]) -> bool:
        return not record.get("limit") and str(record.get("model", "")).startswith(("linear-", "norm-linear-"))

    def refusal(self, cell: Cell, machine: Machine) -> str | None:
        if cell.model.family != LINEAR:
            return f"{cell.model.name} is a whole model; an operation is {LINEAR}-INxOUT, such as {LINEAR}-4096x14336"
        if cell.workload.jobs:
            return "a single operation has one job"
        return None

    def adapter(self, model: ModelSpec) -> dict[str, Any]:
        return model.lora.model_dump() | {"target_modules": [LINEAR]}

    def samples(self, cell: Cell) -> list[list[Sample]]:
        """Of the tokens only the number counts."""
        return [draw(job.workload, 2, job.seed) for job in cell.jobs]

    def work(self, cell: Cell, samples: Sequence[Sequence[Sample]], ablations: Sequence[Any] = ()) -> list[Work]:
        k, n, r = cell.model.config["in_features"], cell.model.config["out_features"], cell.model.lora.r
        shape = flops.Shape(attention=0, frozen=k * n, head=0, adapter=r * (k + n))
        lengths = flops.lengths_of(samples[0])
        forward, backward = flops.forward_tflop(shape, lengths), flops.backward_tflop(shape, lengths)
        return [Work({FORWARD: forward, BACKWARD: backward})]

    def build(self, request: Request) -> Arm:
        config = SimpleNamespace(**request.model.config)
        base = lambda load: OneLinear(request.model, load["dtype"], request.device)  # noqa: E731
        return build(request, self, base, partial(_step, request), config)

    def bytes_per_token(self, model: ModelSpec) -> int:
        return 4 * 6 * (model.config["in_features"] + model.config["out_features"])

    def feed(self, arm: Arm, number: int) -> None:
        for step in arm.steps:
            innermost: Any = step.innermost
            innermost.fill(number)

    def trial(self, arm: Arm, begin: Begin) -> list[list[Tensor]]:
        empty_l2(arm.device)
        (batch,) = arm.step.batches
        begin(FORWARD)
        out = arm.step.forward(batch)
        begin(BACKWARD)
        arm.step.backward(out)
        return [[out.detach()]]


def empty_l2(device: torch.device) -> None:
    """Read four times the L2 cache's size of something else, without waiting for it. Read, not written: lines that have
    to be written back would be so during the trial. On an H200 it takes some 60 us."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).L2_cache_size
        torch.empty(size, dtype=torch.int32, device=device).amax()


class OneLinear(nn.Module):
    """The base model of an op cell: nothing but a frozen linear without a bias, K -> N, with or without an RMSNorm
    before it (torch's own, all weights one)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inputs, outputs = spec.config["in_features"], spec.config["out_features"]
        self.linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)
        eps = spec.config.get("rms_norm_eps")
        self.norm = None if eps is None else nn.RMSNorm(inputs, eps, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if self.norm is None else self.norm(x))


def _step(
    request: Request, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], job: Job,
    samples: list[Sample],
) -> OpStep:  # fmt: skip
    return OpStep(request, model, optimizer, batches, job, samples)


class OpStep(Step):
    """Forward and backward of an op over all tokens of the workload at once, padding included where there is any."""

    updates = False

    def __init__(
        self, request: Request, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch],
        job: Job, samples: Sequence[Sample],
    ) -> None:  # fmt: skip
        """`batches` of tokens, of which only the number counts. X and dY are rounded to the compute dtype, and held in
        it, or in float32 in the gate's gold."""
        real, padded = sum(b.real for b in batches), sum(b.padded for b in batches)
        held = torch.float32 if request.upcast else request.dtype

        def rows(name: str, width: int) -> Tensor:
            generator = named_generator(request.seed, name, request.device)
            drawn = torch.randn(1, real + padded, width, generator=generator, device=request.device)
            return drawn.to(request.dtype).to(held)

        self.rows = rows
        self.x = rows("x", request.model.config["in_features"]).requires_grad_()
        self.dy = rows("dy", request.model.config["out_features"])
        batch = Batch({"x": self.x}, real=real, padded=padded, trained=real)
        super().__init__(model, optimizer, [batch], job=job, samples=samples)
        self.trained = [p for p in model.parameters() if p.requires_grad]

    def cleared(self) -> None:
        self.x.grad = None

    def fill(self, number: int) -> None:
        """X and dY of trial `number`, in place: a captured step reads them where they lie."""
        suffix = f"/{number}" if number else ""
        with torch.no_grad():
            self.x.copy_(self.rows(f"x{suffix}", self.x.shape[-1]))
            self.dy.copy_(self.rows(f"dy{suffix}", self.dy.shape[-1]))

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch.inputs["x"])

    def backward(self, loss: Tensor) -> None:
        """`loss` is Y. By torch.autograd.grad: dX's way into X.grad could cost a copy, which no model has to pay."""
        leaves = [self.x, *self.trained]
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, self.dy, allow_unused=True), strict=True):
            leaf.grad = grad

    def loss_of(self, out: Tensor) -> float:
        """What stands for a loss: the mean square of Y."""
        norm = torch.linalg.vector_norm(out, dtype=torch.promote_types(out.dtype, torch.float32))  # makes no copy
        return float(norm) ** 2 / out.numel()

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        assert self.x.grad is not None
        return {"the output Y": out.detach().float(), "the gradient dX": self.x.grad.float()}
