"""Two variants of a user's own training step against each other, in this process: `lorabench.measure`.

The trials, their warm-up, the memory and the gate are those of a sweep; here a user's functions are checked and put
into the shape of arms (user_step.py), and what was measured into one result.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Tolerance
from lorabench.contract.arm import Arm
from lorabench.contract.step import Step
from lorabench.measure import memory, trial, user_gate
from lorabench.measure.user_step import Phases, Variant, WholeArm, arm_of, loss_of, model_of
from lorabench.record.contrast import MIN_TRIALS, Contrast, contrast
from lorabench.record.schema import TOTAL, ArmMemory, Numerics
from lorabench.record.words import number, ratio

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """What a pair came to. Times are milliseconds by phase, in the order of the rounds; `total` is the sum of the
    phases. `phases` has the same keys. `losses` and `memory` (bytes) are by arm. `numerics` is None without a gold."""

    phases: dict[str, Contrast]
    reference_ms: Times
    candidate_ms: Times
    losses: dict[str, list[float]]
    memory: dict[str, ArmMemory]
    numerics: Numerics | None

    @property
    def speedup(self) -> Contrast:
        """Reference / candidate of the whole step."""
        return self.phases[TOTAL]

    def __str__(self) -> str:
        """One line: the ratio with its 95 % interval, the medians it is of, each phase, and what the gate found."""
        centre, low, high = self.speedup.speedup
        before, after = (statistics.median(ms[TOTAL]) for ms in (self.reference_ms, self.candidate_ms))
        parts = [f"{phase} {ratio(found.centre)}" for phase, found in self.phases.items() if phase != TOTAL]
        return "; ".join(
            [
                f"speed-up {ratio(centre, low, high)} (95 %, {len(self.losses['candidate'])} paired trials)",
                f"{number(before)} → {number(after)} ms",
                *([", ".join(parts)] if parts else []),
                "numerics not checked (no gold)" if self.numerics is None else _checked(self.numerics),
            ]
        )


def _checked(numerics: Numerics) -> str:
    error, allowed = numerics.grad_error or 0.0, numerics.grad_allowed or 0.0
    return f"numerics passed (worst gradient off by {number(error)}, allowed {number(allowed)})"


def measure(
    *,
    reference: Variant,
    candidate: Variant,
    gold: Variant | None = None,
    trials: int = 30,
    warmup: int = 5,
    device: torch.device | str | None = None,
    seed: int = 0,
    tolerance: Tolerance | None = None,
) -> Measured:
    """Time two variants of a training step in pairs: in each of `trials` rounds both run once, in random order.

    A variant is a function that does one whole step and returns its loss, or `Phases`, or the contract's `Step`, of
    which forward, backward and update are timed apart. Both train on as they are measured: hand in copies. On a GPU the
    times are between events on the current stream.

    gold: the same step in float32 on the same weights and batch. Then every trained tensor's gradient, the loss and the
    first update are compared before anything is timed, with the limits of a sweep's gate; what the reference is off by
    is what the candidate may be off by a small multiple of. `tolerance` declares more, for a candidate that changes the
    mathematics on purpose. Dropout is compared under shared masks.

    warmup: trials of each arm before the first that counts; up to four times as many while they still get faster.
    device: where the work runs; None: where the models are, else a GPU if there is one. seed: of the rounds' order.

    Raises ValueError in one line for what cannot be measured, WrongNumerics where the gate does not pass, and whatever
    the user's functions raise.
    """
    pair = {"reference": reference, "candidate": candidate}
    variants = {**pair, **({} if gold is None else {"gold": gold})}
    _check(variants, trials, warmup)
    where = _device(variants, device)
    with torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext():
        arms = {name: arm_of(name, variant, where) for name, variant in variants.items()}
        golden = arms.pop("gold", None)
        verdict = user_gate.judge(golden, arms["reference"], arms["candidate"], tolerance) if golden else None
        _first_steps(arms)
        for arm in arms.values():
            trial.warm_up(arm, warmup)
        held = {name: _memory(arm) for name, arm in arms.items()}
        done = _rounds(arms, trials, seed)
    return _measured(done, held, verdict)


def _check(variants: Mapping[str, Any], trials: int, warmup: int) -> None:
    for name, variant in variants.items():
        if isinstance(variant, nn.Module):
            raise ValueError(f"{name}= is a model; expected a function that does one step of it, or lorabench.Phases")
        if not isinstance(variant, (Phases, Step)) and not callable(variant):
            expected = "a function that does one step and returns its loss, or lorabench.Phases"
            raise ValueError(f"{name}= is {type(variant).__name__}; expected {expected}")
    if len({isinstance(v, (Phases, Step)) for v in variants.values()}) > 1:
        raise ValueError("one variant is a whole step and another Phases: give all in one form, to time the same")
    for name, value, least in (("trials", trials, MIN_TRIALS), ("warmup", warmup, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")


def _device(variants: Mapping[str, Any], asked: torch.device | str | None) -> torch.device:
    """The one device of all variants. Raises ValueError where there is no such."""
    found = {name: _device_of(name, model) for name, v in variants.items() if (model := model_of(v)) is not None}
    found = {name: device for name, device in found.items() if device is not None}
    if asked is not None:
        found = {"device=": _full(asked), **found}
    if len(set(found.values())) > 1:
        names = ", ".join(f"{name.removesuffix('=')} {device}" for name, device in found.items())
        raise ValueError(f"all variants have to be on one device: {names}")
    device = next(iter(found.values()), None) or _full("cuda" if torch.cuda.is_available() else "cpu")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device}: times can be taken on cuda and on cpu")
    return device


def _full(asked: torch.device | str) -> torch.device:
    """A device with its number. Raises ValueError where it is none, or there is no such GPU here."""
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {asked!r}: {str(error).splitlines()[0]}") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {asked}: torch sees {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _device_of(name: str, model: nn.Module) -> torch.device | None:
    """Where a model computes: its GPU, if only part of it lies there; None without parameters."""
    found = {p.device for p in model.parameters()}
    others = sorted((d for d in found if d.type != "cpu"), key=str)
    if len(others) > 1:
        raise ValueError(f"the {name}'s model lies on {', '.join(map(str, others))}; expected one device")
    return others[0] if others else next(iter(found), None)


def _first_steps(arms: Mapping[str, Arm]) -> None:
    """One step of each arm, to see that it returns a loss, finite, on the same device as the other's."""
    devices: dict[str, torch.device] = {}
    for name, arm in arms.items():
        if isinstance(arm, WholeArm):
            out = arm.call()
            loss = loss_of(out, name)
            if isinstance(out, Tensor):
                devices[name] = out.device
        else:
            loss = trial.run_trial(arm).loss
        if not math.isfinite(loss):
            raise ValueError(f"the {name}'s loss is {loss}")
    if len(set(devices.values())) > 1:
        raise ValueError("the losses are on different devices: " + ", ".join(f"{n} {d}" for n, d in devices.items()))


