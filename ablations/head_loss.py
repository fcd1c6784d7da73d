"""Losses that make no whole logits, and how a model gets its loss from one of them. `chunked_loss.py` has the toggles.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorabench.contract.ablation import Unsupported

IGNORE = -100
# (hidden (N, H), the head's weight (V, H), targets (N,), soft cap of the logits or None) → the sum of the trained
# tokens' losses, a scalar in float32
HeadLoss = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass
class Calls:
    """How often a loss was asked for, and of how many rows at most."""

    count: int = 0
    most_rows: int = 0


def bind(model: Any, loss_of: HeadLoss) -> Calls:
    """Give a PEFT model a forward whose loss in training comes from `loss_of`. Without labels the class's own runs.

    Raises Unsupported where the head is trained or has a bias."""
    base, calls = model.get_base_model(), Calls()
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or head.weight.requires_grad:
        raise Unsupported(f"its head is {type(head).__name__}; expected a frozen Linear without bias and adapter")
    own, softcap = base.forward, getattr(base.config.get_text_config(), "final_logit_softcapping", None)

    def forward(
        self: Any, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if labels is None or not self.training:
            return own(input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        targets = F.pad(labels, (0, 1), value=IGNORE)[..., 1:].flatten()
        calls.count, calls.most_rows = calls.count + 1, max(calls.most_rows, targets.numel())
        total = loss_of(hidden.flatten(0, -2), self.lm_head.weight, targets, softcap)
        items = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutputWithPast(loss=total / items)

    base.forward = MethodType(forward, base)
    return calls


def fuse_trl_head(model: Any) -> Calls:
    """TRL's own patch of the model, switched on in every forward of training with labels."""
    from trl.trainer.utils import add_fused_lm_head

    base, calls = model.get_base_model(), Calls()
    add_fused_lm_head(base)
    fused = base.forward

    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        trains = self.training and labels is not None
        calls.count += trains
        return fused(*args, labels=labels, fused_lm_head=trains, **kwargs)

    base.forward = MethodType(forward, base)
    return calls


class Tiled:
    """Tiles of so many rows: logits, loss and the hidden states' gradient of one are gone before the next."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        return _TiledLoss.apply(hidden, weight, targets, softcap, self.rows)  # type: ignore[return-value]


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, rows: int
    ) -> Tensor:  # fmt: skip
        total = hidden.new_zeros((), dtype=torch.float32)
        grad = torch.empty_like(hidden)
        for x, t, dx in zip(hidden.split(rows), targets.split(rows), grad.split(rows), strict=True):
            with torch.enable_grad():
                tile = x.detach().requires_grad_()
                loss = _summed(tile @ weight.T, t, softcap)
            dx.copy_(torch.autograd.grad(loss, tile)[0])
            total += loss.detach()
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (of_hidden,) = ctx.saved_tensors
        return of_hidden * grad.to(of_hidden.dtype), None, None, None, None


def _summed(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Of logits (N, V) the summed cross-entropy, in float32."""
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(capped.float(), targets, ignore_index=IGNORE, reduction="sum")


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)(weight, hidden, targets).float()


def cut(filter_eps: str | None) -> HeadLoss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            hidden, weight, targets, softcap=softcap, reduction="sum", filter_eps=filter_eps
        ).float()

    return loss
