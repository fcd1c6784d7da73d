"""What an arm did, kept as evidence: gradients in full before the first and after the last trial, and of every timed
trial its loss, a sketch of its gradients, and whether its update was AdamW's.

A witness stands beside one step (one job) of one process and is asked between trials, never inside one. What it keeps
crosses process boundaries as numbers and as safetensors files; `certificate.py` holds two arms' evidence together.
"""

from __future__ import annotations

import hashlib
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.contract.step import Step
from lorabench.contract.workload import LEARNING_RATE

SKETCH = 64  # numbers kept of each tensor and trial: a linear sketch, whose distances are right to 1 / sqrt(64)


@dataclass
class Testimony:
    """The evidence of one job in one process. Files hold float32 tensors by their names."""

    names: list[str] = field(default_factory=list)
    updates: bool = True
    loss: float = 0.0  # of the first trial
    before: Path | None = None  # gradients of the first trial
    after: Path | None = None  # gradients after the last trial, from where the first one started
    moved: Path | None = None  # how far the trials moved each parameter
    last_loss: float | None = None
    losses: list[float] = field(default_factory=list)  # of every timed trial
    sketches: list[np.ndarray] = field(default_factory=list)  # of every timed trial, (tensors, SKETCH) float32
    # of every timed trial the parameters that it began with: two sketches are as far apart as the parameters are, one
    # where each element differs by the learning rate
    places: list[np.ndarray] = field(default_factory=list)
    # of every timed trial the tensor that is farthest from AdamW's update: (relative error, name)
    update_errors: list[tuple[float, str]] = field(default_factory=list)
    low_precision: bool = False  # whether the trained parameters are held in fewer than 32 bits
    phases: tuple[str, ...] = ()
    noise: Any = None  # depth_noise.DepthNoise of the model, or None
    dropout: bool = False  # whether dropout was on in the timed trials
    masks_off: bool = True  # whether `before` and `after` are without dropout
    spread: float | None = None  # under dropout: how far two runs of this arm are apart (median over tensors)

    def digest(self, number: int) -> str:
        """A hash of what was seen of timed trial `number`, from 0 on."""
        one = slice(number, number + 1)
        found = hashlib.sha256(repr((self.losses[one], self.update_errors[one])).encode())
        for kept in self.sketches[one]:
            found.update(kept.tobytes())
        return found.hexdigest()


@dataclass
class Glimpse:
    """One trial from the start: its loss, a sketch of its gradients, and the file of them where they were kept."""

    loss: float
    sketch: np.ndarray
    file: Path | None = None


