"""Two variants of a user's own training step against each other, in this process: what `lorabench.measure` does.

The rounds, their warm-up, the memory and the gate are those of a sweep; here a user's functions are checked and put
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
from lorabench.contract.family import TWIN
from lorabench.contract.step import Step
from lorabench.measure import memory, trial, user_gate
from lorabench.measure.user_step import Phases, Variant, WholeArm, arm_of, loss_of, model_of
from lorabench.record.contrast import MIN_TRIALS, Contrast, contrast
from lorabench.record.schema import TOTAL, ArmMemory, Numerics
from lorabench.record.stats import Verdict, noise_floor, verdict
from lorabench.record.words import noise, number, ratio

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """What a pair came to. Times are milliseconds by phase, one a round; `total` is the sum of the phases. `phases` has
    the same keys. `again`: the reference held against itself, turn by turn in the same rounds. `losses` of all trials
    and `memory` (bytes) are by arm. `numerics` is None without a gold."""

    phases: dict[str, Contrast]
    again: Contrast
    reference_ms: Times
    candidate_ms: Times
    losses: dict[str, list[float]]
    memory: dict[str, ArmMemory]
    numerics: Numerics | None

    @property
    def speedup(self) -> Contrast:
        """Reference / candidate of the whole step."""
        return self.phases[TOTAL]

    @property
    def noise_floor(self) -> float:
        """How far the reference is from itself, as a share, at least 0.01: what lies within says nothing."""
        return noise_floor(self.again.speedup)

    @property
    def verdict(self) -> Verdict:
        """`faster`, `slower`, `same` or `unclear`, as in a sweep's tables."""
        found = verdict(self.speedup.speedup, self.speedup.p_value(), self.noise_floor, self.rounds)
        assert found
        return found

    @property
    def rounds(self) -> int:
        return len(self.candidate_ms[TOTAL])

    def __str__(self) -> str:
        """One line: the verdict, the ratio with its 95 % interval, how far the reference is from itself, the medians,
        each phase, and what the gate found."""
        centre, low, high = self.speedup.speedup
        before, after = (statistics.median(ms[TOTAL]) for ms in (self.reference_ms, self.candidate_ms))
        parts = [f"{phase} {ratio(found.centre)}" for phase, found in self.phases.items() if phase != TOTAL]
        return "; ".join(
            [
                f"{self.verdict}: speed-up {ratio(centre, low, high)} (95 %, {self.rounds} rounds)",
                f"the reference against itself {noise(self.noise_floor)}",
                f"{number(before)} → {number(after)} ms",
                *([", ".join(parts)] if parts else []),
                "numerics not checked (no gold)" if self.numerics is None else _checked(self.numerics),
            ]
        )


def _checked(numerics: Numerics) -> str:
    error, allowed = numerics.grad_error or 0.0, numerics.grad_allowed or 0.0
    return f"numerics passed (worst gradient off by {number(error)}, allowed {number(allowed)})"


def measured(
    reference: Variant, candidate: Variant, gold: Variant | None, trials: int, warmup: int,
    device: torch.device | str | None, seed: int, tolerance: Tolerance | None,
) -> Measured:  # fmt: skip
    """See `lorabench.measure`."""
    pair = {"reference": reference, "candidate": candidate}
    variants = {**pair, **({} if gold is None else {"gold": gold})}
    _check(variants, trials, warmup)
    where = _device(variants, device)
    with torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext():
        arms = {name: arm_of(name, variant, where) for name, variant in variants.items()}
        golden = arms.pop("gold", None)
        checked = user_gate.judge(golden, arms["reference"], arms["candidate"], tolerance) if golden else None
        _first_steps(arms)
        warm = {name: trial.warm_up(arm, warmup)[-1].total_ms for name, arm in arms.items()}
        held = {name: _memory(arm) for name, arm in arms.items()}
        done = _rounds(arms, trials, seed, trial.trials_a_turn(warm["reference"]))
    times = {name: {**own.ms, TOTAL: [sum(turn) for turn in zip(*own.ms.values(), strict=True)]}
             for name, own in done.items()}  # fmt: skip
    before, after = times["reference"], times["candidate"]
    return Measured(
        {phase: _contrast(before[phase], after[phase]) for phase in before if phase in after},
        _contrast(before[TOTAL], times[TWIN][TOTAL]), before, after, {name: done[name].losses for name in pair}, held,
        checked,
    )  # fmt: skip


def _check(variants: Mapping[str, Any], trials: int, warmup: int) -> None:
    for name, variant in variants.items():
        if isinstance(variant, nn.Module):
            raise ValueError(f"{name}= is a model; expected a function that does one step of it, or lorabench.Phases")
        if not isinstance(variant, (Phases, Step)) and not callable(variant):
            expected = "a function that does one step and returns its loss, or lorabench.Phases"
            raise ValueError(f"{name}= is {type(variant).__name__}; expected {expected}")
    if len({isinstance(v, (Phases, Step)) for v in variants.values()}) > 1:
        raise ValueError("one variant is a whole step and another Phases: give all in one form, to time the same")
    _check_copies(variants)
    for name, value, least in (("trials", trials, MIN_TRIALS), ("warmup", warmup, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")


def _check_copies(variants: Mapping[str, Any]) -> None:
    """Raises ValueError where two variants train the same parameters: the later one would go on from the other's."""
    owner: dict[int, str] = {}
    for name, variant in variants.items():
        model = model_of(variant)
        for parameter in model.parameters() if model else ():
            if parameter.requires_grad and (other := owner.setdefault(id(parameter), name)) != name:
                raise ValueError(f"{other} and {name} train the same model; hand in copies (copy.deepcopy)")


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


def _rounds(arms: Mapping[str, Arm], rounds: int, seed: int, a_turn: int) -> dict[str, trial.ArmRounds]:
    """With the reference again in every round."""
    seated = {**arms, TWIN: arms["reference"]}
    try:
        trial.run_rounds(seated, 1, seed, a_turn)  # all once more, now that all are warm
        return trial.run_rounds(seated, rounds, seed + 1, a_turn)
    except trial.Diverged as error:
        raise ValueError(str(error)) from None


def _contrast(reference_ms: Sequence[float], candidate_ms: Sequence[float]) -> Contrast:
    found = contrast(reference_ms, candidate_ms, paired=True)
    assert found is not None  # `_check` saw to the number of trials
    return found
