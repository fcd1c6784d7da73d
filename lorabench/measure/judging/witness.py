"""What an arm did, kept as evidence: gradients in full before the first and after the last trial, of every timed trial
its loss and whether its update was AdamW's, and of those that the runner picks a sketch of the gradients.

A witness stands beside one step (one job) of one process and is asked between trials, never inside one. What it says
crosses process boundaries as numbers and as safetensors files. The runner assembles it, trial by trial, to a Testimony;
`certificate.py` holds those of two arms together.
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lorabench.contract.arm import Arm
from lorabench.contract.parts import follow, gradients
from lorabench.contract.ranks import local, whole
from lorabench.contract.step import Step
from lorabench.contract.workload import LEARNING_RATE
from lorabench.measure.judging.copies import copies, packs

SKETCH = 64  # numbers kept of each tensor and trial: a linear sketch, whose distances are right to 1 / sqrt(64)
BLOCK = 64 * SKETCH  # elements that are summed up on the device; few enough sums are left for the host
# Elements that are summed up together: on a host as many as its caches hold, on a device as many as are small (256 MB)
# beside what an arm holds.
AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 26}


class Observed(NamedTuple):
    """What is told of one job after a timed trial."""

    loss: float
    update_error: tuple[float, str] | None  # of the tensor that is farthest from AdamW's update, and its name


class Last(NamedTuple):
    """What is told of one job after the trial that follows the timed ones."""

    loss: float
    after: Path


@dataclass
class Testimony:
    """The evidence of one job in one process. Files hold float32 tensors by their names; what is by number is of the
    timed trial that was fed by it."""

    names: list[str] = field(default_factory=list)  # of what is compared, in the order of a sketch's rows
    updates: bool = True
    loss: float = 0.0  # of the first trial
    before: Path | None = None  # gradients of the first trial
    after: Path | None = None  # gradients after the last trial, from where the first one started
    yardstick: Path | None = None  # those of plain PEFT over the arm's own weights, where they are not the reference's
    last_loss: float | None = None
    low_precision: bool = False  # whether the trained parameters are held in fewer than 32 bits
    phases: tuple[str, ...] = ()
    noise: Any = None  # depth_noise.DepthNoise of the model, or None
    dropout: bool = False  # whether dropout was on in the timed trials
    masks_off: bool = True  # whether `before` and `after` are without dropout
    spread: float | None = None  # under dropout: how far two runs of this arm are apart (median over tensors)
    losses: dict[int, float] = field(default_factory=dict)
    update_errors: dict[int, tuple[float, str]] = field(default_factory=dict)
    sketches: dict[int, np.ndarray] = field(default_factory=dict)  # (names, SKETCH) float32

    def add(self, number: int, observed: Observed) -> None:
        self.losses[number] = float(observed.loss)
        if observed.update_error is not None:
            self.update_errors[number] = observed.update_error

    def add_sketch(self, number: int, look: Look) -> None:
        """Raises ValueError where this is no sketch of what `names` has."""
        sketch, update_error = look
        if update_error is not None:
            self.update_errors[number] = update_error
        if sketch.shape != (len(self.names), SKETCH):
            raise ValueError(f"a sketch of shape {sketch.shape}, expected {(len(self.names), SKETCH)}")
        self.sketches[number] = sketch

    def finish(self, last: Last) -> None:
        self.last_loss, self.after = last


class Look(NamedTuple):
    """What there is to see of a trial that was picked: the sketch of its gradients, and how far the worst tensor's
    update is from AdamW's with its name, where no trial says that of itself."""

    sketch: np.ndarray
    update_error: tuple[float, str] | None


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
        self.params = dict(arm.adapters(step))  # a pipeline cuts its model later: the order is that of before
        self.start = dict(zip(self.params, copies([local(p) for p in self.params.values()], "cpu"), strict=True))
        self.ordered = sorted(self.params)
        self.testimony = Testimony(
            updates=step.updates, low_precision=any(p.element_size() < 4 for p in self.params.values())
        )
        self.kept: Kept | None = None
        self.state: KeptState | None = None
        self.shadow: Shadow | None = None

    def gradients(self, outs: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the last trial left of gradients, in float32 and without the loss scale, zeros where nothing was left;
        and what else the step compares of its outputs."""
        found = {
            n: whole(torch.zeros_like(p) if grad is None else grad.detach()).float() / self._scale
            for (n, p), grad in zip(self.params.items(), self._gradients(), strict=True)
        }
        return found | self._compared(outs)

    def gradient_sketch(self, outs: Sequence[Tensor]) -> np.ndarray:
        """The sketch of `gradients`."""
        found = {n: whole(grad) for n, grad in zip(self.params, self._gradients(), strict=True)}
        rows = sketch(found | self._compared(outs))
        rows[: len(self.params)] /= self._scale
        return rows

    @property
    def _scale(self) -> float:
        return 1.0 if self.step.updates else self.step.loss_scale  # an update has divided it out

    def _compared(self, outs: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: x for out in outs for name, x in self.step.innermost.compared(out).items()}

    def first_trial(self, loss: float, outs: Sequence[Tensor]) -> None:
        """After the first trial: keep its gradients, and the optimizer's state. It stays on the host until the first
        `begin_turn`, so that it is not in the arm's memory while that is measured."""
        found = self.gradients(outs)
        self.testimony.loss, self.testimony.names = loss, list(found)
        self.testimony.before = self._save("before", found)
        own = self._local_gradients()
        there = iter(copies([g for g in own if g is not None], "cpu"))
        self.first_gradients = [None if g is None else next(there) for g in own]
        self.state = KeptState(self.step.optimizer) if self.step.updates else None

    def at_start(self) -> None:
        """Back to the parameters of before the first trial."""
        Kept(params := [local(p.data) for p in self.params.values()], [*self.start.values()]).into(params)
        follow(self.step.innermost.parts)

    def glimpse(self, loss: float, outs: Sequence[Tensor], keep: bool) -> Glimpse:
        """What the last trial's gradients were; `keep`: in full, too."""
        return Glimpse(loss, self.gradient_sketch(outs), self._save("before", self.gradients(outs)) if keep else None)

    def under_dropout(self, off: tuple[Glimpse, Glimpse], on: tuple[Glimpse, Glimpse]) -> None:
        """Two runs each with dropout off and on. An arm whose gradients then differ between two seeds although dropout
        is off draws masks that cannot be turned off (in a captured graph): it is compared under its own."""
        self.testimony.dropout = True
        self.testimony.spread = apart(*on)
        self.testimony.masks_off = apart(*off) <= self.testimony.spread / 10
        if self.testimony.masks_off:
            self.testimony.loss, self.testimony.before = off[0].loss, off[0].file

    @torch.no_grad()
    def begin_turn(self, number: int, each: bool = True) -> None:
        """To where trial `number` starts in every arm: the parameters as they were before the first trial, about half
        of the tensors halved, which is exact in every number format; the optimizer as the first trial left it. The
        number draws which ones are halved: who keeps what follows from the parameters has kept that of others.
        `each`: the updates of all trials are looked at; else that of the picked one, the first."""
        own = {name: local(param.data) for name, param in self.params.items()}
        params = list(own.values())
        self.each = each
        if self.kept is None:
            self.kept = Kept(params, list(self.start.values()))
            self.shadow = self._shadow() if self.state else None
        self.kept.into(params)
        halved = self._drawn(number)
        if some := [own[name] for name, half in zip(self.ordered, halved, strict=True) if half]:
            torch._foreach_mul_(some, 0.5)
        follow(self.step.innermost.parts)
        if self.state and self.shadow:
            self.state.put_back()
            if each:
                self.shadow.begin(params)
            self.halved = halved

    def _drawn(self, number: int) -> list[int]:
        """Of each ordered parameter whether it is halved, drawn among all that is compared: of those, this rank may
        hold a part."""
        every = sorted({*self.testimony.names, *self.params})
        drawn = dict(zip(every, np.random.default_rng(number).integers(0, 2, len(every)).tolist(), strict=True))
        return [drawn[name] for name in self.ordered]

    def _shadow(self) -> Shadow:
        rate = learning_rate(self.step)
        try:
            return Shadow(self.start, self.first_gradients, rate, self.arm.device)
        except torch.OutOfMemoryError:  # the arm fits, and has to be measured: its shadow goes to the host
            return Shadow(self.start, self.first_gradients, rate, torch.device("cpu"))

    def observe(self, loss: float) -> Observed:
        """After a timed trial."""
        return Observed(loss, self.shadow.error(*self._local()) if self.shadow and self.each else None)

    @torch.no_grad()
    def look(self, outs: Sequence[Tensor]) -> Look:
        """At the last trial, which did not know that it would be looked at: where it began follows from its number."""
        found = self.gradient_sketch(outs)
        if self.each or not self.shadow or not self.kept:
            return Look(found, None)
        params, gradients = self._local()
        began = [torch.empty_like(p) for p in params]
        self.kept.into(began)
        by_name = dict(zip(self.params, began, strict=True))
        if some := [by_name[name] for name, half in zip(self.ordered, self.halved, strict=True) if half]:
            torch._foreach_mul_(some, 0.5)
        self.shadow.begin(began)
        return Look(found, self.shadow.error(params, gradients))

    def _local(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """(parameters, gradients) as far as this rank holds them: AdamW takes every element by itself."""
        return [local(p.data) for p in self.params.values()], self._local_gradients()

    def _local_gradients(self) -> list[Tensor | None]:
        return [local(grad) for grad in self._gradients()]

    def _gradients(self) -> list[Any]:
        return gradients(self.step.innermost.parts, [*self.params.values()])

    def end(self) -> None:
        """After the timed trials: back to the start for one more trial."""
        self.kept = self.shadow = None
        self.at_start()

    def last_trial(self, loss: float, outs: Sequence[Tensor]) -> Last:
        """After that one more trial."""
        return Last(loss, self._save("after", self.gradients(outs)))

    def _save(self, what: str, tensors: Mapping[str, Tensor]) -> Path:
        file = self.folder / f"{what}-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
        there = copies([t.detach().float() for t in tensors.values()], "cpu")
        save_file({n: t.contiguous() for n, t in zip(tensors, there, strict=True)}, file)
        return file


class Kept:
    """Values of tensors, held where those lie (on the host where they do not fit), to be copied back into them in
    place: captured graphs read where they lie. A few kernels copy hundreds of tensors."""

    def __init__(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        members: dict[Any, list[int]] = {}
        for n, tensor in enumerate(tensors):
            alike = (tensor.device, tensor.dtype, type(tensor) in (Tensor, nn.Parameter))
            members.setdefault(alike, []).append(n)
        self.groups = {
            alike: [*zip(own, _beside(alike[0], [values[n] for n in own]), strict=True)]
            for alike, own in members.items()
        }

    @torch.no_grad()
    def into(self, tensors: Sequence[Tensor]) -> None:
        for (*_, plain), members in self.groups.items():
            if plain:
                torch._foreach_copy_([tensors[n] for n, _ in members], [value for _, value in members])
                continue
            for n, value in members:
                tensors[n].copy_(value)


def _beside(device: torch.device, values: Sequence[Tensor]) -> Sequence[Tensor]:
    try:
        return copies(values, device) if device.type != "cpu" else values
    except torch.OutOfMemoryError:
        return values


class KeptState:
    """An optimizer's state as it is now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.numbers: list[tuple[dict[str, Any], str, Any]] = []
        self.tensors: list[tuple[dict[str, Any], str]] = []
        self.kept: Kept | None = None
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.tensors.append((state, key))
                else:
                    self.numbers.append((state, key, value))
        # On the host, until they are first put back.
        self.values = copies([local(state[key].detach()) for state, key in self.tensors], "cpu")

    def put_back(self) -> None:
        tensors = [local(state[key]) for state, key in self.tensors]
        if self.kept is None:
            self.kept, self.values = Kept(tensors, self.values), []
        self.kept.into(tensors)
        for state, key, value in self.numbers:
            state[key] = value


def learning_rate(step: Step) -> float:
    """The job's, or that of a step without one."""
    return step.job.learning_rate if step.job else LEARNING_RATE


class Shadow:
    """torch's AdamW on copies of the trained parameters. It is given each trial's own gradients, and says how far the
    arm's update is from the one that follows from them."""

    def __init__(
        self, start: Mapping[str, Tensor], first: Sequence[Tensor | None], rate: float, device: torch.device
    ) -> None:
        """`start`: parameters before the first trial; `first`: its gradients; `device`: where the copies are held."""
        self.names = list(start)
        self.copies: list[Any] = [nn.Parameter(t) for t in copies([*start.values()], device)]
        self.optimizer = torch.optim.AdamW(self.copies, lr=rate, foreach=True)
        self._step(first)
        self.state = KeptState(self.optimizer)

    @torch.no_grad()
    def begin(self, params: Sequence[Tensor]) -> None:
        """To the state after the first trial, and to these parameters."""
        self.state.put_back()
        torch._foreach_copy_(self.copies, list(params))

    @torch.no_grad()
    def error(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[float, str]:
        """(relative error of the worst tensor's update, its name); then goes on from where the arm is."""
        before = torch._foreach_neg(self.copies)
        self._step(gradients)
        expected = torch._foreach_add(self.copies, before)
        wrong = torch._foreach_sub(
            [p.detach().to(c.device) for p, c in zip(params, self.copies, strict=True)], self.copies
        )
        norms = [torch._foreach_norm([t.float() for t in tensors]) for tensors in (wrong, expected, before)]
        off, moved, size = torch.stack([torch.stack(list(each)) for each in norms]).cpu().double().numpy()
        # Of a tensor that hardly moves (weight decay alone) rounding is all that there is to see.
        errors = off / (moved + 4 * torch.finfo(torch.float32).eps * size).clip(1e-30)
        errors = np.where(np.isfinite(errors), errors, np.inf)
        worst = int(errors.argmax())
        torch._foreach_copy_(self.copies, list(params))
        return float(errors[worst]), self.names[worst]

    def _step(self, gradients: Sequence[Tensor | None]) -> None:
        for copy, grad in zip(self.copies, gradients, strict=True):
            copy.grad = None if grad is None else grad.detach().to(copy.device, copy.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()


def apart(one: Glimpse, other: Glimpse) -> float:
    """How far two runs' gradients are apart: the relative error of the middle one of their tensors."""
    lengths = np.linalg.norm(one.sketch, axis=1).clip(1e-30)
    return float(np.median(np.linalg.norm(other.sketch - one.sketch, axis=1) / lengths))


def sketch(tensors: Mapping[str, Tensor | None]) -> np.ndarray:
    """Of each tensor SKETCH sums over a SKETCH-th of its elements, each with a sign drawn once: float32 (tensors,
    SKETCH), zeros of None. A linear map that keeps lengths and angles in expectation (Charikar, Chen, Farach-Colton
    2002). A tensor's row depends on nothing but the tensor, its name and its size.
    """
    made, names = np.zeros((len(tensors), SKETCH), np.float32), list(tensors)
    flats = {n: t.detach().reshape(-1) for n, t in enumerate(tensors.values()) if t is not None and t.numel()}
    for pack in packs(flats, AT_ONCE):
        starts = np.cumsum([0, *(-(-flats[n].numel() // BLOCK) for n in pack[:-1])])
        made[pack] = np.add.reduceat(_sums([(names[n], flats[n]) for n in pack]), starts, axis=0)
    return made


def _sums(members: Sequence[tuple[str, Tensor]]) -> np.ndarray:
    """Of each BLOCK of elements SKETCH signed sums; each tensor begins a block of its own."""
    nothing = members[0][1].new_zeros(BLOCK)
    flats, signs = [], []
    for name, flat in members:
        short = -flat.numel() % BLOCK
        flats += [flat, nothing[:short]]
        signs += [_signs(name, flat), _drawn[flat.device][:short]]
    signed = torch.cat(flats).float().mul_(torch.cat(signs))
    return signed.view(-1, BLOCK // SKETCH, SKETCH).sum(1).cpu().numpy()


_drawn: dict[torch.device, Tensor] = {}


def _signs(name: str, flat: Tensor) -> Tensor:
    """Those of a tensor, int8: a part of one row of them, which begins where its name says."""
    length = max(BLOCK, 1 << (2 * flat.numel()).bit_length())
    if flat.device not in _drawn or _drawn[flat.device].numel() < length:  # a longer row begins as a shorter one does
        bits = np.unpackbits(np.frombuffer(np.random.default_rng(0).bytes(length // 8), np.uint8))
        _drawn[flat.device] = torch.from_numpy(bits.astype(np.int8) * 2 - 1).to(flat.device)
    begin = zlib.crc32(name.encode()) % (length - flat.numel() + 1)
    return _drawn[flat.device][begin : begin + flat.numel()]


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
