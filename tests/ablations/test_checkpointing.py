"""What is kept for the backward and what is computed again: counted in operators, equal to plain PEFT bit for bit."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import MACHINE, arm, cells

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.job import jobs_of
from lorabench.measure import flops
from lorabench.measure.kinds.train import Train
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.design import refusal
from lorabench_ablations.checkpointing import ran_again

LAYERS = 3
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
WAYS = {
    "layers": "gradient_checkpointing",
    "reentrant": {"gradient_checkpointing": {"use_reentrant": True}},
    "every_2": {"gradient_checkpointing": {"every_n_layers": 2}},
    "attention": "selective_checkpointing",
    "mm": {"selective_checkpointing": {"save": "mm"}},
    "both": {"selective_checkpointing": {"save": "both"}},
    "save_on_cpu": {"save_on_cpu": {"pin_memory": False}},
    "off": "no_gradient_checkpointing",
}


def evidence(name, *others, **kwargs):
    """(the toggle, the evidence of one traced trial of its arm)."""
    made = arm(name, *(others or ("sdpa",)), depth=LAYERS, **kwargs)
    _, ops = traced(lambda: run_trial(made))
    toggle = next(a for a in made.ablations if a.slot == "checkpointing")
    return toggle, Evidence(made, made.patched[toggle.name], ops)


def gradients(*names, seed=1, dropout=0.0):
    """Of one forward and backward that begins at this state of the random numbers."""
    made = arm(*names, overrides=(f"lora.lora_dropout={dropout}",))
    torch.manual_seed(seed)
    made.step.backward(made.step.forward(made.step.batches[0]))
    return made.gradients()


@functools.cache
def without(*names, dropout=0.0):
    return gradients("sdpa", *names, dropout=dropout)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_bit_for_bit(way):
    """With the dropout that PEFT draws: what runs again has to draw the same mask."""
    plain, ours = without(dropout=0.1), gradients("sdpa", WAYS[way], dropout=0.1)
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    other = gradients("sdpa", WAYS[way], seed=2, dropout=0.1)
    assert not all(torch.equal(plain[name], other[name]) for name in plain), "no mask was drawn"


def test_masks_drawn_anew_in_the_second_run_would_be_seen():
    kwargs = {"overrides": ("lora.lora_dropout=0.1",)}
    made = arm("sdpa", "gradient_checkpointing", **kwargs)
    made.model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    torch.manual_seed(1)
    made.step.backward(made.step.forward(made.step.batches[0]))
    plain, ours = without(dropout=0.1), made.gradients()
    assert any((plain[n] - ours[n]).norm() > 0.1 * plain[n].norm() for n in plain)


@pytest.mark.parametrize("way", ["layers", "reentrant", "every_2", "attention"])
@pytest.mark.parametrize("kernels", ["lora_kernels", "lora_addmm"])
def test_kernels_under_checkpointing_have_peft_s_gradients(way, kernels):
    plain, ours = without(kernels), gradients("sdpa", kernels, WAYS[way])
    assert all(torch.allclose(plain[name], ours[name], rtol=1e-5, atol=1e-8) for name in plain)


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_math", "eager"])
@pytest.mark.parametrize(("way", "layers"), [("layers", 3), ("reentrant", 3), ("every_2", 2)])
def test_layers_that_run_again_are_counted_by_their_attention(attention, way, layers):
    toggle, found = evidence(WAYS[way], attention)
    assert toggle.audit(found) == layers
    assert toggle.notes(found) == {"gradient_checkpointing": {"layers_run_again": layers}}


def test_layers_of_our_kernels_are_counted_too():
    toggle, found = evidence("gradient_checkpointing", "sdpa", "lora_kernels")
    assert toggle.audit(found) == LAYERS


def test_checkpointing_that_no_layer_heeds_is_not_applied():
    toggle, found = evidence("gradient_checkpointing", "sdpa")
    plain = evidence("no_gradient_checkpointing", "sdpa")[1]
    with pytest.raises(NotApplied, match="no layer ran again in backward"):
        toggle.audit(replace(found, ops=plain.ops))


def test_where_no_attention_can_be_counted_the_layers_that_are_set_stand():
    toggle, found = evidence("gradient_checkpointing", "sdpa")
    unseen = replace(found, ops=Counter({"triton::some_kernel": 6}))
    assert ran_again(unseen) is None and toggle.audit(unseen) == LAYERS


@pytest.mark.parametrize("package", ["flash_attn::_flash_attn", "flash_attn::_flash_attn_varlen"])
def test_other_packages_attention_counts_as_well(package):
    _, found = evidence("gradient_checkpointing", "sdpa")
    ops = Counter({f"{package}_forward": 5, f"{package}_backward": 3})
    assert ran_again(replace(found, ops=ops)) == 2


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_every_n_layers_is_a_positive_whole_number(value):
    with pytest.raises(ValueError, match=r"every_n_layers: should be (a valid integer|greater than 0), not"):
        registry.ablation({"gradient_checkpointing": {"every_n_layers": value}})


def test_published_records_keep_their_key():
    old, new = (
        cells(f"ablations=[{name}]")[-1]
        for name in ("gradient_checkpointing", "{gradient_checkpointing: {every_n_layers: 2}}")
    )
    assert old.toggles[0].content == {"use_reentrant": False}  # all that the toggle had when they were measured
    assert new.toggles[0].content == {"use_reentrant": False, "every_n_layers": 2} and new.key != old.key


# -- selective ------------------------------------------------------------------------------------------------------


def kept(save, *others, **kwargs):
    toggle, found = evidence({"selective_checkpointing": {"save": save}}, *others, **kwargs)
    assert toggle.audit(found) == LAYERS
    return toggle.notes(found)["selective_checkpointing"]


def test_attention_is_kept_once_a_layer():
    assert kept("attention")["operators_kept"] == {ATTENTION: LAYERS}


def test_of_the_products_those_over_the_rank_run_again():
    """Seven linears a layer, each with its own product and lora_A's; lora_B's is the third."""
    assert kept("mm")["operators_kept"] == {"aten::mm": LAYERS * 7 * 2}


def test_biases_do_not_hide_a_product():
    found = kept("mm", model="tiny-qwen2")["operators_kept"]
    assert found["aten::addmm"] > 0 and found["aten::mm"] > 0


def test_both_keeps_both_and_runs_less_again_than_either():
    both = kept("both")
    assert both["operators_kept"] == {ATTENTION: LAYERS, "aten::mm": LAYERS * 7 * 2}
    assert both["operators_run_again"] < min(kept(save)["operators_run_again"] for save in ("attention", "mm"))


def test_fewer_products_run_again_where_they_are_kept():
    ran = {
        save: evidence({"selective_checkpointing": {"save": save}})[1].ops["aten::mm"] for save in ("mm", "attention")
    }
    assert ran["mm"] < ran["attention"]


@pytest.mark.parametrize("attention", ["eager", "sdpa_math"])
def test_attention_in_several_operators_is_not_kept_and_says_so(attention):
    toggle, found = evidence("selective_checkpointing", attention)
    with pytest.raises(NotApplied, match="no attention came by as one operator of torch"):
        toggle.audit(found)


def test_a_selection_that_no_layer_asked_is_not_applied():
    toggle = registry.ablation("selective_checkpointing")
    made = arm("selective_checkpointing", "sdpa", depth=LAYERS)
    with pytest.raises(NotApplied, match="no checkpointed layer asked"):
        toggle.audit(Evidence(made, LAYERS, Counter()))


def test_what_is_kept_must_not_be_written_into():
    for save in ("mm", "both"):
        toggle = registry.ablation({"selective_checkpointing": {"save": save}})
        for other in ("lora_addmm", "lora_kernels", "lora_mlp_kernel"):
            assert "save=attention goes with them" in (conflict([toggle, registry.ablation(other)]) or "")
    assert conflict([registry.ablation(name) for name in ("selective_checkpointing", "lora_kernels")]) is None
    made = arm("sdpa", "lora_addmm", {"selective_checkpointing": {"save": "mm"}})  # why
    with pytest.raises(RuntimeError, match="mutated"):
        run_trial(made)


def test_a_wrong_choice_says_what_there_is():
    with pytest.raises(ValueError, match="save: should be 'attention', 'mm' or 'both'"):
        registry.ablation({"selective_checkpointing": {"save": "gemm"}})


# -- off ------------------------------------------------------------------------------------------------------------


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


# -- beside others --------------------------------------------------------------------------------------------------


def test_moving_to_the_host_needs_a_gpu_and_no_capture():
    with pytest.raises(Unsupported, match="on a CPU nothing would move"):
        arm({"gradient_checkpointing": {"offload": True}})
    graph = registry.ablation("cuda_graph")
    for name in ({"gradient_checkpointing": {"offload": True}}, "save_on_cpu", "activation_offloading"):
        assert "pinned host memory" in (conflict([graph, registry.ablation(name)]) or "")
    assert conflict([graph, registry.ablation("gradient_checkpointing")]) is None


@pytest.mark.parametrize(
    ("way", "linears", "attention"),
    [("layers", 1, 1), ("every_2", 0.5, 0.5), ("attention", 1, 0), ("mm", 0, 1), ("both", 0, 0)],
)
def test_what_runs_again_is_counted_as_work_of_its_own(way, linears, attention):
    cell = cells("ablations=[gradient_checkpointing]")[-1]
    kind = Train()
    (work,) = kind.work(cell, kind.samples(cell), [registry.ablation(WAYS[way])])
    shape = flops.decoder(cell.model, jobs_of(cell.model, cell.workload, 0)[0].lora)
    lengths = [len(sample.tokens) for sample in kind.samples(cell)[0]]
    again = 2 * sum(lengths) * (shape.frozen + shape.adapter) * linears
    again += 2 * sum(n * n for n in lengths) * shape.attention * attention
    assert work.recompute_tflop["backward"] == pytest.approx(again / 1e12)
    assert (
        kind.work(cell, kind.samples(cell), [registry.ablation("no_gradient_checkpointing")])[0].recompute_tflop == {}
    )


def test_settings_are_those_that_transformers_takes():
    given = registry.ablation({"gradient_checkpointing": {"every_n_layers": 2, "offload": True}}).settings()
    kwargs = given.trainer["gradient_checkpointing_kwargs"]
    assert kwargs == {"use_reentrant": False, "every_n_layers": 2, "offload": True} and given.axolotl is None
