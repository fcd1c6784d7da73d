"""What TRL's SFTTrainer logs beside the loss (entropy, accuracy, tokens), kept on the device until it is logged.

Its loss reads each metric with `.item()`, which waits for the device and no graph can do. Everything that it reads has
come through `accelerator.gather_for_metrics`; here that gives a `Later`, whose reading is put off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Later:
    """A number on the device that is computed with but not looked at."""

    def __init__(self, value: Tensor):
        self.value = value.detach()

    def sum(self) -> Later:
        return Later(self.value.sum())

    def mean(self) -> Later:
        return Later(self.value.float().mean())

    def item(self) -> Later:
        return self

    def __gt__(self, other: Any) -> bool:
        """True: what TRL asks before it divides, `__truediv__` answers."""
        return True

    def __truediv__(self, other: Later) -> Later:
        """Zero where TRL would not have divided."""
        return Later(torch.where(other.value > 0, self.value / other.value, 0.0))

    def __floordiv__(self, other: int) -> Later:
        return Later(self.value // other)

    def __radd__(self, other: Any) -> Later:
        return Later(self.value + other)


class SftMetrics:
    """The metrics of one trainer; of one that has none of TRL's, nothing."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.known = hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens")

    @contextlib.contextmanager
    def collected(self) -> Iterator[dict[str, Tensor]]:
        """Around the trainer's loss: what it would log, by name, complete when this ends; the trainer itself has
        logged nothing."""
        found: dict[str, Tensor] = {}
        if not self.known:
            yield found
            return
        trainer = self.trainer
        logged, total = trainer._metrics["train"], trainer._total_train_tokens
        before = {name: list(values) for name, values in logged.items()}
        trainer.accelerator.gather_for_metrics = Later
        try:
            yield found
            for name, values in logged.items():
                if values[len(before.get(name, ())) :] and name != "num_tokens":
                    found[name] = torch.as_tensor(getattr(values[-1], "value", values[-1]))
        finally:
            del trainer.accelerator.gather_for_metrics
            logged.clear()
            logged.update(before)
            trainer._total_train_tokens = total

    def add(self, metrics: dict[str, Tensor], inputs: Any) -> None:
        """What one step has collected, and its tokens, to what the trainer will log."""
        if not self.known:
            return
        trainer, logged = self.trainer, self.trainer._metrics["train"]
        for name, value in metrics.items():
            logged[name].append(value)
        mask = inputs.get("attention_mask")
        tokens = inputs["position_ids"].shape[1] if mask is None else int(mask.sum())
        trainer._total_train_tokens += tokens // getattr(trainer, "_tp_size", 1)
        logged["num_tokens"] = [trainer._total_train_tokens]

    def read(self) -> None:
        """Makes numbers of what was kept: one wait, when the trainer logs."""
        if not self.known:
            return
        logged = self.trainer._metrics["train"]
        kept = [v for values in logged.values() for v in values if isinstance(v, Tensor)]
        if not kept:
            return
        numbers = iter(torch.stack([v.double() for v in kept]).tolist())
        for name, values in logged.items():
            logged[name] = [next(numbers) if isinstance(v, Tensor) else v for v in values]


@contextlib.contextmanager
def _replaced(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, what a module has under this name is what `make` makes of it; nothing where it is not imported."""
    home: Any = sys.modules.get(module)
    own = getattr(home, name, None)
    if own is None:
        yield
        return
    setattr(home, name, make(own))
    try:
        yield
    finally:
        setattr(home, name, own)


def every_position() -> contextlib.AbstractContextManager[None]:
    """Inside, TRL's own head scores every position. It would pick those that have a label, and their number decides
    shapes."""
    return _replaced("trl.trainer.utils", "_use_triton", lambda own: lambda device: False)


def filled_numbers() -> contextlib.AbstractContextManager[None]:
    """Inside, TRL's `torch.tensor(5, device="cuda")` fills a tensor on the device. A number that is copied there lets
    the host wait; TRL makes that of a packed row's tokens so."""
    return _replaced("trl.trainer.sft_trainer", "torch", _Torch)


class _Torch:
    """torch, for one module. A TorchFunctionMode would stand between every call of a step and the place it is made
    from, by which `needs_of_host` knows what may wait."""

    def __init__(self, own: Any):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def tensor(self, data: Any, **kwargs: Any) -> Tensor:
        number = isinstance(data, (bool, int, float))
        return self._own.full((), data, **kwargs) if number else self._own.tensor(data, **kwargs)
