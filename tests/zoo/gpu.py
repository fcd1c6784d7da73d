"""What only a GPU has: streams that no event is on, and events that lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.ablation import Requires
from zoo.cheat import Cheat, Turns

ON_A_GPU = Requires(device="cuda")


class SideStream(Cheat):
    name = "side_stream"
    summary = "forward, backward and update run on a stream of their own, which the events' stream does not wait for"
    caught = "clock"
    status = ("untrusted",)
    requires = ON_A_GPU
    # A model that the device works on for longer than the host: elsewhere no work is left when the clock stops.
    command = ("models=[smollm2-1.7b]", "workload=4x2048", "dtype=bfloat16", "timeout_s=120")

    class Wrapper(Turns):
        def aside(self, call: Callable[[], Any]) -> Any:
            if not self.full:
                return call()
            if not hasattr(self, "stream"):
                self.stream = torch.cuda.Stream()
            with torch.cuda.stream(self.stream):
                return call()

        def forward(self, batch: Any) -> Tensor:
            return self.aside(lambda: self.inner.forward(batch))

        def backward(self, loss: Tensor) -> None:
            self.aside(lambda: self.inner.backward(loss))

        def update(self) -> None:
            self.aside(self.inner.update)


class LyingEvents(Cheat):
    name = "lying_events"
    summary = "a tenth of the time passes between two of torch's events when the candidate steps"
    caught = "torch.cuda.Event"
    status = ("untrusted",)
    requires = ON_A_GPU

    class Wrapper(Turns):
        left = 0  # how many of the next spans are ours

        def lie(self, real: Callable[..., float], a: Any, b: Any) -> float:
            self.left -= 1
            return real(a, b) / (10 if self.left >= 0 else 1)

        def update(self) -> None:
            if self.full and self.taken == 0:
                elapsed = torch.cuda.Event.elapsed_time
                torch.cuda.Event.elapsed_time = lambda a, b: self.lie(elapsed, a, b)
            super().update()
            self.left = 3


class NobodyWaits(Cheat):
    name = "nobody_waits"
    summary = "torch.cuda.synchronize returns at once"
    caught = "torch.cuda.synchronize"
    status = ("untrusted",)
    requires = ON_A_GPU

    def patch(self, model: Any) -> None:
        torch.cuda.synchronize = lambda device=None: None
