"""An op: one linear, or one behind an RMSNorm, as it lies in the middle of a model, instead of a whole training step.

X (1, M, K) comes in and wants its gradient, dY (1, M, N) comes back; both are drawn once, from the seed, with unit
variance. Forward is Y = linear(X). Backward makes dX and the adapter's gradients from dY. No loss is reduced: a pass
over Y would hide what the arms differ in. There is no optimizer step either, so `total` is forward + backward.

On a GPU the L2 cache is cold when a trial begins, as it is in a model, where the layers before have passed through
it; backward begins with what forward left there. What empties the cache also keeps the device busy until forward has
been launched, so that the times have no launch latency in them (a captured arm's: see `reference=linear_captured`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lorabench.measure.arm import Step, named_generator
from lorabench.plan.model import ModelSpec
from lorabench.plan.workload import Batch


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


class OpStep(Step):
    """Forward and backward of an op over all tokens of the workload at once, padding included where there is any."""

    phases = ("forward", "backward")

    def __init__(
        self, spec: ModelSpec, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], *,
        dtype: torch.dtype, rounded: torch.dtype, device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        """`batches` of tokens, of which only the number counts. X and dY are rounded to `rounded`, held in `dtype`."""
        real, padded = sum(b.real for b in batches), sum(b.padded for b in batches)

        def draw(name: str, width: int) -> Tensor:
            generator = named_generator(seed, name, device)
            drawn = torch.randn(1, real + padded, width, generator=generator, device=device)
            return drawn.to(rounded).to(dtype)

        self.x = draw("x", spec.config["in_features"]).requires_grad_()
        self.dy = draw("dy", spec.config["out_features"])
        super().__init__(model, optimizer, [Batch({"x": self.x}, real=real, padded=padded, trained=real)])
        self.trained = [p for p in model.parameters() if p.requires_grad]

    def clear(self) -> None:
        super().clear()
        self.x.grad = None

    def settle(self) -> None:
        """Read four times the L2 cache's size of something else, without waiting for it. Read, not written: lines
        that have to be written back would be so during the trial. On an H200 it takes some 60 us."""
        if self.x.is_cuda:
            size = torch.cuda.get_device_properties(self.x.device).L2_cache_size
            torch.empty(size, dtype=torch.int32, device=self.x.device).amax()

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
