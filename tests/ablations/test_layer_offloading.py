"""Frozen weights that wait in host memory, and Unsloth's checkpointing by a stand-in. On a CPU all is in the host."""

import os
import sys
import types

import pytest
import torch
from helpers import MACHINE, PEFT, cells
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench.plan.design import refusal
from lorabench_ablations.streamed_linear import pinned

LAYERS, LINEARS = 3, 21
DROPOUT = {"overrides": ("lora.lora_dropout=0.1",)}


def gradients(made):
    torch.manual_seed(1)
    made.step.backward(made.step.forward(made.step.batches[0]))
    return made.gradients()


@pytest.mark.parametrize("others", [(), ("gradient_checkpointing",), ({"tiled_mlp": {"shards": 2}},)])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2"])  # the second has biases
def test_gradients_are_those_of_weights_that_stay_bit_for_bit(others, model):
    kwargs = DROPOUT | {"model": model}
    plain, made = gradients(arm(*PEFT, *others, **kwargs)), arm(*PEFT, *others, "layer_offloading", **kwargs)
    ours = gradients(made)
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], ours[name]) for name in plain)
    toggle = next(a for a in made.ablations if a.name == "layer_offloading")
    found = Evidence(made, made.patched["layer_offloading"], None)
    assert toggle.audit(found) == LINEARS


def test_no_weight_stays_and_each_comes_twice_a_step():
    dense, made = arm(*PEFT), arm(*PEFT, "layer_offloading")
    size = sum(m.weight.nbytes for n, m in dense.model.named_modules() if n.endswith("base_layer"))
    assert all(not m.weight.numel() for n, m in made.model.named_modules() if n.endswith("base_layer"))
    gradients(made)
    told = made.ablations[-1].notes(Evidence(made, LINEARS, None))["layer_offloading"]
    first = 2 * 64 * 64 + 2 * 32 * 64 - 64 * 64  # q, k and v of the first layer need no dX
    assert told == {"linears": LINEARS, "host_bytes": size, "bytes_in": told["bytes_in"]}
    assert 2 * size - 4 * first - 4 * 64 * 64 <= told["bytes_in"] <= 2 * size


def test_nothing_of_the_weights_is_saved_for_backward():
    made, saved = arm(*PEFT, "layer_offloading"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        loss = made.step.forward(made.step.batches[0])
    made.step.backward(loss)
    assert (128, 64) not in saved and (64, 128) not in saved  # gate, up and down


def test_without_pinned_memory_it_is_one_line(monkeypatch):
    def refuse(self):
        raise RuntimeError("Cannot access accelerator device when none is available.\nmore")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with pytest.raises(Unsupported, match="host memory cannot be pinned, without which offloading waits") as raised:
        pinned(torch.ones(4))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["layer_offloading", "unsloth_checkpointing"])
def test_on_a_cpu_there_is_nothing_to_move_to(name):
    status, reason = refusal(cells(f"ablations=[{name}]")[-1], MACHINE)
    assert status == "unsupported" and "needs a CUDA device" in reason


@pytest.mark.parametrize("other", ["nf4_base", "lora_kernels", "qat", "torch_compile"])
def test_what_cannot_go_with_it(other):
    assert conflict([registry.ablation("layer_offloading"), registry.ablation(other)])


def test_weights_that_never_came_are_not_applied():
    made = arm(*PEFT, "layer_offloading")
    with pytest.raises(NotApplied, match="no frozen linear was copied"):
        made.ablations[-1].audit(Evidence(made, LINEARS, None))


# -- Unsloth's checkpointing ------------------------------------------------------------------------------------------


class Checkpointer(torch.autograd.Function):
    """The contract of unsloth_zoo's: a function and hidden states, which it keeps on the host."""

    kept = 0

    @staticmethod
    def forward(ctx, function, hidden, *args):
        ctx.save_for_backward(hidden.to("cpu", copy=True))
        Checkpointer.kept += 1
        ctx.function, ctx.args = function, args
        with torch.no_grad():
            return function(hidden, *args)

    @staticmethod
    def backward(ctx, grad):
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(hidden, *ctx.args)
        torch.autograd.backward(out, grad)
        return None, hidden.grad, *(None for _ in ctx.args)


class Zoo(types.ModuleType):
    """The package as it is where unsloth was not imported, whose import sets this variable."""

    folder = ""

    def __getattr__(self, name):
        if name != "Unsloth_Offloaded_Gradient_Checkpointer":
            raise AttributeError(name)
        if "UNSLOTH_IS_PRESENT" not in os.environ:
            raise ImportError("Please install Unsloth via `pip install unsloth`!")
        Zoo.folder = os.environ.get("UNSLOTH_COMPILE_LOCATION", "unsloth_compiled_cache")  # which the import makes
        return Checkpointer


@pytest.fixture
def zoo(monkeypatch):
    module = Zoo("unsloth_zoo.gradient_checkpointing")
    monkeypatch.setitem(sys.modules, "unsloth_zoo", types.ModuleType("unsloth_zoo"))
    monkeypatch.setitem(sys.modules, "unsloth_zoo.gradient_checkpointing", module)
    monkeypatch.setattr(Checkpointer, "kept", 0)


def test_unsloth_s_checkpointing_runs_every_layer_again_with_equal_gradients(zoo):
    plain, made = gradients(arm(*PEFT)), arm(*PEFT, "unsloth_checkpointing")
    ops = traced(lambda: run_trial(made))[1]
    assert Checkpointer.kept == LAYERS
    assert made.ablations[-1].audit(Evidence(made, made.patched["unsloth_checkpointing"], ops)) == LAYERS
    again = gradients(arm(*PEFT, "unsloth_checkpointing"))
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient)


def test_unsloth_s_package_writes_nothing_where_the_user_works(zoo, monkeypatch):
    """Its import makes a folder: in a checkout that made every record behind it one of uncommitted changes."""
    monkeypatch.delenv("UNSLOTH_COMPILE_LOCATION", raising=False)
    arm(*PEFT, "unsloth_checkpointing")
    assert os.path.isabs(Zoo.folder) and not Zoo.folder.startswith(os.getcwd())
    del os.environ["UNSLOTH_COMPILE_LOCATION"]


def test_under_dropout_its_masks_would_differ_so_it_refuses(zoo):
    with pytest.raises(Unsupported, match="other dropout masks in backward than in forward"):
        arm(*PEFT, "unsloth_checkpointing", **DROPOUT)


def test_layers_that_did_not_run_again_are_not_applied(zoo):
    made = arm(*PEFT, "unsloth_checkpointing")
    plain = traced(lambda: run_trial(arm(*PEFT)))[1]
    with pytest.raises(NotApplied, match="no layer ran again"):
        made.ablations[-1].audit(Evidence(made, LAYERS, plain))
