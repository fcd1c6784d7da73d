"""Every decoder family that transformers builds: what `apply` gives it is PEFT's loss and PEFT's gradients, and what
the table of kernels/README.md says. The families that users ask for run always, all others with `exhaustive`.
"""

from __future__ import annotations

import lorakernels
import pytest
from family_models import FAMILIES, NAMED, build, step
from family_table import CannotBuild, line, measure, rows_of_readme
from kernel_checks import exhaustive
from tiny_models import worst

ROWS = rows_of_readme()


@pytest.mark.parametrize("family", [*NAMED, *(exhaustive(f) for f in FAMILIES if f not in NAMED)])
def test_loss_and_gradients_are_peft_s_and_the_table_is_true(family):
    try:
        cells = measure(family)
    except CannotBuild as reason:
        assert family not in ROWS, "the table has a row of a family that cannot be built"
        pytest.skip(f"no small model: {reason}")
    assert line(cells) == ROWS[family], "run python tests/lorakernels/family_table.py"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_base_model_that_gets_its_input_without_a_name_keeps_our_loss(family):
    cells = measure(family)  # which holds loss and gradients against PEFT's
    assert line(cells) == ROWS[family]
    assert lorakernels.apply(build(family)).counts["linear_cross_entropy"] == 1


def test_most_families_are_in_the_table():
    assert set(NAMED) <= set(ROWS) <= set(FAMILIES)
    assert len(ROWS) >= 150


@pytest.mark.parametrize("family", NAMED)
def test_every_linear_of_a_named_family_is_fused(family):
    """But for routers and experts, which are no linears."""
    report = lorakernels.apply(build(family))
    left = {entry.reason for entry in report.left if entry.part == "linear"}
    assert all("Router" in reason or "ParamWrapper" in reason for reason in left), left
    assert report.counts.get("linear", 0) + report.counts.get("qkv", 0) > 0
    assert report.counts["linear_cross_entropy"] == 1


@pytest.mark.parametrize("family", ["granite", "ministral3", "glm4", "qwen3_next", "gpt_oss"])
def test_remove_gives_the_model_back(family):
    model = build(family)
    loss, gradients = step(model)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    lorakernels.apply(model)
    step(model)
    lorakernels.remove(model)
    assert not [n for n, m in model.named_modules() if {"forward", "_lorakernels"} & set(m.__dict__)]
    assert all(t.is_contiguous() and t.equal(state[n]) for n, t in model.state_dict().items())
    again, got = step(model)
    assert again == loss and worst(got, gradients) == 0


def test_dropouts_of_a_module_s_own_leave_it_and_none_do_not():
    """Seed-OSS drops out what its attention and its MLP return."""
    reasons = {e.reason for e in lorakernels.apply(build("seed_oss")).left}
    assert reasons == {"SeedOssAttention drops out its output in training", "SeedOssMLP drops out in training"}
    model = build("seed_oss", residual_dropout=0.0, attention_dropout=0.0)
    _, wanted = step(model)
    report = lorakernels.apply(model)
    assert report.counts == {"qkv": 2, "o": 2, "rope": 2, "mlp": 2, "rms_norm": 3, "linear_cross_entropy": 1}
    assert worst(step(model)[1], wanted) < 1e-4
    layer = model.base_model.model.model.layers[0]
    layer.mlp.residual_dropout = 0.5
    with pytest.warns(UserWarning, match="class or activation was changed"):
        step(model)


@pytest.mark.parametrize("attribute", ["residual_multiplier", "logits_scaling"])
def test_multipliers_are_read_anew(attribute):
    model = build("granite")
    before, _ = step(model)
    lorakernels.apply(model)

    def change(by):
        base = model.base_model.model
        base.config.logits_scaling *= by if attribute == "logits_scaling" else 1
        for layer in base.model.layers:
            layer.residual_multiplier *= by if attribute == "residual_multiplier" else 1

    change(2.0)
    got, gradients = step(model)
    lorakernels.remove(model)
    wanted, wanted_gradients = step(model)
    assert abs(got - wanted) < 1e-5 * abs(wanted) and worst(gradients, wanted_gradients) < 1e-3
    assert abs(wanted - before) > 1e-4
