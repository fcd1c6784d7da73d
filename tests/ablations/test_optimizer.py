"""`no_optimizer`: forward and backward, and no parameter moves."""

import math

import torch
from helpers import arm

from lorabench.contract.ablation import Evidence
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench_ablations.optimizer import NoOptimizer

LOW = ("sdpa", "adapters_in_compute_dtype")


def test_two_phases_and_no_update():
    made = arm("sdpa", "no_optimizer")
    before = [p.detach().clone() for _, p in made.adapters()]
    trial, ops = traced(lambda: run_trial(made))
    assert set(trial.device_ms) == {"forward", "backward"}
    assert trial.loss == run_trial(arm("sdpa", "adamw_foreach")).loss
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, made.adapters(), strict=True))
    assert NoOptimizer().audit(Evidence(made, None, ops)) == 1
    assert NoOptimizer().audit(Evidence(arm("sdpa"), None, ops)) == 0


def test_float16_adapters_can_be_compared_only_without_an_update():
    low = {"dtype": torch.float16, "layers": 2}
    assert math.isnan(one_step(arm(*LOW, "adamw_foreach", **low)).update_error)
    without = one_step(arm(*LOW, "no_optimizer", **low))
    assert without.update_error is None
    assert all(torch.isfinite(g).all() and g.norm() > 0 for g in without.gradients.values())
