"""`no_optimizer`: forward and backward, and no parameter moves. LoRA+ and torchao's 8-bit AdamW."""

import importlib.util
import math

import pytest
import torch
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
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


def updated(*names, **kwargs):
    """(the arm after one update, how far that update is from AdamW's on the same gradients)."""
    made = arm("sdpa", *names, **kwargs)
    return made, one_step(made).update_error


def test_loraplus_is_peft_s_own_optimizer_in_two_groups_and_adamw_s_update():
    from peft.optimizers import create_loraplus_optimizer

    made, error = updated("loraplus")
    toggle = made.ablations[-1]
    assert toggle.audit(Evidence(made, made.patched["loraplus"], None)) == 3 * 7
    assert error is not None and error < 1e-3
    theirs = create_loraplus_optimizer(made.model, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16)
    rates = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    of_b = made.step.optimizer.param_groups[1]["params"]
    assert {rates[id(p)] for p in of_b} == {1.6e-3} and len(of_b) == 21


def test_another_ratio_is_another_training():
    with pytest.raises(Unsupported, match="loraplus_lr_ratio=16 is another training"):
        arm("sdpa", {"loraplus": {"loraplus_lr_ratio": 16}})


def test_one_group_is_not_applied():
    with pytest.raises(NotApplied, match="expected two"):
        registry.ablation("loraplus").audit(Evidence(arm("sdpa", "adamw"), None, None))


@pytest.mark.exhaustive  # it compiles for a quarter of a minute
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")
def test_torchao_s_8_bit_states_are_those_of_large_adapters():
    made, error = updated("torchao_adamw_8bit", overrides=("lora.r=64",))  # 64 x 64 numbers and more
    toggle = made.ablations[-1]
    found = Evidence(made, None, None)
    assert toggle.audit(found) > 0 and error is not None and error < toggle.tolerance.update
    assert toggle.notes(found)["optimizer_states"]["in 8 bits"] == toggle.audit(found) <= 3 * 7 * 2
    with pytest.raises(NotApplied, match="4096 elements"):
        toggle.audit(Evidence(updated("torchao_adamw_8bit", overrides=("lora.r=4",))[0], None, None))
