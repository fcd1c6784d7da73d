"""The numerics gate for a user's own training step: the candidate against the user's float32 gold, on the full models.

What decides is numerics.judge, as in a sweep; the reference stands where a sweep has plain PEFT in the compute dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Tolerance
from lorabench.contract.arm import Arm
from lorabench.contract.step import Step, Wrapped
from lorabench.measure.judging import numerics
from lorabench.measure.judging.numerics import Outcome, SharedMask, moved_off
from lorabench.record.schema import Numerics

# A reference that is off by this share of the whole gradient is no measure of anything: without a gradient it is 1.
REFERENCE_MOST = 0.5


class WrongNumerics(Exception):
    """The candidate does not compute what the gold computes, so it has no speed. `numerics` is the gate's verdict."""

    def __init__(self, message: str, numerics: Numerics) -> None:
        super().__init__(message)
        self.numerics = numerics


class _WithoutUpdate(Wrapped):
    """Forward and backward alone: the update is compared apart, with the gold's own optimizer."""

    def __init__(self, inner: Step) -> None:
        super().__init__(inner)
        self.updates = False


def judge(gold: Arm, reference: Arm, candidate: Arm, tolerance: Tolerance | None) -> Numerics:
    """The verdict on the candidate, from one step of all three, which must hold the same weights: the gradient of every
    trained tensor, the loss, and the first update are compared.

    Raises WrongNumerics where it does not pass, or where the reference has nothing of the gold; ValueError where the
    three cannot be compared.
    """
    arms = (gold, reference, candidate)
    for arm in arms:
        _check(arm, gold)
    golden, own, got = (_outcome(arm) for arm in arms)
    if gold.step.updates:
        if set(golden.gradients) == set(got.gradients):
            got = replace(got, update_error=_update_error(gold, candidate, got.gradients))
        reference.step.update()  # it has as many behind it as the candidate when the trials begin
    dtype, declared = reference.dtype, [tolerance] if tolerance else []
    _check_reference(golden, own, numerics.judge(golden, own, own, dtype, []))
    verdict = numerics.judge(golden, own, got, dtype, declared)
    if not verdict.passed:
        raise WrongNumerics(f"the candidate: {explain(verdict)}", verdict)
    return verdict


def explain(verdict: Numerics) -> str:
    """Why a verdict did not pass; what a sweep calls float32 PEFT and plain PEFT are the user's gold and reference."""
    words = numerics.explain(verdict).replace("float32 PEFT", "the gold").replace("plain PEFT", "the reference")
    return words.replace("from AdamW's", "from the gold's")


def _check(arm: Arm, gold: Arm) -> None:
    """Raises ValueError where an arm cannot be compared with the gold."""
    if not arm.steps or not any(True for _ in arm.adapters()):
        raise ValueError(
            f"the {arm.name} names no model with trained parameters; with gold= all three are "
            "lorabench.Phases(model=…), whose gradients can be compared"
        )
    if arm.step.updates != gold.step.updates:
        which = (arm, gold) if arm.step.updates else (gold, arm)
        raise ValueError(f"the {which[0].name} updates its parameters and the {which[1].name} does not")
    if arm is gold and (coarse := {p.dtype for p in arm.model.parameters()} & {torch.float16, torch.bfloat16}):
        held = str(coarse.pop()).removeprefix("torch.")
        raise ValueError(f"the gold's model holds {held}; both are compared with it, so it has to be in float32")
    loose = next((n for n, m in arm.model.named_modules() if _dropout_by_hand(m)), None)
    if loose is not None:
        raise ValueError(f"the {arm.name}'s {loose} drops out by masks that cannot be shared; set it to 0 for the gate")


def _dropout_by_hand(module: nn.Module) -> bool:
    """Dropout of torch that SharedMask does not stand in for: whole channels, alpha dropout."""
    kinds = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return isinstance(module, kinds) and module.training and module.p > 0


def _outcome(arm: Arm) -> Outcome:
    """Loss and gradients of one forward and backward, under dropout masks that all three arms share."""
    with _shared_masks(arm.model):
        found = numerics.one_step(arm, _WithoutUpdate(arm.step))
    if arm.name != "candidate" and not math.isfinite(found.loss):
        raise ValueError(f"the {arm.name}'s loss is {found.loss}")
    return found


@contextlib.contextmanager
def _shared_masks(model: nn.Module) -> Iterator[None]:
    """Put SharedMask in place of every active nn.Dropout, by its name in the model, and take it out again."""
    places = [
        (module, name, child, f"{path}.{name}")
        for path, module in model.named_modules()
        for name, child in module.named_children()
        if type(child) is nn.Dropout and child.p > 0 and child.training
    ]
    for module, name, child, path in places:
        module.register_module(name, SharedMask(path, child.p))
    try:
        yield
    finally:
        for module, name, child, _ in places:
            module.register_module(name, child)


def _update_error(gold: Arm, candidate: Arm, gradients: dict[str, Tensor]) -> float:
    """Relative error of the candidate's first update against the gold's own on the candidate's gradients (float32, by
    name), rounded to how the candidate holds its parameters. The gold's own gradients are lost."""
    before = {n: p.detach().clone() for n, p in candidate.adapters()}
    start = {n: p.detach().clone() for n, p in gold.adapters()}
    without = {n for n, p in candidate.adapters() if p.grad is None}
    for n, p in gold.adapters():
        p.grad = None if n in without else (gradients[n] * gold.step.loss_scale).to(p.dtype)
    candidate.step.update()
    gold.step.update()
    after = dict(gold.adapters())
    wanted = {n: (before[n] + (after[n].detach() - start[n])).to(p.dtype).float() for n, p in candidate.adapters()}
    return moved_off(
        (p.detach().float() - before[n].float(), wanted[n] - before[n].float()) for n, p in candidate.adapters()
    )


def _check_reference(gold: Outcome, own: Outcome, verdict: Numerics) -> None:
    """Raises WrongNumerics where the reference is nowhere near the gold: its error measures what is allowed."""
    if not verdict.passed:  # only where it trains other tensors: its own error is always allowed
        raise WrongNumerics(f"the reference: {explain(verdict)}", verdict)
    squares = [((own.gradients[n] - g).square().sum(), g.square().sum()) for n, g in gold.gradients.items()]
    wrong, norm = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
    off = wrong / max(norm, 1e-30)
    if not off <= REFERENCE_MOST:  # so written, a NaN does not pass
        words = "do all three hold the same weights and see the same batch?"
        raise WrongNumerics(f"the reference's gradient is off by {off:.2g} from the gold's; {words}", verdict)