class Witness:
    """Beside one step. Made before its first trial, from whose start everything is counted."""

    def __init__(self, arm: Arm, step: Step, folder: Path) -> None:
        """`folder` takes the files; it is made where it is missing."""
        self.arm, self.step, self.folder = arm, step, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.params = dict(arm.adapters(step))
        self.start = _to_host(self.params)
        self.testimony = Testimony(
            names=list(self.params), updates=step.updates,
            low_precision=any(p.element_size() < 4 for p in self.params.values()),
        )  # fmt: skip
        self.shadow: Shadow | None = None

    def gradients(self, outs: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the last trial left in `.grad`, in float32 and without the loss scale, zeros where nothing was left;
        and what else the step compares of its outputs."""
        scale = 1.0 if self.step.updates else self.step.loss_scale  # an update has divided it out
        found = {
            n: torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.detach().float() / scale
            for n, p in self.params.items()
        }
        for out in outs:
            found |= self.step.innermost.compared(out)
        return found

    def first(self, loss: float, outs: Sequence[Tensor]) -> None:
        """After the first trial: keep its gradients, and the state from which the timed trials will start."""
        self.testimony.loss = loss
        self.testimony.before = self._save("before", self.gradients(outs))
        self.settled = _to_host(self.params)
        self.state = [
            (state, key, value.detach().cpu().clone() if isinstance(value, Tensor) else value)
            for state in self.step.optimizer.state.values()
            for key, value in state.items()
        ] if self.step.updates else []  # fmt: skip
        self.first_gradients = {
            n: None if p.grad is None else p.grad.detach().cpu().clone() for n, p in self.params.items()
        }

    def at_start(self) -> None:
        """Back to the parameters of before the first trial."""
        _put(self.params, self.start)

    def glimpse(self, loss: float, outs: Sequence[Tensor], keep: bool) -> Glimpse:
        """What the last trial's gradients were; `keep`: in full, too."""
        found = self.gradients(outs)
        return Glimpse(loss, sketch(found), self._save("before", found) if keep else None)

    def under_dropout(self, off: tuple[Glimpse, Glimpse], on: tuple[Glimpse, Glimpse]) -> None:
        """Two runs each with dropout off and on. An arm whose gradients then differ between two seeds although dropout
        is off draws masks that cannot be turned off (in a captured graph): it is compared under its own."""
        self.testimony.dropout = True
        self.testimony.spread = apart(*on)
        self.testimony.masks_off = apart(*off) <= self.testimony.spread / 10
        if self.testimony.masks_off:
            self.testimony.loss, self.testimony.before = off[0].loss, off[0].file

    def begin(self) -> None:
        """Before the timed trials: back to where the first trial ended, parameters and optimizer, so that both arms
        take the same steps however long each of them warmed up. Repeatable."""
        _put(self.params, self.settled)
        for state, key, value in self.state:
            if isinstance(value, Tensor) and isinstance(state[key], Tensor):
                state[key].copy_(value)
            else:
                state[key] = value
        if self.step.updates:
            self.place = self._place()
            rate = learning_rate(self.step)
            try:
                self.shadow = Shadow(self.start, self.first_gradients, self.params, rate, self.arm.device)
            except torch.OutOfMemoryError:  # the arm fits, and has to be measured: its shadow goes to the host
                self.shadow = Shadow(self.start, self.first_gradients, self.params, rate, torch.device("cpu"))

    def seen(self, loss: float, outs: Sequence[Tensor]) -> None:
        """After a timed trial."""
        found = self.gradients(outs)
        self.testimony.losses.append(loss)
        self.testimony.sketches.append(sketch(found))
        self.testimony.names = list(found)
        if self.shadow:
            gradients = {n: p.grad for n, p in self.params.items()}
            self.testimony.update_errors.append(self.shadow.error(gradients, self.params))
            self.testimony.places.append(self.place)
            self.place = self._place()

    def end(self) -> None:
        """After the timed trials: keep how far they went, and go back to the start for one more trial."""
        self.shadow = None
        way = {n: p.detach().float().cpu() - self.settled[n].float() for n, p in self.params.items()}
        self.testimony.moved = self._save("moved", way)
        self.at_start()

    def last(self, loss: float, outs: Sequence[Tensor]) -> None:
        """After that one more trial."""
        self.testimony.last_loss = loss
        self.testimony.after = self._save("after", self.gradients(outs))

    def _place(self) -> np.ndarray:
        """A sketch of the parameters, in float32, in steps: AdamW's first moves each element by the learning rate."""
        elements = sum(p.numel() for p in self.params.values())
        held = {n: p.detach().float() for n, p in self.params.items()}
        return sketch(held) / (learning_rate(self.step) * elements**0.5)

    def _save(self, what: str, tensors: Mapping[str, Tensor]) -> Path:
        file = self.folder / f"{what}-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
        save_file({n: t.detach().float().cpu().contiguous() for n, t in tensors.items()}, file)
        return file


def learning_rate(step: Step) -> float:
    """The job's, or that of a step without one."""
    return step.job.learning_rate if step.job else LEARNING_RATE


class Shadow:
    """torch's AdamW on copies of the trained parameters. It is given each trial's own gradients, and says how far the
    arm's update is from the one that follows from them."""

    def __init__(
        self, start: Mapping[str, Tensor], first: Mapping[str, Tensor | None], params: Mapping[str, Tensor],
        rate: float, device: torch.device,
    ) -> None:  # fmt: skip
        """`start`: parameters before the first trial; `first`: its gradients; `params`: the arm's, as they are now;
        `device`: where the copies are held."""
        self.copies = {n: nn.Parameter(t.to(device, copy=True)) for n, t in start.items()}
        self.optimizer = torch.optim.AdamW(self.copies.values(), lr=rate, foreach=True)
        self._step(first)
        _put(self.copies, params)

    def error(self, gradients: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> tuple[float, str]:
        """(relative error of the worst tensor's update, its name); then goes on from where the arm is."""
        before = [copy.detach().clone() for copy in self.copies.values()]
        self._step(gradients)
        expected = torch._foreach_sub([c.detach() for c in self.copies.values()], before)
        found = torch._foreach_sub([params[n].detach().to(c.device) for n, c in self.copies.items()], before)
        wrong = torch._foreach_norm(torch._foreach_sub(_floats(found), _floats(expected)))
        moved, size = torch._foreach_norm(_floats(expected)), torch._foreach_norm(_floats(before))
        # Of a tensor that hardly moves (weight decay alone) rounding is all that there is to see.
        least = 4 * torch.finfo(torch.float32).eps
        errors = torch.stack(list(wrong)) / (torch.stack(list(moved)) + least * torch.stack(list(size))).clamp_min(
            1e-30
        )
        errors = errors.nan_to_num(nan=float("inf"), posinf=float("inf"))
        worst = int(errors.argmax())
        _put(self.copies, params)
        return float(errors[worst]), list(self.copies)[worst]

    def _step(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, copy in self.copies.items():
            grad = gradients[name]
            copy.grad = None if grad is None else grad.detach().to(copy.device, copy.dtype, copy=True)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _put(params: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """The values into the parameters of their names, in place."""
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])


def apart(one: Glimpse, other: Glimpse) -> float:
    """How far two runs' gradients are apart: the relative error of the middle one of their tensors."""
    lengths = np.linalg.norm(one.sketch, axis=1).clip(1e-30)
    return float(np.median(np.linalg.norm(other.sketch - one.sketch, axis=1) / lengths))


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.float() for t in tensors]


def _to_host(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: p.detach().cpu().clone() for n, p in params.items()}


def sketch(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Of each tensor SKETCH sums over a SKETCH-th of its elements, each with a sign drawn once: float32 (tensors,
    SKETCH). A linear map that keeps lengths and angles in expectation (Charikar, Chen, Farach-Colton 2002)."""
    rows = []
    largest = max(t.numel() for t in tensors.values())
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        signs = _signs(largest, flat.device)
        begin = zlib.crc32(name.encode()) % (signs.numel() - flat.numel() + 1)
        signed = flat * signs[begin : begin + flat.numel()]
        short = -flat.numel() % SKETCH
        rows.append(nn.functional.pad(signed, (0, short)).view(-1, SKETCH).sum(0))
    return torch.stack(rows).cpu().numpy()


_drawn: dict[tuple[torch.device, int], Tensor] = {}


def _signs(largest: int, device: torch.device) -> Tensor:
    """A row of signs, int8, at least twice as long as the largest tensor: each name begins at another place in it. The
    same in every process that has tensors of these sizes."""
    length = 1 << (2 * largest).bit_length()
    if (device, length) not in _drawn:
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8, device=device)
        _drawn[device, length] = drawn.mul_(2).sub_(1)
    return _drawn[device, length]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every nn.Dropout of the model at p = 0."""
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    were = [m.p for m in dropouts]
    for module in dropouts:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in zip(dropouts, were, strict=True):
            module.p = p
