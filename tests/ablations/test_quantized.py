"""Bases in 8 bits and in other packages' forms: the numbers of every other arm, quantized; PEFT's own layers on them; a
gate that looks at the first layer, which a backward without dX leaves with nothing. On the CPU; a package that is not
installed is skipped and said."""

import importlib.util

import pytest
import torch
from helpers import MACHINE, PEFT
from helpers import deep_arm as arm
from torch import nn

from lorabench.contract.ablation import Evidence, conflict
from lorabench.measure.judging import numerics
from lorabench.measure.judging.numerics import judge, one_step
from lorabench.plan import registry
from lorabench_ablations.loading import linears

LINEARS = 3 * 7  # tiny-llama: three layers, seven linears
PACKAGE = {"load_in_8bit": "bitsandbytes", "torchao_int8": "torchao", "torchao_fp8": "torchao", "hqq": "hqq"}
# Relative error of a weight: half a step of the format at the largest of a row, or of a group.
ROUNDED = {"load_in_8bit": 0.01, "torchao_int8": 0.01, "torchao_fp8": 0.04, "hqq": 0.12}


def lacking(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs the package {package}")


each = pytest.mark.parametrize("name", [pytest.param(n, marks=lacking(p)) for n, p in PACKAGE.items()])
torchao = lacking("torchao")


def on_gpu(capability):
    return MACHINE.model_copy(update={"device": "cuda", "gpus": 1, "capability": capability})


def toggle(made, name):
    return next(a for a in made.ablations if a.name == name)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gold_holds_the_numbers_that_the_base_multiplies_with(name, dtype):
    dense, gold, ours = (
        arm(*PEFT, dtype=dtype),
        arm(*PEFT, name, dtype=dtype, upcast=True),
        arm(*PEFT, name, dtype=dtype),
    )
    found = Evidence(ours, None, None)
    assert toggle(ours, name).audit(found) == LINEARS == toggle(ours, name).notes(found)[name].get("linears", LINEARS)
    assert {p.dtype for p in gold.model.parameters()} == {torch.float32}
    held = {n: m.weight for n, m in linears(gold.model.get_base_model()).items() if n.endswith("base_layer")}
    assert len(held) == LINEARS
    for where, weight in held.items():
        plain = dense.model.get_base_model().get_submodule(where).weight.float()
        assert 0 < (weight - plain).norm() < ROUNDED[name] * plain.norm(), where
        base = ours.model.get_base_model().get_submodule(where)
        eye = torch.eye(weight.shape[1], dtype=dtype)
        torch.testing.assert_close(base(eye).T.float(), weight, rtol=0.02, atol=1e-4)


@each
def test_loss_and_every_gradient_are_those_of_the_dequantized_weights(name):
    gold, ours = one_step(arm(*PEFT, name, upcast=True)), one_step(arm(*PEFT, name))
    assert ours.loss == pytest.approx(gold.loss, rel=1e-5)
    for tensor, gradient in gold.gradients.items():
        torch.testing.assert_close(ours.gradients[tensor], gradient, rtol=1e-3, atol=1e-7)


@each
def test_over_dense_weights_the_gate_passes_by_what_is_declared(name):
    dense, made = one_step(arm(*PEFT)), arm(*PEFT, name)
    verdict = judge(dense, dense, one_step(made), torch.float32, [toggle(made, name).tolerance])
    assert verdict.passed and verdict.tolerance
    assert not judge(dense, dense, one_step(arm(*PEFT, name)), torch.float32, []).passed


@torchao
def test_a_base_whose_backward_drops_dx_does_not_pass():
    """torchao's int8 *dynamic* form, which transformers calls trainable: the loss is right, and so are the gradients of
    the last linears."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    dense, made = one_step(arm(*PEFT)), arm(*PEFT)
    quantize_(made.model, Int8DynamicActivationInt8WeightConfig(), lambda m, n: n.endswith("base_layer"))
    got = one_step(made)
    assert got.loss == pytest.approx(dense.loss, rel=1e-3)
    verdict = judge(
        dense, dense, got, torch.float32, [registry.ablation("torchao_fp8").tolerance]
    )  # as much as any may declare
    assert not verdict.passed and "layers.0" in verdict.worst
    assert verdict.grad_error is not None and verdict.grad_error > 0.9


@torchao
@pytest.mark.parametrize("name", ["torchao_int8", "torchao_fp8"])
def test_our_kernels_leave_these_linears_to_peft_and_are_right(name):
    ours = arm(*PEFT, name, "lora_kernels")
    plain, got = one_step(arm(*PEFT, name)), one_step(ours)
    left = registry.ablation("lora_kernels").notes(Evidence(ours, ours.patched["lora_kernels"], None))
    assert left["lorakernels"]["left"], "nothing was left to PEFT"
    for tensor, gradient in plain.gradients.items():
        torch.testing.assert_close(got.gradients[tensor], gradient, rtol=1e-3, atol=1e-7)


@each
def test_no_two_forms_of_a_base(name):
    assert "both fill the slot loading" in str(conflict([registry.ablation(name), registry.ablation("nf4_base")]))
    assert "excludes fp8_base" in str(conflict([registry.ablation(name), registry.ablation("fp8_base")]))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_what_cannot_be_beside_the_others_says_why(name):
    for machine in (MACHINE, on_gpu((9, 0))):
        assert "GPTQModel" in str(registry.ablation(name).requires.unmet(machine))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"load_in_8bit": {"llm_int8_threshold": -1}}, "llm_int8_threshold: should be greater than or equal to 0"),
        ({"hqq": {"nbits": 5}}, "expected 8, 4, 3, 2 or 1"),
        ({"hqq": {"group_size": 7}}, "group_size: should be a multiple of 8"),
    ],
)
def test_wrong_input_is_one_line(given, expected):
    with pytest.raises(ValueError, match=expected):
        registry.ablation(given)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_an_fp8_base_on_a_gpu_that_has_none_is_one_line(capability):
    machine = on_gpu(capability)
    have = ".".join(map(str, capability))
    assert registry.ablation("fp8_base").requires.unmet(machine) == (
        f"needs a GPU with FP8, CUDA capability 8.9 or newer; this one has {have}"
    )
    assert "capability 8.9 or newer" in str(registry.ablation("float8_training").requires.unmet(machine))


def test_an_fp8_base_without_attention_is_another_arm_and_says_so_where_it_is_pasted():
    for given, attention, more in (
        ("fp8_base", True, ""),
        ({"fp8_base": {"attention": False}}, False, "fp8_attention=False, "),
    ):
        assert registry.ablation(given).settings().code == (f"lorakernels.apply(model, {more}fp8=True)",)
        made = arm(*PEFT, given)
        layers = [m._lorakernels for m in made.model.modules() if hasattr(m.__dict__.get("_lorakernels"), "groups")]
        groups = [g for layer in layers for g in layer.groups]
        assert {g.fp8 is not None for g in groups if "self_attn" in g.members[0].name} == {attention}
        assert {g.fp8 is not None for g in groups if "mlp" in g.members[0].name} == {True}
    kept = registry.ablation({"fp8_base": {"keep": ["v_proj", "o_proj"]}}).settings().code
    assert "fp8=True" in kept[0] and "fp8_except=('v_proj', 'o_proj')" in kept[0]


def test_the_heads_stay_dense():
    made = arm(*PEFT, "load_in_8bit") if importlib.util.find_spec("bitsandbytes") else arm(*PEFT)
    assert type(made.model.get_base_model().lm_head) is nn.Linear
    assert numerics.one_step(made).loss > 0


@lacking("bitsandbytes")
@pytest.mark.gpu
def test_what_lies_on_a_gpu_is_quantized_there():
    """bitsandbytes' own `to` quantizes on the way from the host alone."""
    linear = nn.Linear(64, 48, bias=False, device="cuda", dtype=torch.bfloat16)
    eight = registry.ablation("load_in_8bit")
    made = eight.quantized(linear)
    assert made.weight.dtype == torch.int8 and made.weight.is_cuda
    torch.testing.assert_close(eight.dense(made), linear.weight.float(), rtol=0, atol=0.01 * float(linear.weight.max()))
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    assert (made(x) - linear(x)).norm() < 0.03 * linear(x).norm()
