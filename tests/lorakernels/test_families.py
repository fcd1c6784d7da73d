"""Every decoder family that transformers builds: what `apply` gives it is PEFT's loss and PEFT's gradients, and what
the table of kernels/README.md says. The families that users ask for run always, all others with `exhaustive`.
"""

from __future__ import annotations

import lorakernels
import pytest
import torch
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


@pytest.mark.parametrize("family", ["bloom", "opt", "mamba", "gemma4_text", "recurrent_gemma"])
def test_a_head_that_calls_its_base_model_in_its_own_way_gets_our_loss(family):
    """With the arguments that it has names for alone, by their place, a module inside the base model, or with a soft
    cap of another name."""
    assert line(measure(family)) == ROWS[family]


def test_a_scale_that_lies_with_the_base_model_is_read_anew():
    model = build("falcon_h1", lm_head_multiplier=3.0)
    before, _ = step(model)
    assert lorakernels.apply(model).counts["linear_cross_entropy"] == 1
    assert torch.allclose(step(model)[0], before, rtol=1e-5)
    model.base_model.model.model.lm_head_multiplier = 1.5
    got, _ = step(model)
    lorakernels.remove(model)
    assert torch.allclose(got, step(model)[0], rtol=1e-5) and abs(got - before) > 1e-4


@pytest.mark.parametrize("family", ["bloom", "gptj", "opt"])
def test_a_base_model_gets_what_its_own_head_hands_on(family):
    """BLOOM's head keeps positions to itself, GPT-J's has a name for them, and both drop what they do not know."""
    model, ids = build(family), torch.arange(3, 17).view(2, 7)
    given = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(6, -1, -1).expand(2, 7)}
    given |= {"attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True}
    torch.manual_seed(1)  # OPT drops out
    wanted = model(**given).loss
    report = lorakernels.apply(model)
    torch.manual_seed(1)
    assert torch.allclose(model(**given).loss, wanted, rtol=1e-5)
    assert report.forwards.fused["linear_cross_entropy"] == 1
    assert len(model(**{**given, "return_dict": False})) == len(model(**given).to_tuple())


def test_logits_that_are_made_float32_are_so_with_our_loss():
    model = build("mamba").to(torch.bfloat16)
    ids = torch.arange(3, 17).view(2, 7)
    wanted = model(input_ids=ids, labels=ids).logits
    lorakernels.apply(model)
    got = model(input_ids=ids, labels=ids).logits
    assert got.dtype == wanted.dtype == torch.float32
    assert torch.allclose(got, wanted, atol=0.05 * wanted.abs().max().item())


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


@pytest.mark.parametrize("parts", [{}, {"rms_norm": False}, {"qkv": False}], ids=["layers", "attention", "o"])
def test_a_query_is_scaled_by_its_position(parts):
    """Ministral 3's, behind a length that is short here; whole layers, attentions, and with PEFT's own q, k, v."""
    positions = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    model = build("ministral3", rope_parameters={**positions, "original_max_position_embeddings": 2})
    loss, wanted = step(model)
    report = lorakernels.apply(model, **parts)
    assert report.counts["o"] == 2 and "attention" not in {entry.part for entry in report.left}
    got, gradients = step(model)
    assert torch.allclose(got, loss, rtol=1e-5) and worst(gradients, wanted) < 1e-3
    assert not report.forwards.left
    rope = model.base_model.model.config.rope_parameters
    rope["llama_4_scaling_beta"] = 0.0
    other, _ = step(model)
    lorakernels.remove(model)
    assert torch.allclose(other, step(model)[0], rtol=1e-5) and abs(other - got) > 1e-5


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
