"""The numerics gate: before anything is timed, loss and every adapter gradient against plain PEFT in float32.

On a shallow model (2 layers, the model's own widths): the gold is plain PEFT in float32, with the weights as the
compute dtype rounded them. What plain PEFT in the compute dtype itself makes of error is the measure: a candidate may
make a small multiple of it. docs/methodology.md has the reasons for the numbers below.
"""

from __future__ import annotations

import copy
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Ablation, Tolerance
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.step import Step
from lorabench.contract.workload import LEARNING_RATE
from lorabench.measure.trial import Trial
from lorabench.record.schema import Numerics

GATE_LAYERS = 2
GATE_SAMPLES, GATE_TOKENS = 8, 256  # of the workload's samples, cut to this: enough for every path, cheap in float32
MULTIPLE = 3.0  # a candidate's error may be this multiple of plain PEFT's own
# Where plain PEFT happens to make no error (float32 against float32), this much is still rounding.
FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The full arms against each other: rounding grows with depth, so these are wide; they are there for gross mistakes.
FULL_LOSS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
FULL_GRAD_NORM = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
FULL_GRAD_NORM_MOST = 0.5  # with any tolerance: an arm without a gradient is off by 1, and must never pass
UPDATE = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Outcome:
    """Loss and adapter gradients (float32; of an op also Y and dX) of one step, and the error of its update."""

    loss: float
    gradients: dict[str, Tensor]
    update_error: float | None


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


def shorten(samples: Sequence[Sample]) -> list[Sample]:
    return [Sample(s.tokens[:GATE_TOKENS], s.labels[:GATE_TOKENS]) for s in samples[:GATE_SAMPLES]]


def one_step(arm: Arm, step: Step | None = None) -> Outcome:
    """One whole step of a job (None: of the only one) of a shallow model, with the optimizer's update, if it has one,
    checked against plain AdamW on the same gradients. Of several ranks each has its part of the loss, here their
    sum."""
    step = step or arm.step
    step.clear()
    loss, others = 0.0, {}
    for batch in step.batches:
        part = step.forward(batch)
        step.backward(part)
        loss += step.loss_of(part.detach())
        others |= step.compared(part)
    gradients = arm.gradients(step) | others
    loss = arm.ranks.total(loss)
    if not step.updates:
        return Outcome(loss, gradients, None)
    before = {n: p.detach().clone() for n, p in arm.adapters(step)}
    step.update()
    return Outcome(loss, gradients, _update_error(arm, step, before, gradients))


