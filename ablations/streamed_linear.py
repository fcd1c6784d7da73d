"""Frozen linears whose weights are on the device only while they multiply. `layer_offloading.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Unsupported
from lorabench.contract.hooks import first_line


@dataclass
class Streamed:
    """`linears` hold `held` bytes in host memory, of which `bytes_in` came to the device, of all steps so far."""

    linears: int = 0
    held: int = 0
    bytes_in: int = 0


def stream(model: nn.Module, pin_memory: bool) -> Streamed:
    """Move every frozen linear below an adapter to host memory. Raises Unsupported where that cannot be pinned."""
    streamed = Streamed()
    for name, linear in model.named_modules():
        if name.endswith("base_layer") and type(linear) is nn.Linear:
            weight = linear.weight.data
            host = weight.to("cpu", copy=True)
            linear.weight.data = weight.new_empty(0)
            linear.forward = MethodType(_forward(pinned(host) if pin_memory else host, streamed), linear)
            streamed.linears, streamed.held = streamed.linears + 1, streamed.held + host.nbytes
    return streamed


def pinned(tensor: Tensor) -> Tensor:
    """In pinned memory. Raises Unsupported where there is none: from pageable memory every copy would be waited for."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        raise Unsupported(
            f"{tensor.nbytes / 2**30:.2g} GiB of host memory cannot be pinned, without which offloading waits for each "
            f"copy: {first_line(error)}"
        ) from error


def _forward(host: Tensor, streamed: Streamed) -> Any:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return _StreamedLinear.apply(x, host, self.bias, streamed)  # type: ignore[return-value]

    return forward


class _StreamedLinear(torch.autograd.Function):
    """x (…, in) times the transposed weight (out, in), which is fetched twice and saved never."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, host: Tensor, bias: Tensor | None, streamed: Streamed) -> Tensor:
        ctx.host, ctx.streamed = host, streamed
        return nn.functional.linear(x, _fetched(ctx, x), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = dy @ _fetched(ctx, dy) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def _fetched(ctx: Any, like: Tensor) -> Tensor:
    ctx.streamed.bytes_in += ctx.host.nbytes
    return ctx.host.to(like.device, copy=True, non_blocking=True)
