"""The base in 4 bits: the numbers of every other arm, quantized; PEFT's own layers on it; a gate that stays tight where
both arms have it; our kernels over it. On the CPU, through bitsandbytes' CPU code."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT, cells, seat_of
from helpers import deep_arm as arm
from torch import nn

from lorabench.contract.ablation import Evidence, conflict
from lorabench.measure.gradient_kind import GradientKind
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.seat import Ready, WrongNumerics
from lorabench_ablations.loading import Nf4Base, quantized_weights

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")

LINEARS = 3 * 7  # tiny-llama: three layers, seven linears
SINGLE = {"nf4_base": {"bnb_4bit_use_double_quant": False}}


def base(made):
    return made.model.get_base_model()


def linears(made):
    """(name, the linear below the adapter) of everything but the head."""
    for name, module in base(made).model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module.base_layer


@pytest.mark.parametrize("toggle", ["nf4_base", SINGLE])
def test_every_linear_is_what_the_dense_arm_has_in_4_bits(toggle):
    dense, ours = arm(*PEFT, dtype=torch.bfloat16), arm(*PEFT, toggle, dtype=torch.bfloat16)
    double = toggle == "nf4_base"
    for (name, plain), (_, module) in zip(linears(dense), linears(ours), strict=True):
        packed, state = bitsandbytes.functional.quantize_4bit(
            plain.weight.data, quant_type="nf4", compress_statistics=double
        )
        assert torch.equal(module.weight, packed), name
        assert (module.weight.quant_state.nested, module.compute_dtype) == (double, torch.bfloat16)
        assert torch.equal(module.weight.quant_state.absmax, state.absmax)
        assert not module.weight.requires_grad
    rest = {n: p for n, p in base(ours).named_parameters() if "proj" not in n}
    assert len(rest) == 1 + 1 + 2 * 3 + 1  # embedding, head, norms
    assert all(torch.equal(p, base(dense).get_parameter(n)) for n, p in rest.items())
    assert type(base(ours).lm_head) is nn.Linear
    evidence = Evidence(ours, None, None)
    assert Nf4Base().audit(evidence) == LINEARS
    assert Nf4Base().notes(evidence)["nf4_base"]["kinds"] == [("nf4", double, 64, "torch.bfloat16")]
    assert Nf4Base().audit(Evidence(dense, None, None)) == 0


@pytest.mark.parametrize("precision", [(), ("adapters_in_compute_dtype",)])
def test_peft_puts_its_own_4_bit_layers_on_it(precision):
    from peft.tuners.lora.bnb import Linear4bit

    made = arm(*PEFT, "nf4_base", *precision, dtype=torch.bfloat16)
    layers = [m for m in made.model.modules() if hasattr(m, "lora_A")]
    assert len(layers) == LINEARS and all(type(m) is Linear4bit for m in layers)
    assert {p.dtype for _, p in made.adapters()} == {torch.bfloat16 if precision else torch.float32}


def test_biases_stay_as_they_are():
    dense, ours = (arm(*PEFT, *more, model="tiny-qwen2") for more in ([], ["nf4_base"]))
    pairs = [(a.bias, b.bias) for (_, a), (_, b) in zip(linears(dense), linears(ours), strict=True)]
    assert sum(a is not None for a, _ in pairs) == 3 * 3
    assert all(b is None if a is None else torch.equal(a, b) for a, b in pairs)


def test_given_weights_are_quantized_as_they_are(tmp_path):
    dense = arm(*PEFT)
    base(dense).get_parameter("model.norm.weight").data.fill_(1.5)
    plain = dense.model.unload()
    plain.save_pretrained(tmp_path)
    ours = arm(*PEFT, "nf4_base", overrides=(f"weights={tmp_path}",))
    packed, _ = bitsandbytes.functional.quantize_4bit(
        plain.get_submodule("model.layers.1.mlp.down_proj").weight.data, quant_type="nf4", compress_statistics=True
    )
    assert torch.equal(base(ours).get_submodule("model.layers.1.mlp.down_proj.base_layer").weight, packed)
    assert base(ours).get_parameter("model.norm.weight").eq(1.5).all()


def test_the_gold_is_float32_over_the_same_numbers():
    gold, low = (arm(*PEFT, "nf4_base", dtype=torch.bfloat16, upcast=u) for u in (True, False))
    assert {p.dtype for p in gold.model.parameters()} == {torch.float32}
    assert not quantized_weights(gold.model)
    for (name, plain), (_, module) in zip(linears(gold), linears(low), strict=True):
        wanted = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert type(plain) is nn.Linear and torch.equal(plain.weight, wanted.float()), name


def gated(cell, folder):
    """The gate of one cell in this process: the candidate's verdict, with the full arms' agreement left out."""
    seat, stack = seat_of(cell, folder, SimpleNamespace(device="cpu", dtype=lambda wanted: wanted))
    ready = Ready()
    seat._gate(stack, ready)
    return ready.numerics[""]


def cell(*overrides, dtype="bfloat16"):
    return next(c for c in cells(f"dtype={dtype}", *overrides) if c.toggles)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_where_both_arms_have_it_kernels_are_judged_as_tightly_as_over_dense_weights(dtype, tmp_path):
    verdict = gated(cell("reference=peft_nf4", "ablations=[lora_kernels]", dtype=dtype), tmp_path)
    dense = gated(cell("ablations=[lora_kernels]", dtype=dtype), tmp_path)
    assert verdict.passed and verdict.tolerance is None
    assert verdict.grad_allowed < 1.5 * dense.grad_allowed < 0.06
    for kept in ("*.safetensors", "*.noise.json"):
        assert len(list(tmp_path.glob(kept))) == 2  # the gold of dense weights is not that of the quantized base


@pytest.mark.parametrize(
    "overrides", [("reference=peft_nf4", "ablations=[lora_kernels]"), ("ablations=[[nf4_base,lora_kernels]]",)]
)
def test_a_kernel_that_is_wrong_by_a_tenth_over_a_quantized_base_does_not_pass(overrides, tmp_path, monkeypatch):
    from lorabench_ablations.lora_kernels import LoraKernels

    def wrong(self, model):
        sites = [m for m in model.modules() if hasattr(m, "lora_A")]
        for site in sites:
            site.scaling["default"] *= 1.1
        return len(sites)

    monkeypatch.setattr(LoraKernels, "patch", wrong)
    with pytest.raises(WrongNumerics, match="the gradient of"):
        gated(cell(*overrides), tmp_path)


@pytest.mark.parametrize("reference", ["peft", "[sdpa,padding,{nf4_base:{bnb_4bit_use_double_quant:false}}]"])
def test_against_another_base_it_is_held_against_its_own_weights_and_says_so(reference, tmp_path, monkeypatch):
    """Whether the reference is dense or quantized in another way, the gold is dense and has the arm's own numbers."""
    golds, plain = [], GradientKind._outcomes

    def outcomes(self, request):
        golds.append((request.name, request.ablations, request.dense))
        return plain(self, request)

    monkeypatch.setattr(GradientKind, "_outcomes", outcomes)
    verdict = gated(cell(f"reference={reference}", "ablations=[nf4_base]", dtype="float32"), tmp_path)
    assert golds[0] == ("gold", (Nf4Base(),), True)
    assert verdict.passed and verdict.tolerance == "frozen weights in 4 bits"
    assert verdict.grad_error < verdict.grad_allowed < 0.01


