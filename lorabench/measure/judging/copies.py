"""Copies of hundreds of small tensors, between a device and its host in few transfers.

A transfer waits for the device, and where several processes compute on one GPU it waits until its own process is the
one that computes: milliseconds for each tensor, where alone it is microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE = 1 << 24  # elements of about one transfer; a larger tensor goes alone


@torch.no_grad()
def copies(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """A copy of each on the device, in its own number format and shape; several may lie in one storage."""
    made: dict[int, Tensor] = {}
    small = {n: t for n, t in enumerate(tensors) if type(t) in (Tensor, nn.Parameter) and t.numel() <= AT_ONCE}
    for pack in packs(small, AT_ONCE):
        flat = torch.cat([small[n].detach().reshape(-1) for n in pack]).to(device)
        parts = flat.split([small[n].numel() for n in pack])
        made |= {n: part.view(small[n].shape) for n, part in zip(pack, parts, strict=True)}
    # torchao's states know no clone().
    return [made[n] if n in made else t.detach().to(device, copy=True) for n, t in enumerate(tensors)]


def packs(tensors: Mapping[int, Tensor], at_once: int | Mapping[str, int]) -> list[list[int]]:
    """The numbers of tensors that can become one: of one device and number format, about as many elements in each pack,
    which may differ by the kind of the device."""
    found: dict[Any, list[int]] = {}
    elements: Counter[Any] = Counter()
    for n, tensor in tensors.items():
        alike = tensor.device, tensor.dtype
        most = at_once if isinstance(at_once, int) else at_once[tensor.device.type]
        found.setdefault((alike, elements[alike] // most), []).append(n)
        elements[alike] += tensor.numel()
    return list(found.values())
