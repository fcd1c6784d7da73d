"""What goes to host memory and comes back: counted in bytes. On a CPU it goes from there to there."""

import pytest
import torch
from helpers import MACHINE, cells
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied
from lorabench.measure.fairness import settings
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.design import refusal
from lorabench_ablations.checkpointing import MARK, enable
from lorabench_ablations.saved_tensors import Moved, offload_inputs

LAYERS, BATCH, LENGTH = 3, 2, 16
PAGEABLE = {"save_on_cpu": {"pin_memory": False}}


def audited(made):
    toggle = next(a for a in made.ablations if a.slot == "checkpointing")
    found = Evidence(made, made.patched[toggle.name], None)
    return toggle.audit(found), toggle.notes(found)[toggle.name]


def gradients(made):
    torch.manual_seed(1)
    made.step.backward(made.step.forward(made.step.batches[0]))
    return made.gradients()


def test_everything_saved_goes_and_comes_back():
    made = arm("sdpa", PAGEABLE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        arm("sdpa").step.forward(made.step.batches[0])
    run_trial(made)
    tensors, moved = audited(made)
    assert (tensors, moved["bytes_out"]) == (len(saved), sum(saved))
    assert moved["bytes_back"] >= moved["bytes_out"], "some are asked for by more than one node"
    assert 0 < moved["bytes_out_of_weights"] < moved["bytes_out"]


def test_hooks_are_gone_after_the_forward():
    made = arm("sdpa", PAGEABLE)
    made.step.forward(made.step.batches[0])
    assert getattr(made.model, MARK).tensors > 0 and not settings()["hooks of saved tensors"]


def offloaded(use_reentrant=False, **kwargs):
    """An arm as `gradient_checkpointing(offload=True)` makes it on a GPU."""
    made = arm("sdpa", **kwargs)
    setattr(made.model, MARK, Moved.of(made.model))
    offload_inputs(enable(made.model, use_reentrant=use_reentrant), getattr(made.model, MARK), use_reentrant)
    return made


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_of_a_checkpointed_layer_only_its_inputs_go(use_reentrant):
    made = offloaded(use_reentrant)
    run_trial(made)
    moved = getattr(made.model, MARK)
    hidden = BATCH * LENGTH * made.model.config.hidden_size * 4
    assert moved.bytes_out == moved.bytes_back == LAYERS * hidden
    assert moved.weight_bytes == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_offloaded_inputs_give_the_gradients_without_bit_for_bit(use_reentrant):
    kwargs = {"overrides": ("lora.lora_dropout=0.1",)}
    plain, ours = gradients(arm("sdpa", **kwargs)), gradients(offloaded(use_reentrant, **kwargs))
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_what_did_not_come_back_is_not_applied():
    made = arm("sdpa", PAGEABLE)
    with pytest.raises(NotApplied, match="0 bytes went to host memory and 0 came back"):
        audited(made)
    made.step.forward(made.step.batches[0])
    with pytest.raises(NotApplied, match="and 0 came back"):
        audited(made)


def test_a_forward_that_fails_leaves_no_hooks(cpu_as_accelerator):
    made = arm("sdpa", *cpu_as_accelerator)
    made.step.inner.forward = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.step.forward(made.step.batches[0])
    assert not settings()["hooks of saved tensors"]


# -- TRL's ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu_as_accelerator(monkeypatch):
    """TRL's hooks run on a CPU that they take for an accelerator: everything but streams and pinned memory."""
    pytest.importorskip("trl")
    asked = lambda check_available=False: None if check_available else torch.device("cpu")  # noqa: E731 - not torch's own
    monkeypatch.setattr(torch.accelerator, "current_accelerator", asked)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    return ({"activation_offloading": {"use_streams": False, "use_pin_memory": False}},)


def test_trl_moves_activations_and_no_weights(cpu_as_accelerator):
    made = arm("sdpa", *cpu_as_accelerator)
    everything = arm("sdpa", PAGEABLE)
    for each in (made, everything):
        run_trial(each)
    tensors, moved = audited(made)
    assert tensors > LAYERS and moved["bytes_out"] == moved["bytes_back"]
    assert moved["bytes_out_of_weights"] == 0
    assert moved["bytes_out"] < audited(everything)[1]["bytes_out"]


def test_trl_s_hooks_give_the_gradients_without_bit_for_bit(cpu_as_accelerator):
    kwargs = {"overrides": ("lora.lora_dropout=0.1",)}
    plain, ours = gradients(arm("sdpa", **kwargs)), gradients(arm("sdpa", *cpu_as_accelerator, **kwargs))
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_trl_that_moves_nothing_is_not_applied(cpu_as_accelerator):
    (name,) = cpu_as_accelerator
    name["activation_offloading"]["min_offload_size"] = 1 << 30
    made = arm("sdpa", name)
    run_trial(made)
    with pytest.raises(NotApplied, match="0 bytes went to host memory"):
        audited(made)


def test_without_trl_it_is_unsupported(monkeypatch):
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "trl" else found(name, *rest))
    cell = cells("ablations=[activation_offloading]")[-1]
    status, reason = refusal(cell, MACHINE.model_copy(update={"device": "cuda", "gpus": 1, "capability": (9, 0)}))
    assert status == "unsupported" and reason.endswith("needs the package trl, which is not installed: pip install trl")


@pytest.mark.parametrize("name", ["save_on_cpu", "activation_offloading"])
def test_on_a_cpu_there_is_nothing_to_move_to(name):
    status, reason = refusal(cells(f"ablations=[{name}]")[-1], MACHINE)
    assert status == "unsupported" and "needs a CUDA device" in reason


def test_only_what_trl_s_trainer_takes_is_a_setting():
    assert registry.ablation("activation_offloading").settings().sft == {"activation_offloading": True}
    assert registry.ablation({"activation_offloading": {"max_fwd_stash_size": 2}}).settings() is None