def _memory(arm: Arm) -> ArmMemory:
    """What one more trial takes at most, above what the arm's model holds, where that is known. What was reserved while
    it was built nobody knows: the user built it."""
    held = sum(arm.kind.held(arm).values())
    found = memory.measure(arm, held, 0)
    return found.model_copy(update={"static": held or None, "reserved": None})


def _rounds(arms: Mapping[str, Arm], trials: int, seed: int) -> dict[str, list[trial.Trial]]:
    try:
        trial.run_rounds(arms, 1, seed)  # both once more, now that both are warm
        return trial.run_rounds(arms, trials, seed + 1)
    except trial.Diverged as error:
        raise ValueError(str(error)) from None


def _measured(
    done: Mapping[str, Sequence[trial.Trial]], held: dict[str, ArmMemory], verdict: Numerics | None
) -> Measured:
    times = {name: _times(trials) for name, trials in done.items()}
    before, after = times["reference"], times["candidate"]
    return Measured(
        {phase: _contrast(before[phase], after[phase]) for phase in before if phase in after},
        before, after, {name: [t.loss for t in trials] for name, trials in done.items()}, held, verdict,
    )  # fmt: skip


def _times(trials: Sequence[trial.Trial]) -> Times:
    """Milliseconds of each phase, and of their sum."""
    phases = {phase: [t.device_ms[phase] for t in trials] for phase in trials[0].device_ms}
    return {**phases, TOTAL: [t.total_ms for t in trials]}


def _contrast(reference_ms: Sequence[float], candidate_ms: Sequence[float]) -> Contrast:
    found = contrast(reference_ms, candidate_ms, paired=True)
    assert found is not None  # `_check` saw to the number of trials
    return found
