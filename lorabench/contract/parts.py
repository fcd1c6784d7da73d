"""Parts: of a step whose optimizer updates copies of its own, each rank a part of every parameter (DeepSpeed's ZeRO).

Such a step says where those numbers lie, as tensors; the harness itself reads and writes them between trials, so that
no toggle's code runs outside the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # as in step.py
    from torch import Tensor, nn


@dataclass
class Part:
    """A run of a trained parameter's elements, the parameter flattened, that this rank's optimizer updates.

    `start`: the first of them; `copies`: where else their values are held, 1-D, the optimizer's first; `grad`: what the
    last backward left for them, of the same length. The step puts it there inside its `backward`, the harness drops it.
    """

    param: nn.Parameter
    start: int
    copies: Sequence[Tensor]
    grad: Tensor | None = None


def gradients(parts: Sequence[Part] | None, params: Sequence[nn.Parameter]) -> list[Any]:
    """What the last backward left for each of these parameters: `.grad`; or of a step of parts what all ranks hold, put
    together in float32, for which every rank has to call this. Elements that are nobody's are zeros."""
    if parts is None:
        return [p.grad for p in params]
    import torch
    import torch.distributed as dist

    sizes = [p.numel() for p in params]
    flat = torch.zeros(sum(sizes), device=params[0].device)
    found = dict(zip(map(id, params), flat.split(sizes), strict=True))
    for part in parts:
        if part.grad is not None and id(part.param) in found:
            found[id(part.param)][part.start : part.start + part.grad.numel()] += part.grad.detach()
    dist.all_reduce(flat)
    return [found[id(p)].view(p.shape) for p in params]


def follow(parts: Sequence[Part] | None) -> None:
    """The trained parameters were written from outside: all copies take over their values."""
    for part in parts or ():
        own = part.param.detach().flatten()
        for copy in part.copies:
            copy.detach().copy_(own[part.start : part.start + copy.numel()])
