"""PEFT's LoRA linears with an adapter of its own for each job's rows, in plain torch: the product with the frozen
weight is one for all rows, and each adapter follows on its own.

Rows are split and put together again, once each: a slice of X for every adapter would cost a gradient of the size of X
in each. Run: python -m pytest tests/ablations/test_jobs_together.py
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench_ablations.joint_step import Part


class TorchRouter:
    """Which adapter the rows of the batches to come have; None: PEFT's own forward. It stays until the next batch,
    because a checkpointed layer runs again in the backward. `linears`: in how many it counts."""

    tables: Sequence[Any] = ()

    def __init__(self) -> None:
        self.parts: Sequence[Part] | None = None
        self.linears = 0

    def set(self, parts: Sequence[Part] | None) -> None:
        self.parts = parts

    def keep(self, adapters: Sequence[str]) -> None:
        """An adapter lies nowhere but in PEFT's own linears."""


def route(model: nn.Module, mark: str) -> int:
    """Bind a forward to every LoRA linear of a PEFT model, let every adapter be trained, and put the router on the
    model; the number of linears. Raises Unsupported for what is no plain LoRA on a linear."""
    router = TorchRouter()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            check_plain(name, module)
            module.forward = MethodType(_forward(router), module)
            router.linears += 1
    train_every_adapter(model)
    setattr(model, mark, router)
    return router.linears


def train_every_adapter(model: nn.Module) -> None:
    """PEFT trains what belongs to the active adapter, and freezes the others."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)


def check_plain(name: str, module: Any) -> None:
    """Raises Unsupported unless this LoRA layer of PEFT is base(x) + scaling · B(A(dropout(x))) for each adapter."""
    if getattr(module, "lora_variant", None):
        raise Unsupported(f"{name} has a variant of LoRA (DoRA, say), which the jobs' joint pass does not know")
    if module.lora_embedding_A or any(b.bias is not None for b in module.lora_B.values()):
        raise Unsupported(f"{name} adapts an embedding or has a bias in its adapter; expected plain LoRA on a linear")
    base = module.base_layer
    if any(p.requires_grad for p in base.parameters()):
        raise Unsupported(f"{name} trains its bias, which the jobs would share; expected bias=none")


def _forward(router: TorchRouter) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (…, K) → (…, N)."""
        if router.parts is None:
            return type(self).forward(self, x, *args, **kwargs)
        result: Tensor = self.base_layer(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1])
        each = flat.split([part.positions for part in router.parts])
        added = torch.cat([_added(self, part, own) for part, own in zip(router.parts, each, strict=True)])
        return (result + added.view(*x.shape[:-1], -1)).to(result.dtype)

    return forward


def _added(linear: Any, part: Part, x: Tensor) -> Tensor:
    """What an adapter adds to its own rows x (positions, K): scaling · B(A(dropout(x))), (positions, N). Behind the
    job's own width there is only padding, which adds nothing; dropout sees the shape that it has when the job is
    alone."""
    name = part.adapter
    if name not in linear.lora_A:
        return x.new_zeros(x.shape[0], linear.out_features)
    a, b, dropout = linear.lora_A[name], linear.lora_B[name], linear.lora_dropout[name]
    own = x.view(part.rows, part.width, -1)[:, : part.own_width].to(a.weight.dtype)
    out = b(a(dropout(own))) * linear.scaling[name]
    return F.pad(out, (0, 0, 0, part.width - part.own_width)).flatten(0, 1)
