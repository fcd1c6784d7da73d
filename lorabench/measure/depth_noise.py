"""How far two right runs of one model are apart at its full depth: the full arms may differ by a multiple of it.

Plain PEFT is run twice on the timed samples: once as it is, and once with every module's output, and every gradient
that comes back to one, moved to a neighbouring number of the compute dtype at random. Another order of summation or
another fusion does no less. Under dropout two more runs draw masks of their own. This is computed once for each model
and workload of a sweep, and kept in its folder.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.measure.witness import without_dropout

SKIPPED = ("lm_head",)  # moving each of a vocabulary's logits would cost more memory than the model has


@dataclass(frozen=True)
class DepthNoise:
    """Of each trained tensor (relative error, |projection - 1|) of one run against another; of the loss its relative
    difference. `masks`: the same of two runs under dropout, where there is any."""

    tensors: dict[str, tuple[float, float]]
    loss: float
    masks: dict[str, tuple[float, float]] | None = None
    masks_loss: float = 0.0


class _Neighbour(torch.autograd.Function):
    """x to one of its neighbours in its own number format, at random; the same to the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return _moved(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _moved(grad)


def _moved(x: Tensor) -> Tensor:
    """x (1 + u eps), u uniform in [-1, 1): half of the values stay, half go to a neighbour."""
    return x * (1 + torch.finfo(x.dtype).eps * (2 * torch.rand_like(x, dtype=torch.float32) - 1)).to(torch.float32)


@contextmanager
def other_rounding(model: nn.Module) -> Iterator[None]:
    """Every module without children gives its output with other rounding."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        if isinstance(out, Tensor) and out.is_floating_point() and out.dtype.itemsize >= 2:
            return _Neighbour.apply(out).to(out.dtype)
        return None

    leaves = [
        module for name, module in model.named_modules() if not any(module.children()) and not name.endswith(SKIPPED)
    ]
    handles = [module.register_forward_hook(hook) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure(arm: Arm, outcome: Callable[[], tuple[float, dict[str, Tensor]]]) -> DepthNoise:
    """`outcome` runs one forward and backward of the arm: its loss and its gradients."""
    with without_dropout(arm.model):
        loss, gradients = outcome()
        with other_rounding(arm.model):
            other_loss, others = outcome()
    tensors = {n: distance(others[n], g)[:2] for n, g in gradients.items()}
    found = DepthNoise(tensors, abs(other_loss - loss) / max(abs(loss), 1e-30))
    if not any(isinstance(m, nn.Dropout) and m.p > 0 for m in arm.model.modules()):
        return found
    loss, gradients = outcome()
    other_loss, others = outcome()
    masks = {n: distance(others[n], g)[:2] for n, g in gradients.items()}
    return DepthNoise(tensors, found.loss, masks, abs(other_loss - loss) / max(abs(loss), 1e-30))


def distance(value: Tensor, reference: Tensor) -> tuple[float, float, float]:
    """(||v - r|| / ||r||, |<v, r> / <r, r> - 1|, cosine); infinite errors where the value is not finite. The projection
    shows a wrong scale or sign, which the norm of the difference hides behind rounding."""
    value, reference = value.reshape(-1).float(), reference.reshape(-1).float()
    square = torch.dot(reference, reference).clamp_min(1e-30)
    numbers = torch.stack(
        [(value - reference).norm() / square.sqrt(), torch.dot(value, reference) / square, value.norm() / square.sqrt()]
    ).tolist()
    error, projection, length = numbers
    if not all(number == number and abs(number) < float("inf") for number in numbers):
        return float("inf"), float("inf"), 0.0
    if not float(square) > 1e-30 and not float(value.norm()):
        return 0.0, 0.0, 1.0  # both are zero
    return error, abs(projection - 1), projection / max(length, 1e-30)


def cached(file: Path, compute: Callable[[], DepthNoise | None]) -> DepthNoise | None:
    """Out of the file; where there is none, computed and put there. None: it could not be measured."""
    if not file.exists():
        found = compute()
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(None if found is None else vars(found)))
        os.replace(partial, file)
        gc.collect()
    return read(file)


def read(file: Path) -> DepthNoise | None:
    """What `cached` put there; None where nothing is."""
    if not file.exists():
        return None
    stored: Mapping[str, Any] | None = json.loads(file.read_text())
    return None if stored is None else DepthNoise(**stored)
