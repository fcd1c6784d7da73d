"""Losses without whole logits: each is transformers' loss and gradient, whatever the tiles, the labels and soft caps.
Sums over trained tokens, one division."""

import functools
import importlib.util

import pytest
import torch
from helpers import MACHINE, PEFT, arm
from torch import nn

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.batch import Sample
from lorabench.measure.judging.numerics import one_step
from lorabench.plan import registry
from lorabench_ablations.head_loss import Tiled, bind

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the package trl")
WAYS = [{"tiled_loss": {"rows": 5}}, {"tiled_loss": {"rows": 16}}, pytest.param("trl_fused_lm_head", marks=needs_trl)]
LONG, SHORT, HALF = list(range(3, 19)), [5, 6], list(range(20, 27))
UNEVEN = [  # trained tokens of 15, 1 and 3: a mean over samples or tiles would be another loss
    Sample(LONG, LONG), Sample(SHORT, SHORT), Sample(HALF, [-100] * 4 + HALF[4:]),
]  # fmt: skip


def family(model):
    return ("eager", *PEFT[1:]) if model == "tiny-gemma2" else PEFT


@functools.cache
def by_transformers(model):
    return one_step(arm(*family(model), model=model, samples=UNEVEN))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-gemma2"])  # the last caps its logits
def test_loss_and_gradients_are_transformers_s(way, model):
    plain, made = by_transformers(model), arm(*family(model), way, model=model, samples=UNEVEN)
    ours = one_step(made)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=2e-4, atol=1e-7)
    name = way if isinstance(way, str) else "tiled_loss"
    found = Evidence(made, made.patched[name], None)
    toggle = next(a for a in made.ablations if a.name == name)
    assert toggle.audit(found) == 1 and toggle.notes(found)[name]["calls"] == len(made.step.batches) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_one_row_and_of_all_give_the_same(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(24, 16, dtype=dtype), torch.randn(50, 16, dtype=dtype)
    targets = torch.randint(0, 50, (24,)).index_fill(0, torch.tensor([0, 23]), -100)
    found = []
    for rows in (1, 7, 24):
        x = hidden.clone().requires_grad_()
        loss = Tiled(rows)(x, weight, targets, None)
        (3 * loss).backward()
        found.append((loss.detach(), x.grad))
    for loss, gradient in found[:-1]:
        torch.testing.assert_close(loss, found[-1][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient, found[-1][1])
    x = hidden.float().requires_grad_()
    (3 * nn.functional.cross_entropy(x @ weight.float().T, targets, reduction="sum")).backward()
    assert (found[0][1].float() - x.grad).norm() < (1e-5 if dtype == torch.float32 else 0.02) * x.grad.norm()


def test_no_tensor_of_whole_logits_is_made():
    rows, entries = 4, 256  # a tile of tiny-llama
    made = arm(*PEFT, {"tiled_loss": {"rows": rows}})
    with torch.profiler.profile(record_shapes=True) as traced:
        made.step.backward(made.step.forward(made.step.batches[0]))
    shapes = [
        shape for event in traced.events() for shape in event.input_shapes or () if shape and shape[-1] == entries
    ]
    wide = [shape for shape in shapes if len(shape) > 1 and shape[0] not in (64, entries)]  # but for the head's own
    assert wide and all(shape[0] <= rows for shape in wide)


def test_under_checkpointing_and_beside_our_other_kernels():
    plain = one_step(arm(*PEFT))
    ours = one_step(arm(*PEFT, {"tiled_loss": {"rows": 5}}, "gradient_checkpointing", "lora_mlp_kernel", "fused_rope"))
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=2e-4, atol=1e-7)


def test_a_tile_that_divides_nothing_is_said():
    with pytest.raises(ValueError, match=r"rows: should be greater than 0, not 0"):
        registry.ablation({"tiled_loss": {"rows": 0}})
    made = arm(*PEFT, {"tiled_loss": {"rows": 4096}})
    one_step(made)
    with pytest.raises(NotApplied, match="a tile of 4096 rows divides nothing"):
        made.ablations[-1].audit(Evidence(made, 1, None))


def test_a_loss_that_nobody_asked_for_is_not_applied():
    made = arm(*PEFT, {"tiled_loss": {"rows": 4}})
    with pytest.raises(NotApplied, match="no loss of a training step"):
        made.ablations[-1].audit(Evidence(made, 1, None))


def test_a_trained_head_is_refused():
    model = arm(*PEFT).model
    model.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.raises(Unsupported, match="expected a frozen Linear"):
        bind(model, Tiled(4))


def test_in_evaluation_the_model_s_own_forward_runs():
    made = arm(*PEFT, {"tiled_loss": {"rows": 4}})
    made.model.eval()
    with torch.no_grad():
        assert made.model(**made.step.batches[0].inputs).logits.shape[-1] == 256


def test_the_reference_s_loss_can_be_taken_away():
    own = registry.ablation("transformers_loss")
    assert own.without_effect([registry.ablation("tiled_loss")], "float32") is None
    assert "has transformers' loss already" in str(own.without_effect([registry.ablation("sdpa")], "float32"))
    made = arm(*PEFT, "transformers_loss")
    assert own.audit(Evidence(made, 1, None)) == 1
    with pytest.raises(NotApplied, match="another toggle computes the loss"):
        tiled = arm(*PEFT, "tiled_loss")
        own.audit(Evidence(tiled, 1, None))


@pytest.mark.parametrize("kernels", ["lora_kernels", "liger"])
def test_kernels_with_a_loss_of_their_own_go_with_an_emptied_slot_alone(kernels):
    own = registry.ablation(kernels)
    assert conflict([own, registry.ablation("transformers_loss")]) is None
    assert "excludes tiled_loss" in str(conflict([own, registry.ablation("tiled_loss")]))


@pytest.mark.parametrize("name", ["liger_fused_linear_cross_entropy", "cut_cross_entropy"])
def test_what_is_written_in_triton_needs_a_gpu(name):
    assert "needs a CUDA device" in str(registry.ablation(name).requires.unmet(MACHINE))


def test_cut_cross_entropy_is_held_to_the_format_that_it_filters_by():
    toggle = registry.ablation("cut_cross_entropy")
    assert toggle.tolerance is not None and toggle.tolerance.grad < 0.05
    with pytest.raises(ValueError, match="filter_eps: should be 'high' or 'auto'"):
        registry.ablation({"cut_cross_entropy": {"filter_eps": "low"}})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["liger_fused_linear_cross_entropy", "cut_cross_entropy"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma2"])
def test_on_a_gpu_they_are_transformers_s_loss(name, model):
    if (lacks := registry.ablation(name).requires.unmet(MACHINE.model_copy(update={"device": "cuda"}))) is not None:
        pytest.skip(lacks)
    kwargs = {"model": model, "samples": UNEVEN, "device": "cuda", "dtype": torch.bfloat16}
    plain, ours = (one_step(arm(*family(model), *more, **kwargs)) for more in ((), (name,)))
    assert ours.loss == pytest.approx(plain.loss, rel=0.01)
    for tensor, gradient in plain.gradients.items():
        assert (ours.gradients[tensor] - gradient).norm() < 0.1 * gradient.norm(), tensor