def _update_error(arm: Arm, step: Step, before: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """Relative error of the first update against torch's for-loop AdamW in the parameters' own dtype."""
    plain = {n: nn.Parameter(p.clone()) for n, p in before.items()}
    for n, p in plain.items():
        p.grad = gradients[n].to(p.dtype)
    rate = step.job.learning_rate if step.job else LEARNING_RATE
    torch.optim.AdamW(plain.values(), lr=rate, foreach=False, fused=False).step()
    moved = wrong = 0.0
    for n, p in arm.adapters(step):
        expected = plain[n].detach().float() - before[n].float()
        wrong += float((p.detach().float() - before[n].float() - expected).square().sum())
        moved += float(expected.square().sum())
    return (wrong / max(moved, 1e-30)) ** 0.5


def relative(value: Tensor, gold: Tensor) -> float:
    """||value - gold|| / ||gold||, Frobenius; infinite where the value is not finite."""
    if not torch.isfinite(value).all():
        return float("inf")
    return float((value - gold).norm() / gold.norm().clamp_min(1e-30))


def judge(gold: Outcome, low: Outcome, got: Outcome, dtype: torch.dtype, ablations: Sequence[Ablation]) -> Numerics:
    """The verdict on one shallow model, given the gold's and plain PEFT's outcome."""
    declared = [a.tolerance for a in ablations if a.tolerance]
    extra_loss = max((t.loss for t in declared), default=0.0)
    extra_update = max((t.update for t in declared), default=0.0)
    if set(gold.gradients) != set(got.gradients):
        return _mismatch(gold, got)
    own = {n: relative(g, gold.gradients[n]) for n, g in low.gradients.items()}
    typical = statistics.median(own.values())
    worst, worst_share, error, allowed = "", -1.0, 0.0, 0.0
    for n, g in got.gradients.items():
        limit = _limit(max(own[n], typical), dtype, declared)
        found = relative(g, gold.gradients[n])
        if found / limit > worst_share:
            worst, worst_share, error, allowed = n, found / limit, found, limit
    scale = max(abs(gold.loss), 1e-30)
    loss_error = abs(got.loss - gold.loss) / scale
    loss_allowed = max(MULTIPLE * abs(low.loss - gold.loss) / scale, FLOOR[dtype] / 2, extra_loss)
    update_error = got.update_error
    update_right = update_error is None or update_error <= max(UPDATE[dtype], extra_update)
    plain_worst = max(own, key=own.__getitem__)
    return Numerics(
        passed=error <= allowed and loss_error <= loss_allowed and update_right,
        loss_error=loss_error, loss_allowed=loss_allowed, grad_error=error, grad_allowed=allowed,
        plain_grad_error=own[plain_worst], plain_worst=plain_worst if own[plain_worst] else None, worst=worst,
        tensors=len(got.gradients), update_error=update_error, tolerance="; ".join(t.words for t in declared) or None,
        full_loss_allowed=max(FULL_LOSS[dtype], extra_loss),
        full_grad_norm_allowed=min(FULL_GRAD_NORM_MOST, max([FULL_GRAD_NORM[dtype], *(t.grad for t in declared)])),
    )  # fmt: skip


def _limit(own: float, dtype: torch.dtype, declared: Sequence[Tolerance]) -> float:
    """What a tensor may be off by in which plain PEFT is off by `own`."""
    limit = max(MULTIPLE * own, FLOOR[dtype])
    for t in declared:
        # In float32 plain PEFT is the gold: there is no error of its own to multiply.
        if t.eps is None or dtype == torch.float32:
            limit = max(limit, t.grad)
        else:
            limit = max(limit, min(t.grad, t.eps / torch.finfo(dtype).eps * own))
    return limit


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
    if numerics.loss_error > numerics.loss_allowed:
        return f"the loss is off by {numerics.loss_error:.2g} (allowed {numerics.loss_allowed:.2g})"
    if (numerics.full_loss_error or 0) > (numerics.full_loss_allowed or 0):
        return (
            f"the full arms' losses differ by {numerics.full_loss_error:.2g} (allowed {numerics.full_loss_allowed:.2g})"
        )
    if (numerics.full_grad_norm_error or 0) > (numerics.full_grad_norm_allowed or 0):
        return (
            f"the full arms' gradient norms differ by {numerics.full_grad_norm_error:.2g} "
            f"(allowed {numerics.full_grad_norm_allowed:.2g})"
        )
    return f"the optimizer's first update is off by {numerics.update_error:.2g} from AdamW's on the same gradients"


def share_of_allowance(numerics: Numerics) -> float:
    """The largest error of a verdict as a share of what is allowed for it: above 1 it does not pass."""
    pairs = (
        (numerics.grad_error, numerics.grad_allowed),
        (numerics.loss_error, numerics.loss_allowed),
        (numerics.full_loss_error, numerics.full_loss_allowed),
        (numerics.full_grad_norm_error, numerics.full_grad_norm_allowed),
    )
    return max((e / a if a else float("inf") for e, a in pairs if e is not None and a is not None), default=0.0)


@dataclass(frozen=True)
class First:
    """Loss and gradient norm of one job in a full arm's first step."""

    loss: float
    grad_norm: float


def first_step(arm: Arm, run: Callable[[], Trial]) -> dict[str, First]:
    """Run the first trial of a full arm and note of each job what the other arm has to agree with."""
    trial = run()
    return {
        step.name: First(arm.ranks.total(trial.losses[step.name]), _norm_of_gradients(arm, step)) for step in arm.steps
    }


def _norm_of_gradients(arm: Arm, step: Step) -> float:
    norms = [p.grad.detach().float().norm() for _, p in arm.adapters(step) if p.grad is not None]
    norm = torch.stack(norms).norm() if norms else torch.zeros(())
    return float(norm) / (1.0 if step.updates else step.loss_scale)  # an update has divided the scale out


def agree(numerics: Numerics, reference: First, candidate: First, dtype: torch.dtype, dropout: float) -> Numerics:
    """Add the full arms' agreement, within what `judge` allowed, to the gate's verdict. Under dropout the arms draw
    different masks: no statement."""
    result = copy.copy(numerics)
    if dropout > 0:
        result.full_loss_allowed = result.full_grad_norm_allowed = None
        return result
    result.full_loss_allowed = loss_allowed = numerics.full_loss_allowed or FULL_LOSS[dtype]
    result.full_grad_norm_allowed = norm_allowed = numerics.full_grad_norm_allowed or FULL_GRAD_NORM[dtype]
    result.full_loss_error = abs(candidate.loss - reference.loss) / max(abs(reference.loss), 1e-30)
    result.full_grad_norm_error = abs(candidate.grad_norm - reference.grad_norm) / max(reference.grad_norm, 1e-30)
    within = result.full_loss_error <= loss_allowed and result.full_grad_norm_error <= norm_allowed
    result.passed = numerics.passed and within
    return result
