"""Copies of hundreds of small tensors, between a device and its host in few transfers.

A transfer waits for the device, and where several processes compute on one GPU it waits until its own process is the
one that computes: milliseconds for each tensor, where alone it is microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE = 1 << 26  # bytes of one transfer; a larger tensor goes alone


@torch.no_grad()
def copies(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """A copy of each on the device, in its own number format and shape; several may lie in one storage."""
    device = torch.device(device)
    made: list[Tensor | None] = [None] * len(tensors)
    packs: dict[Any, list[list[int]]] = {}
    held: dict[Any, int] = {}  # bytes of the last pack
    for n, tensor in enumerate(tensors):
        bytes_, alike = tensor.numel() * tensor.element_size(), (tensor.device, tensor.dtype)
        if type(tensor) not in (Tensor, nn.Parameter) or bytes_ > AT_ONCE:
            made[n] = tensor.detach().to(device, copy=True)  # torchao's states know no clone()
            continue
        if alike not in packs or held[alike] + bytes_ > AT_ONCE:
            packs.setdefault(alike, []).append([])
            held[alike] = 0
        packs[alike][-1].append(n)
        held[alike] += bytes_
    for pack in (pack for of_one_format in packs.values() for pack in of_one_format):
        flat = torch.cat([tensors[n].detach().reshape(-1) for n in pack]).to(device)
        parts = flat.split([tensors[n].numel() for n in pack])
        for n, part in zip(pack, parts, strict=True):
            made[n] = part.view(tensors[n].shape)
    return [one for one in made if one is not None]
