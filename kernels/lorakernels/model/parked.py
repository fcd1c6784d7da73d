"""What is kept of a layer, in pinned host memory until its backward: it goes out on a copy stream behind the layer, and
comes back while the layer behind it still has a backward to do.

A layer's backward needs most memory where attention has its own. So the layer before begins to come behind that
(`ahead`): its input, which it needs first, while the projections' gradients are made, and attention's result while it
makes them again. Device memory belongs to the main stream throughout. A layer's tensors stay until the next layer is
parked, where the main stream waits for their copy; what comes back is allocated on the main stream, for which the copy
stream waits. So two layers are on the device at the most, however far the host is ahead. Where there is no GPU the
copies are plain ones. Run: python -m pytest tests/lorakernels/test_long_context.py
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_streams: dict[torch.device, Any] = {}  # one a device, both ways: they never go at the same time


@contextlib.contextmanager
def on_copy_stream(device: torch.device) -> Iterator[Callable[[], Any]]:
    """Inside, behind all that was launched so far; it gives what records an event there (None on a CPU)."""
    if device.type != "cuda":
        yield lambda: None
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream.record_event


class Parked:
    """Tensors of any shapes of one device. Those of one dimension or none, seeds and counts, stay there."""

    def __init__(self, tensors: Sequence[torch.Tensor], before: Parked | None):
        self._before = None if before is None else weakref.ref(before)
        self._device, self._here = tensors[0].device, list(tensors)
        self._small = [t if t.dim() < 2 else None for t in tensors]
        pin = self._device.type == "cuda"
        self._host = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in tensors if t.dim() >= 2]
        with on_copy_stream(self._device) as event:
            for host, t in zip(self._host, [t for t in tensors if t.dim() >= 2], strict=True):
                host.copy_(t, non_blocking=True)
            self._first = self._copied = event()
        if before is not None:
            before._leave()

    def _leave(self) -> None:
        """The device's copies may go."""
        self.wait()
        self._here = None

    def _fetch(self) -> None:
        """Begins to bring everything back, if it is not on its way."""
        if self._here is not None:
            return
        into = [torch.empty_like(host, device=self._device) for host in self._host]
        with on_copy_stream(self._device) as event:
            for number, (t, host) in enumerate(zip(into, self._host, strict=True)):
                t.copy_(host, non_blocking=True)
                if not number:
                    self._first = event()
            self._copied = event()
        large = iter(into)
        self._here = [next(large) if t is None else t for t in self._small]

    def back(self) -> list[torch.Tensor]:
        """The tensors, on their device, of which the first one is there; `wait` before the others. It can be asked
        again."""
        self._fetch()
        wait_for(self._device, self._first)
        here, self._here = self._here, None
        assert here is not None
        return here

    def wait(self) -> None:
        """What is launched from here on comes behind all tensors that `back` gave."""
        wait_for(self._device, self._copied)

    def ahead(self) -> None:
        """Those of the layer before begin to come, if they are not on their way."""
        if self._before is not None and (before := self._before()) is not None:
            before._fetch()


def wait_for(device: torch.device, event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class Parking:
    """Of all layers of a model: knows which was parked last."""

    def __init__(self) -> None:
        self._last: Any = None

    def park(self, tensors: Sequence[torch.Tensor]) -> Parked:
        """The tensors of a layer, behind those of the layer before it."""
        parked = Parked(tensors, None if self._last is None else self._last())
        self._last = weakref.ref(parked)
        return parked
