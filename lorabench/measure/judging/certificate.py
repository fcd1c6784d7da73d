"""What was timed, held together: the evidence of a candidate against that of the reference, as a list of checks.

Each check has what was found, what was allowed and where it was worst. What is allowed follows from how far two right
runs of the model are apart at its full depth (`depth_noise.py`), and from nothing else unless a toggle declares a
tolerance. docs/methodology.md has the reasons for the numbers below.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lorabench.contract.ablation import Tolerance
from lorabench.measure.judging import limits
from lorabench.measure.judging.depth_noise import DepthNoise, Distance, distance, nine_tenths, off
from lorabench.measure.judging.witness import SKETCH, Testimony
from lorabench.measure.kind import ROUNDS, TURN
from lorabench.record.schema import Check, share

DIFFER = "differ"


def certify(
    reference: Testimony, candidate: Testimony, dtype: torch.dtype, declared: Sequence[Tolerance] = (),
    of_reference: Sequence[Tolerance] = (), exact: Sequence[Tolerance] = (),
) -> list[Check]:  # fmt: skip
    """The checks of one job, of two processes or of one, causes before what follows from them: a record names the first
    that fails. Evidence that does not exist yet is not looked at. `declared` by the toggles of either arm,
    `of_reference` by the reference's own, `exact` what they declare against the candidate's own yardstick."""
    masked = not (reference.masks_off and candidate.masks_off)
    yardstick = None if masked else candidate.yardstick
    apart = _apart(reference.before, yardstick) if yardstick and reference.before else {}
    limit = partial(_Allowed, reference.noise, dtype=dtype, declared=declared, exact=exact if yardstick else declared)
    allowed = limit(masked)
    checks = [_same_phases(reference, candidate)]
    if reference.before and candidate.before:
        checks += _gradients("before the trials", yardstick or reference.before, candidate.before, allowed)
    checks.append(_check("the loss", off(candidate.loss, reference.loss), allowed.loss))
    if candidate.spread is not None and reference.spread is not None:
        checks.append(_spread(reference.spread, candidate.spread))
    for testimony, name, own in ((reference, "reference", of_reference), (candidate, "candidate", declared)):
        if testimony.update_errors:
            checks.append(_updates(name, testimony, own))
    if reference.losses.keys() & candidate.losses.keys():
        checks += _trials(reference, candidate, limit(reference.dropout, apart=apart))
    if reference.after and candidate.after and reference.last_loss is not None and candidate.last_loss is not None:
        checks += _gradients("after the trials", reference.after, candidate.after, limit(masked, apart=apart))
        last = off(candidate.last_loss, reference.last_loss)
        checks.append(_check("the loss after the trials", last, allowed.loss))
    return checks


def _apart(reference: Path, yardstick: Path) -> dict[str, float]:
    """What each right gradient may be off by from the reference's on other tokens, where the arms hold other weights:
    it is about as far from it as the yardstick's is here."""
    distances = {n: d.error for n, d in _distances(reference, yardstick).items()}
    typical = statistics.median(distances.values())
    return {n: limits.APART * max(error, typical) for n, error in distances.items()}


