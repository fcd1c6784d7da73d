"""The gate: it passes what is right, and catches a gradient, a loss, an update or a tensor that is not."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT, arm

from lorabench.measure import numerics
from lorabench.measure.numerics import First, agree, explain, judge, share_masks, twin
from lorabench.plan.ablation import Tolerance


def outcomes(dtype, *names, overrides=()):
    def make(name, ablations, upcast):
        return arm(*ablations, dtype=dtype, layers=2, upcast=upcast, overrides=overrides)

    gold, low = twin(make, "gold", (), upcast=True), twin(make, "plain", (), upcast=False)
    return gold, low, twin(make, "candidate", names, upcast=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eager", "sdpa_math", "gradient_checkpointing", "adapters_in_compute_dtype"])
def test_right_toggles_pass(dtype, name):
    verdict = judge(*outcomes(dtype, name), dtype, ())
    assert verdict.passed, explain(verdict)
    assert verdict.tensors == 2 * 7 * 2
    assert verdict.grad_error <= verdict.grad_allowed < 0.2


def spoilt(change):
    gold, low, got = outcomes(torch.float32, *PEFT)
    change(got.gradients)
    return judge(gold, low, got, torch.float32, ())


def test_one_wrong_gradient_among_all_is_found_and_named():
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"

    def scale(gradients):
        gradients[name] *= 1.01

    verdict = spoilt(scale)
    assert not verdict.passed
    assert verdict.worst == name
    assert verdict.grad_error == pytest.approx(0.01, rel=0.05)
    assert name in explain(verdict)


def test_a_missing_tensor_and_a_gradient_that_is_not_finite_fail():
    verdict = spoilt(lambda g: g.pop(sorted(g)[0]))
    assert not verdict.passed and "differ from plain PEFT" in explain(verdict)
    nan = spoilt(lambda g: g[sorted(g)[0]].fill_(float("nan")))
    assert not nan.passed and nan.grad_error == float("inf")


def test_zero_gradients_fail():
    verdict = spoilt(lambda g: g[sorted(g)[3]].zero_())
    assert not verdict.passed and verdict.grad_error == pytest.approx(1.0)


def test_a_wrong_loss_and_a_wrong_update_fail():
    gold, low, got = outcomes(torch.float32, *PEFT)
    loss = judge(gold, low, numerics.Outcome(got.loss * 1.01, got.gradients, 0.0), torch.float32, ())
    assert not loss.passed and "loss is off" in explain(loss)
    update = judge(gold, low, numerics.Outcome(got.loss, got.gradients, 0.5), torch.float32, ())
    assert not update.passed and "first update" in explain(update)


def test_an_optimizer_that_is_no_adamw_is_noticed():
    made = arm(*PEFT)
    params = [p for _, p in made.adapters()]
    made.step.optimizer = torch.optim.SGD(params, lr=1e-4)
    assert numerics.one_step(made).update_error > 0.5
    assert numerics.one_step(arm(*PEFT)).update_error < 1e-5


def test_a_declared_tolerance_widens_the_gate_and_is_said():
    gold, low, got = outcomes(torch.float32, *PEFT)
    for g in got.gradients.values():
        g *= 1.05

    class Toggle:
        tolerance = Tolerance(words="rounds on purpose", grad=0.1)

    assert not judge(gold, low, got, torch.float32, ()).passed
    wide = judge(gold, low, got, torch.float32, (Toggle(),))
    assert wide.passed and wide.tolerance == "rounds on purpose"


def test_full_arms_must_agree_unless_dropout_makes_them_differ():
    gold, low, got = outcomes(torch.float32, *PEFT)
    verdict = judge(gold, low, got, torch.float32, ())
    same = agree(verdict, First(2.0, 1.0), First(2.0, 1.0), torch.float32, 0.0)
    assert same.passed
    loss = agree(verdict, First(2.0, 1.0), First(2.1, 1.0), torch.float32, 0.0)
    assert not loss.passed and "losses differ" in explain(loss)
    norm = agree(verdict, First(2.0, 1.0), First(2.0, 1.1), torch.float32, 0.0)
    assert not norm.passed and "gradient norms differ" in explain(norm)
    assert agree(verdict, First(2.0, 1.0), First(9.0, 1.0), torch.float32, 0.1).passed


def test_the_full_arms_are_held_no_tighter_than_a_declared_tolerance():
    four_bits = SimpleNamespace(tolerance=Tolerance(words="4 bits", grad=0.5, loss=0.05))
    verdict = judge(*outcomes(torch.float32, *PEFT), torch.float32, [four_bits])
    assert agree(verdict, First(2.0, 1.0), First(2.08, 1.4), torch.float32, 0.0).passed
    assert not agree(verdict, First(2.0, 1.0), First(2.12, 1.0), torch.float32, 0.0).passed
    assert not agree(verdict, First(2.0, 1.0), First(2.0, 1.6), torch.float32, 0.0).passed


def test_dropout_is_compared_under_one_shared_mask():
    overrides = ("lora.lora_dropout=0.3",)
    gold, low, got = outcomes(torch.float32, "eager", overrides=overrides)
    assert judge(gold, low, got, torch.float32, ()).passed
    plain = arm(*PEFT)
    assert share_masks(plain.model) == 0
    dropping = partial(arm, *PEFT, overrides=overrides)
    assert share_masks(dropping().model) == 3 * 7
    without = dropping()
    with torch.no_grad():
        torch.manual_seed(0)
        first = without.step.forward(without.step.batches[0])
        assert first != without.step.forward(without.step.batches[0])  # PEFT's own dropout draws anew each time
