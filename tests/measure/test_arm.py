"""Arms: same seed, same numbers, whatever the toggles; a step whose gradients do not depend on its batches."""

from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT, arm, random_samples

from lorabench.contract.ranks import ONE
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.judging.witness import Witness
from lorabench.measure.trial import Trial, of_turn, run_rounds, run_trial, trials_a_turn, warm_up


def tensors(made):
    return {n: p.detach() for n, p in made.model.named_parameters()}


@pytest.mark.parametrize("toggle", ["eager", "gradient_checkpointing", "adamw_fused", "packing"])
def test_same_seed_same_weights_whatever_the_toggle(toggle):
    one, two = tensors(arm(*PEFT)), tensors(arm(toggle))
    assert set(one) == set(two)
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_lora_b_starts_non_zero_and_adapters_do_not_depend_on_their_precision():
    high, low = arm(*PEFT, dtype=torch.bfloat16), arm(*PEFT, "adapters_in_compute_dtype", dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(high.adapters(), low.adapters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(a, b.float()), name
        if "lora_B" in name:
            assert a.std().item() == pytest.approx(0.02, rel=0.2)


def test_the_shallow_model_has_the_full_model_s_weights():
    full, twin = tensors(arm(*PEFT)), tensors(arm(*PEFT, layers=1))
    assert set(twin) < set(full)
    assert all(torch.equal(full[n], twin[n]) for n in twin)


def test_another_seed_gives_other_weights():
    spec = arm(*PEFT)
    name, first = next(iter(tensors(spec).items()))
    from lorabench.measure.build import fill_weights

    fill_weights(spec.model, torch.float32, 1)
    assert not torch.equal(arm(*PEFT).model.get_parameter(name), first)


def test_float16_starts_backward_from_the_summed_loss():
    """… and hands out, and learns from, the gradients of the mean."""
    low, gold = arm(*PEFT, dtype=torch.float16), arm(*PEFT, dtype=torch.float16, upcast=True)
    items = low.step.items
    assert items / 2 < low.step.loss_scale <= items and low.step.loss_scale.is_integer()
    assert arm(*PEFT).step.loss_scale == arm(*PEFT, dtype=torch.bfloat16).step.loss_scale == 1
    got, wanted = one_step(low), one_step(gold)
    for name, gradient in wanted.gradients.items():
        assert (got.gradients[name] - gradient).norm() < 0.02 * gradient.norm(), name
    assert got.update_error is not None and got.update_error < 1e-3
    loss = low.step.forward(low.step.batches[0])
    low.step.clear()
    low.step.backward(loss)
    name, parameter = next(low.adapters())
    assert torch.equal(parameter.grad.float() / low.step.loss_scale, low.gradients()[name])
    scaled = parameter.grad.clone()
    low.step.update()
    assert torch.allclose(parameter.grad, scaled / low.step.loss_scale)


def test_gradients_of_scaled_arms_are_those_of_the_mean(tmp_path):
    stepped, not_stepped = arm(*PEFT, dtype=torch.float16), arm("sdpa", "no_optimizer", "padding", dtype=torch.float16)
    one, other = (gradients_of_a_trial(made, tmp_path) for made in (stepped, not_stepped))
    for name, gradient in one.items():
        assert (gradient - other[name]).norm() < 1e-3 * gradient.norm(), name


def gradients_of_a_trial(made, folder):
    witness = Witness(made, made.step, folder)
    run_trial(made)
    return witness.gradients(made.outs[0])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma", "gemma2"])
def test_gradients_do_not_depend_on_the_batches_of_a_step(family):
    samples = random_samples([5, 9, 3, 7])
    feeds = [Workload(name="t", kind="fixed", batch_size=b, seq_len=16) for b in (1, 4)]
    one, many = (
        one_step(arm("eager", "adamw", "padding", model=f"tiny-{family}", samples=samples, workload=feed))
        for feed in feeds
    )
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, many.gradients[name], rtol=1e-3, atol=1e-6)


def test_a_trial_times_each_phase_and_takes_a_step():
    made = arm(*PEFT)
    before = {n: p.clone() for n, p in made.adapters()}
    trial = run_trial(made)
    assert set(trial.device_ms) == {"forward", "backward", "step"}
    assert min(trial.device_ms.values()) > 0
    assert trial.total_ms == pytest.approx(sum(trial.device_ms.values()))
    assert trial.ended > trial.began
    assert all(not torch.equal(p, before[n]) for n, p in made.adapters())


def test_every_trial_runs_one_fresh_forward_and_one_backward(monkeypatch):
    made, calls = arm(*PEFT), []
    step = made.step
    for phase in ("cleared", "forward", "backward", "update"):
        original = getattr(step, phase)
        monkeypatch.setattr(step, phase, lambda *a, p=phase, o=original: (calls.append(p), o(*a))[1])
    run_trial(made)
    assert calls == ["cleared", "forward", "backward", "update"]


def test_each_arm_has_a_turn_in_every_round_in_random_order(monkeypatch):
    one, two = arm(*PEFT), arm("eager")
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(one.kind, "feed", lambda arm, number: ran.append((arm.name, number)))
    assert one.kind is two.kind
    one.name, two.name = "reference", "candidate"
    done = run_rounds({"reference": one, "candidate": two}, 8, seed=0, a_turn=2)
    assert {len(ms) for rounds in done.values() for ms in rounds.ms.values()} == {8}
    assert {len(rounds.losses) for rounds in done.values()} == {16}
    rounds = [ran[n : n + 4] for n in range(0, len(ran), 4)]
    assert all(sorted(r) == [(n, i) for n in ("candidate", "reference") for i in (2 * k + 1, 2 * k + 2)]
               for k, r in enumerate(rounds))  # fmt: skip
    assert {r[0][0] for r in rounds} == {"reference", "candidate"} and all(r[0][0] == r[1][0] for r in rounds)


def test_the_first_trial_of_a_turn_does_not_count():
    made = [Trial({"forward": ms}, {}, {}, 0.0, 0.0) for ms in (9.0, 1.0, 2.0, 4.0)]
    assert of_turn(made)[1] == {"forward": 2.0} and of_turn(made[:1])[1] == {"forward": 9.0}
    assert [trials_a_turn(ms) for ms in (0.0, 1.0, 30.0, 99.0, 500.0)] == [20, 20, 3, 1, 1]


def test_warm_up_goes_on_while_trials_still_get_faster(monkeypatch):
    times = iter([100.0, 50.0, 20.0, 19.0, 19.0])

    class Fake:
        def __init__(self, total):
            self.total_ms = total

    monkeypatch.setattr("lorabench.measure.trial.run_trial", lambda arm: Fake(next(times)))
    assert [t.total_ms for t in warm_up(SimpleNamespace(ranks=ONE), 2)] == [100.0, 50.0, 20.0, 19.0]


@pytest.mark.parametrize(
    "ms, wanted, taken", [(10.0, 5, 5), (400.0, 5, 3), (900.0, 5, 2), (4000.0, 5, 2), (4000.0, 1, 1), (4000.0, 2, 2)]
)
def test_of_long_trials_two_warm_an_arm_up(ms, wanted, taken):
    arm = SimpleNamespace(ranks=ONE)
    assert len(warm_up(arm, wanted, lambda: SimpleNamespace(total_ms=ms))) == taken


def test_the_loss_is_transformers_own_for_one_batch():
    made = arm(*PEFT)
    batch = made.step.batches[0]
    ours = made.step.forward(batch)
    theirs = made.model(input_ids=batch.inputs["input_ids"], labels=batch.inputs["input_ids"]).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
