"""What a slot of checkpointing keeps and what it computes again: counted in operators, bytes and calls."""

import pytest
from helpers import MACHINE, arm, cells

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.design import refusal

LAYERS = 3
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def evidence(name, *others, **kwargs):
    """(the toggle, the evidence of one traced trial of its arm)."""
    made = arm(name, "sdpa", *others, **kwargs)
    _, ops = traced(lambda: run_trial(made))
    toggle = next(a for a in made.ablations if a.slot == "checkpointing")
    return toggle, Evidence(made, made.patched[toggle.name], ops)


def test_switched_off_no_layer_runs_again():
    toggle, found = evidence("no_gradient_checkpointing")
    assert toggle.audit(found) == LAYERS
    assert found.ops[ATTENTION] == LAYERS


def test_switched_off_notices_a_layer_that_runs_again():
    toggle, found = evidence("no_gradient_checkpointing")
    found.arm.model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(NotApplied, match="modules still run again in backward"):
        toggle.audit(found)


def test_switching_off_has_an_effect_only_where_the_reference_checkpoints():
    toggle = registry.ablation("no_gradient_checkpointing")
    assert toggle.without_effect([registry.ablation("gradient_checkpointing")], "float32") is None
    cell = cells("ablations=[no_gradient_checkpointing]")[-1]
    assert refusal(cell, MACHINE) == (
        "not_applied", "the reference keeps every activation already; put gradient_checkpointing into reference="
    )  # fmt: skip
