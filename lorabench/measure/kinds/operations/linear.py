"""A single linear under LoRA, or one behind an RMSNorm.

    python -m lorabench.sweep 'models=[linear-4096x14336@1x8192]' reference=linear 'ablations=[lora_addmm,lora_kernels]'

X (1, M, K) comes in and wants its gradient, dY (1, M, N) comes back; both are drawn once, from the seed, with unit
variance. Forward is Y = linear(X). Backward makes dX and the adapter's gradients from dY.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.job import Job
from lorabench.contract.model import ModelSpec
from lorabench.contract.step import Step
from lorabench.measure import flops
from lorabench.measure.build import named_generator
from lorabench.measure.kind import Request
from lorabench.measure.kinds.operations.operation import Operation


class Linear(Operation):
    family: ClassVar[str] = "linear"  # also the name of its module
    form: ClassVar[str] = "linear-INxOUT, such as linear-4096x14336"

    def config(self, name: str) -> dict[str, Any] | None:
        """`linear-4096x14336`: one frozen linear of 4096 inputs and 14336 outputs under LoRA; `norm-linear-4096x14336`:
        the same behind an RMSNorm, as a model has it."""
        match = re.fullmatch(r"(norm-)?linear-([1-9]\d*)x([1-9]\d*)", name)
        if not match:
            return None
        config = {"in_features": int(match[2]), "out_features": int(match[3])}
        return config | ({"rms_norm_eps": 1e-6} if match[1] else {})

    def takes(self, slot: str) -> bool:
        return slot not in ("attention", "batching")

    def shape(self, model: ModelSpec) -> flops.Shape:
        k, n, r = model.config["in_features"], model.config["out_features"], model.lora.r
        return flops.Shape(attention=0, frozen=k * n, head=0, adapter=r * (k + n))

    def bytes_per_token(self, model: ModelSpec) -> int:
        return 4 * 6 * (model.config["in_features"] + model.config["out_features"])

    def base(self, request: Request, load: dict[str, Any]) -> nn.Module:
        return OneLinear(request.model, load["dtype"], request.device)

    def configuration(self, model: ModelSpec) -> Any:
        return SimpleNamespace(**model.config)

    def step(self, request: Request, *args: Any) -> Step:
        return OpStep(request, *args)


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


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class OpStep(Step):
    """Forward and backward of a linear over all tokens of the workload at once, padding included where there is any."""

    updates = False
    captured = False  # whether backward was last run into a CUDA graph, which then runs it

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
        """A captured backward writes dX into the buffer that it was captured with: what it does not write shows."""
        if self.captured and self.x.grad is not None:
            self.x.grad.fill_(float("nan"))
        else:
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
        self.captured = capturing()
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
