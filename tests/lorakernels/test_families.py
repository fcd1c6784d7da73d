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
