"""Frozen weights of decoder layers in pinned host memory: on the device are those of the layer that computes, and those
of the next one come meanwhile, on the copy stream that what is kept takes, too (`parked.py`).

What comes and goes is the storage of the buffers that the projections own, so all views of them stay what they are; the
modules' weights have no elements while they wait. Device memory belongs to the main stream throughout: storages are
allocated and given back there, and each side waits for the other. Ren et al., "ZeRO-Offload" (2021), keep optimizers on
the host; here nothing but what is frozen. Run: python -m pytest tests/lorakernels/test_offloaded.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..nodes.projection import Projection
from .parked import on_copy_stream, wait_for


class Offloaded:
    """The weights of one layer, in the buffers of these groups, which are their own. layers: of the layers before it in
    the model; this one is added. The model may move to another device later: the weights come to where it is."""

    def __init__(self, groups: Sequence[Projection], layers: list[Offloaded]):
        self._groups = list(groups)
        self._layers, self._number = layers, len(layers)
        self._stays, self._here, self._copied = False, True, None
        self._device = self._device_of_model()
        self._host = [_host_copy(b) for b in self._buffers()]
        layers.append(self)
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which fetches its weights itself: what the original waits for is not its own."""
        return {**vars(self), "_copied": None, "_here": False}

    def need(self, step: int) -> int:
        """What is launched from here on finds the weights. Those of the layer that is `step` further begin to come, all
        others leave. Returns how many layers' weights began to come."""
        near = self._number + step
        two = [self, *self._layers[near : near + 1]] if near >= 0 else [self]
        for layer in self._layers:
            if layer not in two:
                layer._leave()
        begun = sum(layer._fetch() for layer in two)
        wait_for(self._device, self._copied)
        return begun

    def bring(self, stay: bool) -> None:
        """What is launched from here on finds the weights. stay: they leave no more."""
        self._stays |= stay
        self._fetch()
        wait_for(self._device, self._copied)

    def end(self) -> None:
        """The weights are back for good, and nothing is held here: the layers know each other, and whoever waited for a
        collector would wait with a copy of every weight."""
        self.bring(stay=True)
        self._groups, self._host = [], []
        self._layers.clear()

    def _buffers(self) -> list[torch.Tensor]:
        return [g.buffer for g in self._groups if g.buffer is not None]

    def _device_of_model(self) -> torch.device:
        return self._groups[0].linears[0].weight.device

    def _fetch(self) -> bool:
        """Begins to bring the weights, if they are not on their way."""
        if (device := self._device_of_model()) != self._device:
            self._follow(device)
        if self._here:
            return False
        buffers = self._buffers()
        for buffer in buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
        with on_copy_stream(self._device) as event:
            for buffer, host in zip(buffers, self._host, strict=True):
                buffer.data.copy_(host, non_blocking=True)  # `data`: autograd has nothing to do with it
            self._copied = event()
        for buffer, group in zip(buffers, self._groups, strict=True):
            for m, rows in zip(group.linears, group.linear_rows, strict=True):
                m.weight.data = buffer.data[rows, : group.k]
        self._here = True
        return True

    def _leave(self) -> None:
        if not self._here or self._stays:
            return
        wait_for(self._device, self._copied)  # nobody else may get memory that a copy still writes to
        for buffer, group in zip(self._buffers(), self._groups, strict=True):
            for m in group.linears:
                m.weight.data = buffer.new_empty(0)
            buffer.untyped_storage().resize_(0)
        self._here = False

    def _follow(self, device: torch.device) -> None:
        """The model was moved to this device: the weights wait beside it, and the buffers are there."""
        self._device, self._here, self._copied = device, False, None
        for number, group in enumerate(self._groups):
            assert group.buffer is not None
            group.buffer = torch.empty_like(group.buffer, device=device)
            group.buffer.untyped_storage().resize_(0)
            if device.type == "cuda":
                self._host[number] = self._host[number].pin_memory()


def _host_copy(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda).copy_(buffer)
