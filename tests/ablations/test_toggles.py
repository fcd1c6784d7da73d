"""Each toggle engages, says how often, and notices when it did not."""

from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry

LAYERS = 3


def evidence(*names, **kwargs):
    made = arm(*names, **kwargs)
    _, ops = traced(lambda: run_trial(made))
    return {a.name: (a, Evidence(made, made.patched[a.name], ops)) for a in made.ablations}


def sites(name, *others, **kwargs):
    toggle, found = evidence(name, *others, **kwargs)[name]
    return toggle.audit(found)


@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa_math"])
def test_attention_is_counted_by_layers(name):
    assert sites(name) == LAYERS


def test_attention_that_ran_elsewhere_is_not_applied():
    ran = evidence("sdpa")["sdpa"][1]
    with pytest.raises(NotApplied, match="still ran in SDPA"):
        registry.ablation("eager").audit(ran)
    with pytest.raises(NotApplied, match="not in math alone"):
        registry.ablation("sdpa_math").audit(ran)


def test_checkpointing_counts_layers_and_runs_them_again():
    both = evidence("gradient_checkpointing", "sdpa")
    toggle, found = both["gradient_checkpointing"]
    assert toggle.audit(found) == LAYERS
    plain = evidence("sdpa")["sdpa"][1]
    assert found.ops["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2 * LAYERS
    assert plain.ops["aten::_scaled_dot_product_flash_attention_for_cpu"] == LAYERS


def test_reentrant_checkpointing_gets_its_gradients():
    made = arm({"gradient_checkpointing": {"use_reentrant": True}})
    run_trial(made)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in made.adapters())


@pytest.mark.parametrize(("name", "flags"), [("adamw", (0, 0)), ("adamw_foreach", (1, 0)), ("adamw_fused", (0, 1))])
def test_optimizers_run_as_named(name, flags):
    toggle, found = evidence(name)[name]
    assert toggle.audit(found) == LAYERS * 7 * 2
    group = found.arm.step.optimizer.param_groups[0]
    assert (bool(group["foreach"]), bool(group["fused"])) == tuple(map(bool, flags))
    group["foreach"] = not group["foreach"]
    with pytest.raises(NotApplied, match="foreach="):
        toggle.audit(found)


def test_adapters_follow_the_compute_dtype():
    assert sites("adapters_in_compute_dtype", dtype=torch.bfloat16) == LAYERS * 7 * 2


def test_padding_counts_its_batches():
    assert sites("padding", *PEFT[:2]) == 1


@pytest.mark.exhaustive
def test_torch_compile_counts_its_graphs():
    toggle, found = evidence("torch_compile", layers=1)["torch_compile"]
    assert toggle.audit(found) >= 1
    assert toggle.notes(found)["torch_compile"]["graphs"] >= 1


@pytest.mark.exhaustive
def test_layers_are_compiled_once_for_those_that_are_alike():
    toggle, found = evidence("torch_compile_layers")["torch_compile_layers"]
    assert toggle.audit(found) == LAYERS
    made = toggle.notes(found)["torch_compile_layers"]
    assert made == {"layers": LAYERS, "graphs": 2, "graph_breaks": 0}, "the first layer's input has no gradient"
    found.arm.model.get_base_model().model.layers[-1]._compiled_call_impl = None
    _, fewer = traced(lambda: run_trial(found.arm))
    with pytest.raises(NotApplied, match=f"ran {LAYERS - 1} times; layers run {LAYERS} times"):
        toggle.audit(Evidence(found.arm, found.arm.patched[toggle.name], fewer))


def test_a_toggle_that_patches_nothing_has_to_say_how_it_engaged():
    from lorabench.contract.ablation import Ablation

    with pytest.raises(NotImplementedError):
        Ablation().audit(Evidence(arm(*PEFT), None, None))


def test_kernels_that_left_everything_say_the_commonest_reason():
    from lorakernels.model.patching import Left, Report
    from torch import nn

    model, conv = nn.Linear(1, 1), "its base layer is a Conv1D, not a Linear"
    left = [Left("model", "linear_cross_entropy", "it is odd"), Left("a", "linear", conv), Left("b", "linear", conv)]
    model._lorabench_lorakernels = {"report": Report(left=left)}  # type: ignore[assignment]
    evidence = SimpleNamespace(patched=0, arm=SimpleNamespace(model=model))
    with pytest.raises(NotApplied, match=f"^lora_kernels left a and 1 more to PEFT: {conv}$"):
        registry.ablation("lora_kernels").audit(evidence)  # type: ignore[arg-type]
