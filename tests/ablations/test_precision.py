"""In what format the frozen linears multiply: torchao's float8 and quantization-aware training, and TF32. On the CPU,
where float8 is emulated."""

import importlib.util
from collections import Counter

import pytest
import torch
from helpers import MACHINE, PEFT
from helpers import deep_arm as arm

from lorabench.contract.ablation import Evidence, NotApplied, conflict
from lorabench.contract.batch import Batch
from lorabench.measure.judging.numerics import judge, one_step
from lorabench.measure.profile import traced
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations.precision import Float8Training, Qat, Tf32

LINEARS = 3 * 7  # tiny-llama: three layers, seven linears
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")
ON_A_GPU = MACHINE.model_copy(update={"device": "cuda", "gpus": 1, "capability": (9, 0)})


def toggle(made):
    return made.ablations[-1]


@needs_torchao
@pytest.mark.parametrize("way", ["float8_training", {"float8_training": {"recipe": "tensorwise"}}, "qat"])
def test_every_frozen_linear_rounds_and_adapters_do_not(way):
    dense, made = one_step(arm(*PEFT)), arm(*PEFT, way)
    assert toggle(made).audit(Evidence(made, made.patched[toggle(made).name], None)) == LINEARS
    adapters = [m for n, m in made.model.named_modules() if "lora_A." in n or "lora_B." in n]
    assert {type(m) for m in adapters} == {torch.nn.Linear}
    got = one_step(made)
    errors = [float((got.gradients[n] - g).norm() / g.norm()) for n, g in dense.gradients.items()]
    assert 0.01 < max(errors) < 0.5 == toggle(made).tolerance.grad
    assert got.loss == pytest.approx(dense.loss, rel=toggle(made).tolerance.loss)
    assert not judge(dense, dense, got, torch.float32, []).passed


@needs_torchao
def test_the_gold_of_qat_holds_the_rounded_weights():
    """Against these only the rounding of the inputs is left to be off by."""
    dense, gold, made = arm(*PEFT), arm(*PEFT, "qat", upcast=True), arm(*PEFT, "qat")
    held = {n: m for n, m in gold.model.named_modules() if n.endswith("base_layer")}
    assert len(held) == LINEARS
    for name, linear in held.items():
        rounded = made.model.get_submodule(name)
        assert torch.equal(linear.weight, rounded.weight_fake_quantizer(rounded.weight))
        assert not torch.equal(linear.weight, dense.model.get_submodule(name).weight)
    right, got, plain = one_step(gold), one_step(made), one_step(dense)
    off = [
        max(float((other.gradients[n] - g).norm() / g.norm()) for n, g in got.gradients.items())
        for other in (right, plain)
    ]
    assert off[0] < 0.5 * off[1]


@needs_torchao
def test_an_adapter_of_a_rank_that_is_not_divisible_is_let_alone():
    made = arm(*PEFT, "float8_training", overrides=("lora.r=5",))
    assert made.patched["float8_training"] == LINEARS
    assert one_step(made).loss > 0


def test_on_a_gpu_float8_refuses_tokens_that_its_products_do_not_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    toggle = registry.ablation("float8_training")
    fits, not_so = (Batch({"input_ids": torch.zeros(2, n, dtype=torch.long)}, 2 * n, 0, 2 * n) for n in (24, 25))
    assert toggle.collate(fits) is fits
    with pytest.raises(NotApplied, match="a micro-batch has 50 tokens"):
        toggle.collate(not_so)


@needs_torchao
def test_float8_computes_the_gradient_of_frozen_weights_where_it_is_not_compiled():
    """Which is why the toggle says to put torch_compile beside it."""

    def products(*more):
        made = arm(*PEFT, *more)
        ops: Counter = traced(lambda: run_trial(made))[1]
        return ops["aten::mm"] + ops["aten::addmm"] + ops["aten::_scaled_mm"]

    assert products("float8_training") > products()


def test_what_it_needs_is_said():
    old = ON_A_GPU.model_copy(update={"capability": (8, 0)})
    assert "CUDA capability 8.9 or newer; this one has 8.0" in str(Float8Training.requires.unmet(old))
    lacking = [Float8Training.requires.unmet(machine) for machine in (ON_A_GPU, MACHINE)]
    assert all(reason is None or "the package torchao" in reason for reason in lacking)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"float8_training": {"recipe": "blockwise"}}, "should be 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"),
        ({"qat": {"group_size": 20}}, "should be a multiple of 16, not 20"),
    ],
)
def test_wrong_input_is_one_line(given, expected):
    with pytest.raises(ValueError, match=expected):
        registry.ablation(given)


@pytest.mark.parametrize("made", [Float8Training(), Qat()])
@pytest.mark.parametrize("other", ["lora_kernels", "fp8_base", "lora_qkv_kernel", "nf4_base", "axolotl"])
def test_what_multiplies_itself_or_is_quantized_cannot_go_with_it(made, other):
    assert conflict([made, registry.ablation(other)])
    assert conflict([made, registry.ablation("liger")]) is None


def test_nothing_that_fits_is_not_applied():
    with pytest.raises(NotApplied, match="sizes divisible by 16"):
        Qat().audit(Evidence(arm(*PEFT), 0, None))


def test_tf32_is_the_process_s_own_and_is_put_where_float32_is(monkeypatch):
    was = torch.get_float32_matmul_precision()
    try:
        made = arm(*PEFT, "tf32")
        found = Evidence(made, made.patched["tf32"], None)
        assert Tf32.global_patch and Tf32.switches == ("torch.set_float32_matmul_precision",)
        assert Tf32().audit(found) == made.patched["tf32"] == LINEARS * 3 + 1
        torch.set_float32_matmul_precision("highest")
        assert Tf32().audit(found) == 0
        low = arm(*PEFT, "adapters_in_compute_dtype", "tf32", dtype=torch.bfloat16)
        with pytest.raises(NotApplied, match="no linear holds float32"):
            Tf32().audit(Evidence(low, low.patched["tf32"], None))
    finally:
        torch.set_float32_matmul_precision(was)


def test_tf32_says_beforehand_where_nothing_is_float32():
    low = [registry.ablation("adapters_in_compute_dtype")]
    assert "nothing is multiplied in float32" in str(Tf32().without_effect(low, "bfloat16"))
    assert Tf32().without_effect([], "bfloat16") is None and Tf32().without_effect(low, "float32") is None
    assert Tf32().requires.unmet(ON_A_GPU) is None and "needs a CUDA device" in str(Tf32().requires.unmet(MACHINE))
