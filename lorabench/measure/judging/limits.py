"""The one table of limits: what may be off by how much. docs/methodology.md has the reasons for the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lorabench.contract.ablation import Tolerance

MULTIPLE = 3.0  # of what plain PEFT in the same precision is off by, or of how far two right runs are apart
SCALE = 0.005  # of a projection on the other's gradient: rounding turns a tensor, and hardly scales a large one
# Of what nine tenths of the tensors' projections are off by, for the typical one: two runs may agree in it by luck.
TYPICAL = 0.5
ALONG = 0.75  # share of a declared rounding's error that may lie along the gradient; of a factor's all of it does

# -- of the gate, on a shallow model
SCALE_MULTIPLE = 2.0  # a projection may be off by this multiple of what runs of plain PEFT are
# Where plain PEFT happens to make no error (float32 against float32), this much is still rounding.
FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FIRST_UPDATE = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 1e-1}

# -- of what was timed. Where two right runs happen to be equal (float32 on a CPU), this much is still rounding.
GRADIENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
LOSS = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
# Of a model whose noise could not be measured, because two plain runs did not fit the device.
UNKNOWN = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# With any tolerance, and with any noise: an arm without a gradient is off by 1, and must never pass. The second is for
# tensors in which two right runs are that far apart, as with 80 layers or with dropout masks of each arm's own.
MOST, MOST_NOISY = 0.5, 0.9
MOST_SCALE, MOST_SCALE_NOISY = 0.25, 0.5
# Trials of a turn after its first one begin where the arms' own updates led. By how much a gradient then differs, for
# each step's length between their parameters. Of a gradient that is right to a share e, AdamW's first step (of one
# length, whatever the gradient's) has the sign of about e of its elements wrong: sqrt(e) of a step. An adapter in 16
# bits may stay where it is.
STEP, STEP_LOSS = 0.1, 2e-3
BEHIND = 0.3  # steps that an adapter in 16 bits may fall behind in each
# Multiple of how far an arm's yardstick is from the reference in this tensor, or in the typical one, where the two hold
# other weights: a later trial has other tokens, and half of the parameters halved. 4 bits of two tiny models are then
# 1.45 times as far off, int8 of the 8B 1.4 times.
APART = 1.5
LOSS_MASKED = 10.0  # multiple of the noise that the masks make: thirty trials draw thirty pairs of them
UPDATE = {False: 1e-3, True: 0.5}  # of each tensor, by whether it is held in fewer than 32 bits
SPREAD = (0.4, 2.5)  # of two runs under dropout: the candidate's distance over the reference's
NO_SPREAD = 1e6  # a distance above it is from a run without gradients, one below its inverse from the same run again


def tolerated(limit: float, own: float, dtype: torch.dtype, declared: Sequence[Tolerance]) -> float:
    """`limit`, widened by what is declared, of a tensor in which plain runs are off by `own`."""
    for t in declared:
        # In float32 plain PEFT is the gold: there is no error of its own to multiply.
        if t.eps is None or dtype == torch.float32:
            limit = max(limit, t.grad)
        else:
            limit = max(limit, min(t.grad, t.eps / torch.finfo(dtype).eps * own))
    return limit


def scaled(own: float, error: float, declared: Sequence[Tolerance]) -> float:
    """What a tensor's projection may be off by, of which `own` is allowed and which is off by `error`. Of what a
    declared rounding puts it off by, a part may lie along it; of a wrong factor all of it does."""
    return max(SCALE, own, ALONG * error if any(t.grad for t in declared) else 0.0)
