"""A branch of the CUDA graph that is being captured, beside the chain that the next layer's backward waits for.

A captured step of a small model is a chain of short launches, each of which leaves most of the GPU idle. dA, dB and
their casts are waited for by the optimizer alone, so they go on a branch that the node joins at its end:

    branch = Branch(device)
    with branch:           # after what has been launched so far
        dA, dB, casts
    dX, the norm's backward
    branch.join()

Uncaptured nothing changes but the order of the calls: there a small model waits for its host, which events would cost
more time. A large model's launches fill the GPU by themselves. What the branch reads must not be freed before `join`
(`keep`): a launch of the chain would be given its memory. Run: python -m pytest tests/lorakernels/test_branch.py
"""

from __future__ import annotations

from typing import Any

import torch

_streams: dict[torch.device, Any] = {}  # one a device; a new one for each node would want a library workspace each
MAX_ELEMENTS = 32 * 2**20  # of a node's widest tensor; above it the branch gains nothing (docs/lab-notes.md)


class Branch:
    """May be entered several times; each time it waits for what has been launched on the chain by then."""

    def __init__(self, device: torch.device, elements: int = 0):
        small = elements <= MAX_ELEMENTS
        self.active = small and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.active:
            if device not in _streams:
                _streams[device] = torch.cuda.Stream(device)
            self._stream, self._used = _streams[device], False
            self._kept: list[Any] = []

    def __enter__(self) -> Branch:
        if self.active:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
            self._used = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self.active:
            self._context.__exit__(*error)

    def keep(self, *read: Any) -> None:
        """Holds what the branch reads until `join`, if there is a branch."""
        if self.active:
            self._kept += read

    def join(self) -> None:
        """What is launched from here on comes after the branch."""
        if self.active and self._used:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._used = False
            self._kept.clear()
