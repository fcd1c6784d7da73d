"""How far two right runs of one model are apart at its full depth: the full arms may differ by a multiple of it.

Plain PEFT is run twice on the timed samples: once as it is, and once with every module's output, and every gradient
that comes back to one, moved to a neighbouring number of the compute dtype at random. Another order of summation or
another fusion does no less. Under dropout more runs draw masks of their own. This is computed once for
each model and workload of a sweep, and kept in its folder.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.measure.judging.witness import without_dropout
from lorabench.record.store import write_atomically

RUNS = 2  # with other rounding, of which the worse counts: one run may be near the other by chance
# Pairs of runs under dropout. A loss is one number: two pairs of masks are within a quarter of their spread in one case
# of twenty, and sixty right trials would then go beyond the limit that is made of them; seven pairs hold.
MASKED_RUNS = 7
SKIPPED = ("lm_head",)  # moving each of a vocabulary's logits would cost more memory than the model has


@dataclass(frozen=True)
class DepthNoise:
    """Of each trained tensor (relative error, |projection - 1|) of one run against another, of the typical tensor the
    |projection - 1|, with its sign kept until the median; of the loss its relative difference."""

    tensors: dict[str, tuple[float, float]]
    scale: float
    loss: float
    masks: DepthNoise | None = None  # of two runs under dropout, where there is any


_STORED = TypeAdapter(DepthNoise | None)


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


Outcome = tuple[float, dict[str, Tensor]]  # the loss of a forward and backward, and its gradients by name


def measure(arm: Arm, outcome: Callable[..., Outcome]) -> DepthNoise:
    """`outcome` runs one forward and backward of the arm; with `backward=False` for the loss alone."""
    with without_dropout(arm.model):
        plain = outcome()
        with other_rounding(arm.model):
            found = _worse([_between(plain, outcome()) for _ in range(RUNS)])
    if not any(isinstance(m, nn.Dropout) and m.p > 0 for m in arm.model.modules()):
        return found
    masked = outcome()
    masks = _worse([_between(masked, outcome()) for _ in range(RUNS)])
    losses = [off(outcome(backward=False)[0], masked[0]) for _ in range(MASKED_RUNS - RUNS)]
    return replace(found, masks=replace(masks, loss=max(masks.loss, *losses)))


def _between(one: Outcome, other: Outcome) -> DepthNoise:
    found = {n: distance(other[1][n], g) for n, g in one[1].items()}
    tensors = {n: (d.error, abs(d.scale)) for n, d in found.items()}
    scale = abs(statistics.median(d.scale for d in found.values()))
    return DepthNoise(tensors, scale, off(other[0], one[0]))


def _worse(runs: Sequence[DepthNoise]) -> DepthNoise:
    tensors = {n: tuple(map(max, zip(*(r.tensors[n] for r in runs), strict=True))) for n in runs[0].tensors}
    return DepthNoise(tensors, max(r.scale for r in runs), max(r.loss for r in runs))  # type: ignore[arg-type]


class Distance(NamedTuple):
    """Of a tensor v from a reference r: ||v - r|| / ||r||, and <v, r> / <r, r> - 1. The second shows a wrong scale or
    sign, which the first hides behind rounding."""

    error: float
    scale: float


def distance(value: Tensor, reference: Tensor) -> Distance:
    """Infinite where the value is not finite."""
    value, reference = value.reshape(-1).float(), reference.reshape(-1).float()
    square = torch.dot(reference, reference)
    error, along, own = torch.stack([(value - reference).norm(), torch.dot(value, reference), square]).tolist()
    if own == 0.0 and error == 0.0:
        return Distance(0.0, 0.0)
    found = Distance(error / max(own, 1e-30) ** 0.5, along / max(own, 1e-30) - 1)
    return found if all(map(math.isfinite, found)) else Distance(math.inf, math.inf)


def nine_tenths(scales: Iterable[float]) -> float:
    """What is exceeded by one in ten of these projections' errors; 0 of none. One tensor's own may be small by luck."""
    ordered = sorted(scales)
    return ordered[int(0.9 * (len(ordered) - 1))] if ordered else 0.0


def off(value: float, reference: float) -> float:
    """Relative difference of two numbers."""
    return abs(value - reference) / max(abs(reference), 1e-30)


def keep(file: Path, found: DepthNoise | None) -> None:
    """Into the file; None: it could not be measured."""
    write_atomically(file, json.dumps(None if found is None else asdict(found)).encode())


def read(file: Path) -> DepthNoise | None:
    """What `keep` put there; None where nothing is."""
    return _STORED.validate_python(json.loads(file.read_text())) if file.exists() else None
