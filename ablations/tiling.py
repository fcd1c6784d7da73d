"""A module by tiles of rows, computed again in backward with the dropout masks of its forward. `tiled_mlp.py` has the
toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states


def tile(module: nn.Module, tiles_of: Callable[[int], int], counts: dict[str, int], name: str) -> None:
    """Bind a forward to a module of x (…, H) → (…, H) whose rows do not see each other. `tiles_of`: of rows how many
    tiles; `counts[name]` becomes the number of tiles of the last backward."""
    own = module.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        trained = [p for p in self.parameters() if p.requires_grad]
        size = -(-rows.shape[0] // tiles_of(rows.shape[0]))
        tell = lambda tiles: counts.__setitem__(name, tiles)  # noqa: E731
        return _Tiled.apply(own, size, tell, rows, *trained).view(x.shape)  # type: ignore[union-attr]

    module.forward = MethodType(forward, module)


class _Tiled(torch.autograd.Function):
    """`run` by tiles of `size` rows. The random numbers' state is kept once: backward runs the tiles in the same order,
    and nothing that it does between them draws any."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], size: int, tell: Callable[[int], None], x: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.run, ctx.size, ctx.tell = run, size, tell
        ctx.on_host, ctx.on_devices = torch.get_rng_state(), get_device_states(x)
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x, *trained)
        return torch.cat([run(part) for part in x.split(size)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *trained = ctx.saved_tensors
        sums: list[Tensor | None] = [None] * len(trained)
        of_x = torch.empty_like(x)
        enabled, dtype = ctx.autocast
        with torch.random.fork_rng(devices=ctx.on_devices[0], device_type=_kind(x)):
            torch.set_rng_state(ctx.on_host)
            set_device_states(*ctx.on_devices, device_type=x.device.type)
            parts = list(zip(x.split(ctx.size), grad.split(ctx.size), of_x.split(ctx.size), strict=True))
            for part, dy, dx in parts:
                with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled):
                    tile = part.detach().requires_grad_()
                    found = torch.autograd.grad(ctx.run(tile), [tile, *trained], dy, allow_unused=True)
                dx.copy_(found[0])
                sums = [_plus(total, more) for total, more in zip(sums, found[1:], strict=True)]
        ctx.tell(len(parts))
        return None, None, None, of_x, *sums


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """A sum in place of what this backward alone holds."""
    return more if total is None else total if more is None else total.add_(more)


def _kind(x: Tensor) -> str:
    return "cuda" if x.device.type == "cpu" else x.device.type
