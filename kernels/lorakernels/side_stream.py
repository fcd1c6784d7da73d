"""A side stream of the CUDA graph that is being captured, beside the main stream that the next layer's backward is on.

A captured step of a small model is a chain of short launches, each of which leaves most of the GPU idle. dA, dB and
their casts are waited for by the optimizer alone, so they go on a side stream that the node joins at its end:

    side_stream = SideStream(device)
    with side_stream:      # after what has been launched so far
        dA, dB, casts
    dX, the norm's backward
    side_stream.join()

Uncaptured nothing changes but the order of the calls: there a small model waits for its host, which events would cost
more time. A large model's launches fill the GPU by themselves. What the side stream reads must not be freed before
`join` (`keep_alive`): a launch of the main stream would be given its memory.
Run: python -m pytest tests/lorakernels/test_side_stream.py
"""

from __future__ import annotations

from typing import Any

import torch

_streams: dict[torch.device, Any] = {}  # one a device; a new one for each node would want a library workspace each
MAX_ELEMENTS = 32 * 2**20  # of a node's widest tensor; above it the side stream gains nothing (docs/lab-notes.md)


def stream_of(device: torch.device) -> Any:
    """The one stream that this package has on a GPU beside the caller's."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class SideStream:
    """May be entered several times; each time it waits for what has been launched on the main stream by then.

    device: of the node; elements: how many its widest tensor has, above MAX_ELEMENTS there is no side stream.
    """

    def __init__(self, device: torch.device, elements: int = 0):
        small = elements <= MAX_ELEMENTS
        self.active = small and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.active:
            self._stream, self._used = stream_of(device), False
            self._held: list[Any] = []

    def __enter__(self) -> SideStream:
        if self.active:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
            self._used = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self.active:
            self._context.__exit__(*error)

    def keep_alive(self, *read: Any) -> None:
        """Holds what the side stream reads (tensors, or records with tensors in them) until `join`, if it is active."""
        if self.active:
            self._held += read

    def join(self) -> None:
        """What is launched from here on comes after the side stream."""
        if self.active and self._used:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._used = False
            self._held.clear()
