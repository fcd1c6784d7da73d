"""One frozen linear with at most one adapter, as a projection works with it: its tensors, and nothing of its module.
Where rows of several adapters share a linear, each adapter is a member of its own over the same weight, a *slot*.

Between a forward and its backward another forward may have read another adapter into the same member;
`with_saved_adapters` takes a backward back to the adapters of its own forward.
Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..ops.job_rows import JobRows
from ..runtime import check

# What a model's linear reads anew on each forward: A (r, K), B (N, r) and lora_B's bias (N,), or None; the factor of B,
# the probability of the dropout before A, and of a slot the jobs of the rows to come. A plain tuple: three of them are
# made for a linear in each step.
Adapter = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float, float, JobRows | None]


@dataclass
class Member:
    """W (N, K), A (r, K), B (N, r), biases (N,): y = x Wᵀ + bias + scale · (x Aᵀ Bᵀ + lora_bias).

    quantized: bitsandbytes' quant_state of an NF4 weight; compute_dtype: of such a weight; gathered: whether FSDP2 has
    a part of the weight here, and puts the whole in its place while the layer computes; shape: (N, K), taken from the
    weight if not given. job: of a slot, the job whose rows it adapts; shares: whether it is a further slot of the
    member before it, whose weight and bias it has; jobs: which rows are of which job; resident: of a slot, (A, B) that
    may lie in its columns of the operand while it has no rows. Raises ValueError where A and B do not fit the weight.
    """

    name: str
    weight: nn.Parameter
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    lora_bias: torch.Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    quantized: Any = None
    shape: tuple[int, int] = field(default=(0, 0))
    compute_dtype: torch.dtype | None = None
    gathered: bool = False
    job: int | None = None
    shares: bool = False
    jobs: JobRows | None = None
    resident: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.shape == (0, 0):
            n, k = self.weight.shape if self.quantized is None else self.quantized.shape
            self.shape = (n, k)
        n, k = self.shape
        if self.a is not None:
            check(self.a.dim() == 2 and self.a.shape[1] == k, f"lora_A of {self.name} does not fit", a=self.a)
            fits = self.b is not None and self.b.shape == (n, self.a.shape[0])
            check(fits, f"lora_B of {self.name} does not fit", a=self.a, b=self.b)

    @property
    def rank(self) -> int:
        """Rows of A, 0 without an adapter."""
        return 0 if self.a is None else self.a.shape[0]

    @property
    def lying(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A, B) that lie in the operand: its adapter's, or those of a slot without rows that may stay."""
        return self.resident if self.a is None or self.b is None else (self.a, self.b)

    @property
    def adapter(self) -> Adapter:
        """As it is now; a model's linear sets it anew on each forward."""
        return self.a, self.b, self.lora_bias, self.scale, self.dropout, self.jobs

    @adapter.setter
    def adapter(self, values: Adapter) -> None:
        self.a, self.b, self.lora_bias, self.scale, self.dropout, self.jobs = values

    @property
    def parameters(self) -> tuple[torch.Tensor | None, ...]:
        """A, B, lora_B's bias and the bias: in the order in which the autograd functions take them and return their
        gradients."""
        return self.a, self.b, self.lora_bias, self.bias


SavedAdapters = list[tuple[Member, Adapter]]


@contextmanager
def with_saved_adapters(adapters: SavedAdapters) -> Iterator[None]:
    """Inside, the members have the adapters that were saved: between a forward and its backward another forward may
    have read another adapter, another scale or, in evaluation, no dropout."""
    now = [(m, m.adapter) for m, _ in adapters]
    try:
        for m, adapter in adapters:
            m.adapter = adapter
        yield
    finally:
        for m, adapter in now:
            m.adapter = adapter