class _Allowed:
    """What two arms may differ by; `masked`: where they draw dropout masks of their own; `exact`: what is declared of
    gradients, where that is not `declared`; `apart`: what each tensor may be off by besides, see `_apart`."""

    def __init__(
        self, noise: DepthNoise | None, masked: bool, dtype: torch.dtype, declared: Sequence[Tolerance],
        exact: Sequence[Tolerance] | None = None, apart: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.masked, self.apart = dtype, masked, apart or {}
        self.declared = declared if exact is None else exact
        known = (noise.masks if masked and noise.masks else noise) if noise else None
        self.noise = known.tensors if known else {}
        self.turned = known.scale if known else limits.UNKNOWN[dtype] / 10
        errors = [error for error, _ in self.noise.values()]
        self.middle = statistics.median(errors) if errors else 0.0
        self.typical_scale = nine_tenths(scale for _, scale in self.noise.values())
        own = known.loss if known else 0.0
        self.loss = max(
            [limits.LOSS[dtype], (limits.LOSS_MASKED if masked else limits.MULTIPLE) * own, *(t.loss for t in declared)]
        )
        self.most = limits.MOST_NOISY if masked else limits.MOST

    def error(self, name: str) -> float:
        """Relative error of a tensor."""
        if not self.noise:
            limit = limits.UNKNOWN[self.dtype]
            return min(self.most, max([limit, *(t.grad for t in self.declared)]))
        own = max(self.noise.get(name, (0.0, 0.0))[0], self.middle)
        limit = max(limits.MULTIPLE * own, limits.GRADIENT[self.dtype])
        tolerated = min(self.most, limits.tolerated(limit, own, self.dtype, self.declared))
        return max(tolerated, min(limits.MOST_NOISY, limit))

    def turned_round(self, name: str) -> float:
        """What a tensor of a single trial may be off by that dropout alone turns round, as it does the 8B's k_proj: a
        multiple of what two right runs are. 0 of all others."""
        own = limits.MULTIPLE * self.noise.get(name, (0.0, 0.0))[0]
        return own if self.masked and own > 1.5 * self.most else 0.0

    def scale(self, name: str, error: float) -> float:
        """|projection - 1| of a tensor that was found to be off by `error`."""
        own = max(self.noise.get(name, (0.0, 0.0))[1], self.typical_scale)
        if not self.noise:
            own = limits.UNKNOWN[self.dtype] / 10
        most = limits.MOST_SCALE if not self.masked else limits.MOST_NOISY
        tolerated = min(most, limits.scaled(limits.MULTIPLE * own, error, self.declared))
        return max(tolerated, min(limits.MOST_SCALE_NOISY, limits.MULTIPLE * own))

    def typical(self, errors: Sequence[float]) -> float:
        """|projection - 1| of the middle one of all tensors, which are off by these `errors`."""
        own = max(limits.MULTIPLE * self.turned, limits.TYPICAL * self.typical_scale)
        return min(limits.MOST_SCALE, limits.scaled(own, statistics.median(errors), self.declared))


def _check(name: str, found: float, allowed: float, where: str = "") -> Check:
    return Check(name=name, found=found if found == found else float("inf"), allowed=allowed, where=where)


def _same_phases(reference: Testimony, candidate: Testimony) -> Check:
    missing = [p for p in reference.phases if p not in candidate.phases]
    added = [p for p in candidate.phases if p not in reference.phases]
    return _check("phases that only one arm has", len(missing) + len(added), 0, ", ".join([*missing, *added]))


def _worst(name: str, found: Mapping[str, tuple[float, float]]) -> Check:
    """Of (found, allowed) by place, the one nearest to its limit."""
    where = max(found, key=lambda n: share(*found[n]))
    return _check(name, *found[where], where)


def _gradients(when: str, reference: Path, candidate: Path, allowed: _Allowed) -> Iterator[Check]:
    errors: dict[str, tuple[float, float]] = {}
    scales: dict[str, tuple[float, float]] = {}
    signed: list[float] = []  # what is too small to show in one tensor may be alike in all of them
    odd = sorted({*_names(reference)} ^ {*_names(candidate)})
    if odd:
        yield _check(f"gradients that only one arm has {when}", len(odd), 0, odd[0])
        return
    for name, (error, scale) in _distances(reference, candidate).items():
        apart = allowed.apart.get(name, 0.0)
        errors[name] = error, allowed.error(name) + apart
        scales[name] = abs(scale), allowed.scale(name, error) + apart
        signed.append(scale)
    yield _worst(f"each gradient {when}", errors)
    yield _worst(f"the scale of each gradient {when}", scales)
    typical = abs(statistics.median(signed))
    most = allowed.typical([e for e, _ in errors.values()]) + statistics.median([*allowed.apart.values(), 0.0])
    yield _check(f"the typical gradient's scale {when}", typical, most)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as stored:
        return list(stored.keys())


@lru_cache(maxsize=4)  # an arm is held against the reference before its trials and after them
def _distances(reference: Path, candidate: Path) -> dict[str, Distance]:
    """Of each tensor of the candidate's file the distance from the one of its name in the reference's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of small tensors: several threads wait for cores on which arms compute
    try:
        with safe_open(reference, framework="pt") as first, safe_open(candidate, framework="pt") as second:
            return {n: distance(second.get_tensor(n), first.get_tensor(n)) for n in _names(reference)}
    finally:
        torch.set_num_threads(threads)


def _trials(reference: Testimony, candidate: Testimony, allowed: _Allowed) -> Iterator[Check]:
    """Of the timed trials that both arms took: of equal numbers they saw the same tokens, from the same parameters
    but for what the trials before it in its turn did to those."""
    low = reference.low_precision or candidate.low_precision
    losses, gradients, scales = {}, {}, {}
    rows = [candidate.names.index(name) for name in reference.names if name in candidate.names]
    if odd := sorted({*reference.names} ^ {*candidate.names}):
        yield _check("gradients that only one arm has in the trials", len(odd), 0, odd[0])
        return
    for n in sorted(reference.sketches.keys() & candidate.sketches.keys()):
        behind = limits.BEHIND * (n % TURN) if low else 0.0
        for name, error, scale in zip(
            reference.names, *_of_sketches(reference.sketches[n], candidate.sketches[n][rows]), strict=True
        ):
            limit = allowed.error(name)
            drift = limits.STEP * (limit**0.5 + behind) if n % TURN else 0.0  # which may lie along the gradient, too
            apart = allowed.apart.get(name, 0.0) * (1 + 4 / SKETCH**0.5)
            turned = allowed.turned_round(name)
            most = min(allowed.most * 1.5, (limit + drift) * (1 + 4 / SKETCH**0.5)) + apart
            gradients[f"{name}, {_trial(n)}"] = error, max(most, turned)
            most = min(limits.MOST_NOISY, allowed.scale(name, error) + drift + 5 * error / SKETCH**0.5) + apart
            scales[f"{name}, {_trial(n)}"] = scale, max(most, turned)
    if gradients:
        yield _worst("each gradient of each trial", gradients)
        yield _worst("the scale of each gradient of each trial", scales)
    for n in sorted(reference.losses.keys() & candidate.losses.keys()):
        drift = limits.STEP_LOSS * limits.BEHIND * (n % TURN) if low else 0.0
        losses[_trial(n)] = off(candidate.losses[n], reference.losses[n]), allowed.loss + drift
    yield _worst("the loss of each trial", losses)


def _trial(number: int) -> str:
    return f"round {number // TURN % ROUNDS}, trial {number % TURN + 1}"


def _of_sketches(reference: np.ndarray, candidate: np.ndarray) -> tuple[list[float], list[float]]:
    """(relative error, |projection - 1|) of each of two arms' tensors, estimated from their sketches; infinite where
    one of them is not finite, or the reference's alone is zero."""
    mine, theirs = reference.astype(np.float64), candidate.astype(np.float64)
    with np.errstate(all="ignore"):
        squares = (mine * mine).sum(1)
        errors = np.linalg.norm(theirs - mine, axis=1) / squares**0.5
        scales = np.abs((mine * theirs).sum(1) / squares - 1)
    none = ~mine.any(1) & ~theirs.any(1)
    errors, scales = (np.where(none, 0.0, np.where(np.isfinite(x), x, np.inf)) for x in (errors, scales))
    return errors.tolist(), scales.tolist()


def _updates(arm: str, testimony: Testimony, declared: Sequence[Tolerance]) -> Check:
    limit = max([limits.UPDATE[testimony.low_precision], *(t.update for t in declared)])
    found = {f"{name}, {_trial(n)}": (error, limit) for n, (error, name) in testimony.update_errors.items()}
    return _worst(f"the {arm}'s update against AdamW on its own gradients", found)


def _spread(reference: float, candidate: float) -> Check:
    """How far dropout moves the gradients of two runs: an arm that leaves it out does not move at all. `where` says in
    words what no ratio does."""
    ratio = candidate / max(reference, 1e-30)
    low, high = limits.SPREAD
    off = max(low / max(ratio, 1e-30), ratio / high)
    moves = _moves(candidate), _moves(reference)
    words = f"with dropout on, two runs of the candidate {moves[0]} and two of the reference {moves[1]}"
    name = "how far dropout moves the gradients, against the reference"
    return _check(name, off, 1.0, words if off > 1 and moves != (DIFFER, DIFFER) else "")


def _moves(spread: float) -> str:
    """What two runs do that are so far apart."""
    if spread > limits.NO_SPREAD:
        return "have gradients in the second alone"
    return DIFFER if spread > 1 / limits.NO_SPREAD else "do not differ"
