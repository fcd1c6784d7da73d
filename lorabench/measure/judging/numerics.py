"""The numerics gate: before anything is timed, loss and every adapter gradient against plain PEFT in float32.

On a shallow model (2 layers, the model's own widths): the gold is plain PEFT in float32, with the weights as the
compute dtype rounded them. What plain PEFT in the compute dtype itself makes of error is the measure: a candidate may
make a small multiple of it. docs/methodology.md has the reasons for the numbers below.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Tolerance
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.ranks import whole
from lorabench.contract.step import Step
from lorabench.measure.judging import limits
from lorabench.measure.judging.depth_noise import RUNS, distance, nine_tenths, off, other_rounding
from lorabench.measure.judging.witness import learning_rate
from lorabench.record.schema import Check, Numerics, share

GATE_LAYERS = 2
GATE_SAMPLES = 8  # of the workload's samples: enough for every path, cheap in float32
GATE_TOKENS = 256  # of each sample, where memory does not allow it whole


@dataclass(frozen=True)
class Outcome:
    """Loss and adapter gradients (float32; of an op also Y and dX) of one step, and the error of its update.

    `scales`, of plain PEFT in the compute dtype: what each projection is off by in the worst of several runs.
    """

    loss: float
    gradients: dict[str, Tensor]
    update_error: float | None
    scales: dict[str, float] = field(default_factory=dict)


class SharedMask(nn.Module):
    """Dropout whose mask depends on the module's name and the shape alone, so that every model draws the same. Drawn
    once a shape: inside a CUDA graph no generator can be seeded."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.seed, self.p = zlib.crc32(name.encode()), p
        self.masks: dict[torch.Size, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.masks:
            generator = torch.Generator(x.device).manual_seed(self.seed)
            self.masks[x.shape] = torch.rand(x.shape, device=x.device, generator=generator) >= self.p
        return x * self.masks[x.shape] / (1 - self.p)


def share_masks(model: nn.Module) -> int:
    """Put SharedMask in place of every active `lora_dropout` of PEFT; returns how many."""
    changed = 0
    for name, module in model.named_modules():
        for adapter, dropout in getattr(module, "lora_dropout", {}).items():
            if isinstance(dropout, nn.Dropout) and dropout.p > 0:
                module.lora_dropout[adapter] = SharedMask(name, dropout.p)  # type: ignore[union-attr]
                changed += 1
    return changed


def shorten(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The first few samples, each cut to so many tokens."""
    return [Sample(s.tokens[:tokens], s.labels[:tokens]) for s in samples[:GATE_SAMPLES]]


def one_step(arm: Arm, step: Step | None = None) -> Outcome:
    """One whole step of a job (None: of the only one) of a shallow model, with the optimizer's update, if it has one,
    checked against plain AdamW on the same gradients. Of several ranks each has its part of the loss, here their
    sum."""
    step = step or arm.step
    loss, gradients = one_pass(arm, step)
    if not step.updates:
        return Outcome(loss, gradients, None)
    before = {n: whole(p.detach()).clone() for n, p in arm.adapters(step)}
    step.update()
    return Outcome(loss, gradients, _update_error(arm, step, before, gradients))


def plain_step(arm: Arm, gold: Outcome, step: Step | None = None) -> Outcome:
    """`one_step` of plain PEFT in the compute dtype. What rounding makes of a projection is luck, and one run may have
    had it: so `scales` are the worst of this run and of RUNS with other rounding."""
    runs, step = [], step or arm.step
    with other_rounding(arm.model):
        for _ in range(RUNS):
            runs.append(_scales(one_pass(arm, step)[1], gold))
    plain = one_step(arm, step)
    runs.append(_scales(plain.gradients, gold))
    return replace(plain, scales={name: max(run[name] for run in runs) for name in gold.gradients})


def _scales(gradients: dict[str, Tensor], gold: Outcome) -> dict[str, float]:
    return {name: abs(distance(gradients[name], wanted).scale) for name, wanted in gold.gradients.items()}


def one_pass(arm: Arm, step: Step, backward: bool = True) -> tuple[float, dict[str, Tensor]]:
    """Forward and backward of a job: the loss, over all ranks, and what is compared, in float32. Without `backward` the
    loss alone is right."""
    clear(arm, step)
    loss, others = 0.0, {}
    for batch in step.batches:
        part = step.forward(batch)
        if backward:
            step.backward(part)
        loss += step.innermost.loss_of(part.detach())
        if backward:
            others |= step.innermost.compared(part)
        del part  # or its graph would be held beside the next one's
    return arm.ranks.total(loss), arm.gradients(step) | others


def clear(arm: Arm, *steps: Step) -> None:
    """These steps begin without gradients. The harness drops them itself, so that no toggle is asked outside the clock.
    A step that keeps its gradients' buffers gets them full of NaN: what its backward does not write shows."""
    for step, params in zip(steps, arm.adapters_of(steps), strict=True):
        for _, param in params:
            if step.keeps_gradients and param.grad is not None:
                param.grad.detach().fill_(float("nan"))
            else:
                param.grad = None
        for part in step.innermost.parts or ():
            part.grad = None
        step.innermost.cleared()


def _update_error(arm: Arm, step: Step, before: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """Relative error of the first update against torch's for-loop AdamW in the parameters' own dtype."""
    plain = {n: nn.Parameter(p.clone()) for n, p in before.items()}
    for n, p in plain.items():
        p.grad = gradients[n].to(p.dtype)
    torch.optim.AdamW(plain.values(), lr=learning_rate(step), foreach=False, fused=False).step()
    return moved_off(
        (whole(p.detach()).float() - before[n].float(), plain[n].detach().float() - before[n].float())
        for n, p in arm.adapters(step)
    )


def moved_off(updates: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Relative error of an update over all of its tensors, each (what it moved by, what it was to move by)."""
    wrong = moved = 0.0
    for found, expected in updates:
        wrong += float((found - expected).square().sum())
        moved += float(expected.square().sum())
    return (wrong / max(moved, 1e-30)) ** 0.5


def judge(gold: Outcome, low: Outcome, got: Outcome, dtype: torch.dtype, declared: Sequence[Tolerance]) -> Numerics:
    """The verdict on one shallow model, given the gold's and plain PEFT's outcome, and what its toggles declared."""
    extra_loss = max((t.loss for t in declared), default=0.0)
    extra_update = max((t.update for t in declared), default=0.0)
    if set(gold.gradients) != set(got.gradients):
        return _mismatch(gold, got)
    plain = {n: distance(g, gold.gradients[n]) for n, g in low.gradients.items()}
    found = {n: distance(g, gold.gradients[n]) for n, g in got.gradients.items()}
    typical = statistics.median(d.error for d in plain.values())
    errors = {n: (d.error, _limit(max(plain[n].error, typical), dtype, declared)) for n, d in found.items()}
    own = {n: max(abs(d.scale), low.scales.get(n, 0.0)) for n, d in plain.items()}
    common = nine_tenths(own.values())
    own = {n: limits.SCALE_MULTIPLE * max(scale, common) for n, scale in own.items()}
    scales = {n: (abs(d.scale), limits.scaled(own[n], d.error, declared)) for n, d in found.items()}
    worst, turned = (max(pairs, key=lambda n: share(*pairs[n])) for pairs in (errors, scales))
    (error, allowed), (scale_error, scale_allowed) = errors[worst], scales[turned]
    loss_error = off(got.loss, gold.loss)
    loss_allowed = max(limits.MULTIPLE * off(low.loss, gold.loss), limits.FLOOR[dtype] / 2, extra_loss)
    update_error = got.update_error
    update_right = update_error is None or update_error <= max(limits.FIRST_UPDATE[dtype], extra_update)
    plain_worst = max(plain, key=lambda n: plain[n].error)
    plain_error = plain[plain_worst].error
    return Numerics(
        passed=error <= allowed and scale_error <= scale_allowed and loss_error <= loss_allowed and update_right,
        scale_error=scale_error, scale_allowed=scale_allowed, scale_worst=turned,
        loss_error=loss_error, loss_allowed=loss_allowed, grad_error=error, grad_allowed=allowed,
        plain_grad_error=plain_error, plain_worst=plain_worst if plain_error else None, worst=worst,
        tensors=len(got.gradients), update_error=update_error, tolerance="; ".join(t.words for t in declared) or None,
    )  # fmt: skip


def _limit(own: float, dtype: torch.dtype, declared: Sequence[Tolerance]) -> float:
    """What a tensor may be off by in which plain PEFT is off by `own`."""
    return limits.tolerated(max(limits.MULTIPLE * own, limits.FLOOR[dtype]), own, dtype, declared)


def _mismatch(gold: Outcome, got: Outcome) -> Numerics:
    odd = sorted(set(gold.gradients) ^ set(got.gradients))[0]
    return Numerics(
        passed=False, loss_error=float("inf"), loss_allowed=0, grad_error=float("inf"), grad_allowed=0,
        plain_grad_error=0, worst=odd, tensors=len(got.gradients),
    )  # fmt: skip


def explain(numerics: Numerics) -> str:
    """Why a gate did not pass, in words."""
    assert numerics.grad_error is not None and numerics.grad_allowed is not None  # what `judge` fills in
    assert numerics.loss_error is not None and numerics.loss_allowed is not None
    if numerics.grad_error == float("inf") and numerics.grad_allowed == 0:
        return f"the trained tensors differ from plain PEFT's: {numerics.worst}"
    if numerics.grad_error > numerics.grad_allowed:
        what = numerics.worst if " " in numerics.worst else f"the gradient of {numerics.worst}"  # Y and dX of an op
        return (
            f"{what} is off by {numerics.grad_error:.2g} from float32 PEFT "
            f"(allowed {numerics.grad_allowed:.2g}; plain PEFT's worst tensor {numerics.plain_grad_error:.2g})"
        )
    if (numerics.scale_error or 0.0) > (numerics.scale_allowed or 0.0):
        return (
            f"the gradient of {numerics.scale_worst} is scaled: its projection on float32 PEFT's is off by "
            f"{numerics.scale_error:.2g} (allowed {numerics.scale_allowed:.2g})"
        )
    if numerics.loss_error > numerics.loss_allowed:
        return f"the loss is off by {numerics.loss_error:.2g} (allowed {numerics.loss_allowed:.2g})"
    if failed := next((c for c in numerics.checks if not c.passed), None):
        return failed.words
    return f"the optimizer's first update is off by {numerics.update_error:.2g} from AdamW's on the same gradients"


def share_of_allowance(numerics: Numerics) -> float:
    """The largest error of a verdict as a share of what is allowed for it: above 1 it does not pass."""
    pairs = (
        (numerics.grad_error, numerics.grad_allowed),
        (numerics.loss_error, numerics.loss_allowed),
        (numerics.scale_error, numerics.scale_allowed),
        *((check.found, check.allowed) for check in numerics.checks),
    )
    return max((share(e, a) for e, a in pairs if e is not None and a is not None), default=0.0)


def with_checks(numerics: Numerics, checks: Sequence[Check]) -> Numerics:
    """The gate's verdict with what the full arms and their trials came to, besides what it has already. Of checks of
    one name (several processes, several ranks) the one nearest to its limit stands."""
    worst: dict[str, Check] = {}
    for check in (*numerics.checks, *checks):
        before = worst.get(check.name)
        if before is None or check.share > before.share:
            worst[check.name] = check
    kept = list(worst.values())
    return numerics.model_copy(update={"checks": kept, "passed": numerics.passed and all(c.passed for c in kept)})
