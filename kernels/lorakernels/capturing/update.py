"""Clipping and the optimizer's step as graphs, over the buffers that the captured backward adds to.

The learning rate is read from a tensor that is written before each replay, while the optimizer's own groups keep the
number, so that schedulers, logs and checkpoints see what they always saw. Whatever else a graph has burnt in (betas,
weight decay, where the states lie) is looked at before each replay, and captured anew where it has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .graph import CudaGraphs, NotCaptured, Outputs, Recording
from .state import Gradients
from .status import Status


class _Piece:
    """A function without inputs: run as it is once for each state of what it depends on, then captured."""

    def __init__(self, name: str, graphs: CudaGraphs | None, status: Status):
        self.name, self.graphs, self.status = name, graphs, status
        self._recording: Recording | None = None
        self._depends: tuple[Any, ...] | None = None  # the objects themselves: an id may be given away again
        self._refused: str | None = None

    def __call__(self, run: Callable[[], Outputs], depends: tuple[Any, ...], reason: str | None) -> Outputs:
        """run: gives tensors of one number by name; depends: what else it reads, compared by identity where these are
        no plain values; reason: why it must run as it is this time."""
        reason = reason or self._refused
        if self.graphs is None or reason is not None:
            return self._as_it_is(run, str(reason))
        if self._depends is None or not _same(self._depends, depends):
            self._recording, self._depends = None, depends
            with self.graphs.needs_of_host() as needs:
                outputs = self._as_it_is(run, "warming up")
            if needs:
                self._refused = f"it needs the host: {', '.join(sorted(set(needs)))}"
            return outputs
        if self._recording is None:
            try:
                self._recording = self.graphs.record(run)
            except NotCaptured as error:
                self._refused = f"cannot be captured: {error}"
                return self._as_it_is(run, self._refused)
        self.status.updates[f"{self.name} replayed"] += 1
        return {name: t.clone() for name, t in self._recording.replay().items()}

    def _as_it_is(self, run: Callable[[], Outputs], reason: str) -> Outputs:
        self.status.updates[f"{self.name} eager: {reason}"] += 1
        if self.graphs is None:
            return run()
        with self.graphs.aside():
            return run()

    def release(self) -> None:
        self._recording = self._depends = None


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    plain = (bool, int, float, str, type(None), tuple)
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, plain) and x == y) for x, y in zip(a, b, strict=True)
    )


class CapturedUpdate:
    """optimizer: any; those of torch that have `capturable` are captured. never: why nothing is captured here."""

    def __init__(self, optimizer: Optimizer, graphs: CudaGraphs | None, status: Status, never: str | None):
        self.optimizer, self.never = optimizer, never
        self._step = optimizer.step  # before anybody puts `self.step` in its place
        self._clip_piece = _Piece("clipping", graphs, status)
        self._step_piece = _Piece("optimizer", graphs, status)
        self._rates: list[torch.Tensor] = []
        self._written: list[float] = []

    def clip(self, run: Callable[[], torch.Tensor], gradients: Gradients | None, limit: float) -> torch.Tensor:
        """The norm of the gradients, which `run` clips to `limit`."""
        reason = self.never or _why_foreign(self.optimizer, gradients)
        return self._clip_piece(lambda: {"norm": run()}, (gradients, limit), reason)["norm"]

    def step(self, gradients: Gradients | None) -> None:
        """One step of the optimizer."""
        reason = self.never or why_not_capturable(self.optimizer) or _why_foreign(self.optimizer, gradients)
        if reason is not None:
            self._step_piece(self._run_plainly, (), reason)
            return
        self._make_capturable()
        self._write_rates()
        state = self.optimizer.state
        depends = (gradients, state, *_burnt_in(self.optimizer))
        self._step_piece(self._run_with_rates, depends, None)

    def release(self) -> None:
        """Frees the graphs."""
        self._clip_piece.release()
        self._step_piece.release()

    def _run_plainly(self) -> Outputs:
        self._step()
        return {}

    def _run_with_rates(self) -> Outputs:
        """The optimizer's own step while its groups hold tensors for learning rates."""
        groups = self.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            self._step()
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        return {}

    def _write_rates(self) -> None:
        groups = self.optimizer.param_groups
        if len(self._rates) != len(groups):
            self._rates = [torch.zeros((), device=self._device) for _ in groups]
            self._written = [0.0] * len(groups)
        for i, group in enumerate(groups):
            if group["lr"] != self._written[i]:
                self._rates[i].fill_(group["lr"])
                self._written[i] = group["lr"]

    def _make_capturable(self) -> None:
        """Step counts go to the device; a checkpoint that was loaded may have brought them back. torch asks every group
        for the flag, one without parameters (transformers makes one) included, and refuses it on a CPU."""
        if self._device.type != "cuda":
            return
        for group in self.optimizer.param_groups:
            if group["capturable"]:
                continue
            group["capturable"] = True
            for p in group["params"]:
                state = self.optimizer.state.get(p, {})
                if isinstance(count := state.get("step"), torch.Tensor) and count.device != self._device:
                    state["step"] = count.to(self._device)

    @property
    def _device(self) -> torch.device:
        return next(p.device for group in self.optimizer.param_groups for p in group["params"])


def why_not_capturable(optimizer: Optimizer) -> str | None:
    """Why an optimizer's step cannot be captured, or None."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if not all("capturable" in group for group in groups):
        return f"{name} counts or computes on the host (no `capturable`)"
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return "a learning rate is a tensor, which its owner may replace"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks around its step"
    return None


def _why_foreign(optimizer: Optimizer, gradients: Gradients | None) -> str | None:
    """Why the gradients cannot be brought to where a graph reads them, or None when they are there."""
    if gradients is None:
        return "no backward is captured yet"
    if not gradients.are_all(p for group in optimizer.param_groups for p in group["params"]):
        return "an uncaptured batch has left gradients of other parameters"
    gradients.attach()
    return None


def _burnt_in(optimizer: Optimizer) -> tuple[Any, ...]:
    """What an optimizer's groups and states hold beside gradients and learning rates."""
    groups = [v for group in optimizer.param_groups for n, v in group.items() if n not in ("params", "lr")]
    states = [v for state in optimizer.state.values() for v in state.values()]
    return (len(optimizer.param_groups), *groups, *states)