@pytest.mark.parametrize(
    "toggle",
    [
        "fp8_base",
        pytest.param("{fp8_base: {attention: false}}", marks=pytest.mark.exhaustive),
        pytest.param("{fp8_base: {keep: [down_proj]}}", marks=pytest.mark.exhaustive),
    ],
)
def test_products_with_rounded_weights_are_held_against_these_weights(toggle, tmp_path, monkeypatch):
    from lorabench_ablations.lora_kernels import Fp8Base

    def verdict(folder):
        folder.mkdir()
        return gated(cell(f"ablations=[{toggle}]", dtype="float32"), folder)

    own = verdict(tmp_path / "own")
    monkeypatch.setattr(Fp8Base, "rounds_weights", False)
    dense = verdict(tmp_path / "dense")
    assert own.passed and own.tolerance == dense.tolerance == Fp8Base.tolerance.words
    assert own.grad_error < 0.8 * dense.grad_error  # what is left is that the inputs and gradients are rounded


def test_adapters_that_are_not_everywhere_leave_the_yardstick_dense():
    assert cell("ablations=[fp8_base]").own_weights
    some = "models=[{tiny-llama: {target_modules: [q_proj]}}]"
    assert not cell("ablations=[fp8_base]", some).own_weights


def test_our_kernels_change_as_many_sites_and_keep_no_expanded_weight(monkeypatch):
    from lorakernels.nodes.projection import Projection

    expanded, plain = [], Projection._scratch

    def scratch(self, dtype):
        operand = plain(self, dtype)
        expanded.append(weakref.ref(operand.full))
        return operand

    monkeypatch.setattr(Projection, "_scratch", scratch)
    toggles = (*PEFT, "lora_kernels", "adapters_in_compute_dtype")
    dense = arm(*toggles, dtype=torch.bfloat16)
    ours = arm(*toggles, "nf4_base", dtype=torch.bfloat16)
    assert ours.patched["lora_kernels"] == dense.patched["lora_kernels"] > 0
    loss = ours.step.forward(ours.step.batches[0])
    gc.collect()
    assert len(expanded) == 3 * 4  # qkv, o, gate and up, down
    assert not any(full() is not None for full in expanded)
    ours.step.backward(loss)
    assert len(expanded) == 2 * 3 * 4  # made again


def test_checkpointing_over_it_changes_nothing():
    plain, again = (one_step(arm(*PEFT, "nf4_base", *more)) for more in ([], ["gradient_checkpointing"]))
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(again.gradients[name], gradient)


def test_what_cannot_go_with_it():
    from lorabench_ablations.limit import FrozenLimit
    from lorabench_ablations.lora_kernels import Fp8Base

    for other in (Fp8Base(), FrozenLimit()):
        assert "nf4_base excludes" in str(conflict([Nf4Base(), other]))
