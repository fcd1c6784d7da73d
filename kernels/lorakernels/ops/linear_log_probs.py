"""The log-probability of each row's target under a frozen linear head, in chunks of rows that never hold all logits,
with the statistics that TRL's trainers log: log p_i = z_i[t_i] - logsumexp(z_i), z = x · Wᵀ (+ bias), softcapped
where a cap is given.

x: (M, H), W: (V, H) of one dtype; target: (M,) int64. As in `linear_cross_entropy`, of which this is the form with one
value a row, the gradient over the logits is multiplied with W at once: whatever a row's loss is made of its
log-probability, backward multiplies that row by a scalar. A head that learns has no such form.
Run: python -m pytest tests/lorakernels/test_linear_log_probs.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime import check, rows, working_dtype
from .linear_cross_entropy import LossSpec, chunks


class LogProbs(NamedTuple):
    """Of each row, zero or False where the target is ignored: log_probs (…), with gradient; entropy (…) of the
    distribution and is_top1 (…), whether the target is the first of the largest logits, both without."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor


def linear_log_probs_reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ignore_index: int = -100, softcap: float | None = None,
) -> LogProbs:  # fmt: skip
    """The same in float32 (float64 for float64), all logits at once: x (M, H), weight (V, H), target (M,), bias
    (V,)."""
    dtype = working_dtype(x)
    z = x.to(dtype) @ weight.to(dtype).t()
    z = z if bias is None else z + bias.to(dtype)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    counted, log_p = target != ignore_index, torch.log_softmax(z, -1)
    chosen = log_p.gather(1, torch.where(counted, target, 0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return LogProbs(chosen * counted, entropy * counted, (z.argmax(-1) == target) & counted)


class LinearLogProbs(torch.autograd.Function):
    """`linear_log_probs` as one node, which saves the gradient of x (M, H)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, spec: LossSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, with_dx = x.shape[0], ctx.needs_input_grad[0]
        dx = torch.empty_like(x) if with_dx else None
        loss, entropy = (torch.empty(m, dtype=working_dtype(x), device=x.device) for _ in range(2))
        top1 = torch.empty(m, dtype=torch.uint8, device=x.device)
        for _ in chunks(x, weight, bias, target, spec, loss, dx, with_dx, (entropy, top1)):
            pass
        is_top1 = top1.bool()
        ctx.save_for_backward(dx)
        ctx.mark_non_differentiable(entropy, is_top1)
        return loss.neg_(), entropy, is_top1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (dx,) = ctx.saved_tensors
        return (dx * -grad[:, None]).to(dx.dtype), None, None, None, None


def linear_log_probs(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    ignore_index: int = -100, softcap: float | None = None, chunk: int | None = None,
) -> LogProbs:  # fmt: skip
    """Of x (…, H), weight (V, H), target (…), int64, and bias (V,), in float32; chunk: rows at a time. Raises
    ValueError where the shapes do not fit, x and weight differ in dtype, or the head learns."""
    check(x.shape[-1:] == weight.shape[1:] and weight.dim() == 2, "x and weight do not fit", x=x, weight=weight)
    check(target.shape == x.shape[:-1], "target must have one entry a row of x", x=x, target=target)
    check(x.dtype == weight.dtype, "x and weight differ in dtype", x=x, weight=weight)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("the log-probabilities of a head that learns have no gradient of this form")
    spec = LossSpec(ignore_index, softcap, chunk)
    made = LinearLogProbs.apply(rows(x), weight, bias, target.reshape(-1).contiguous(), spec)
    return LogProbs(*(t.view(target.shape) for t in made))
