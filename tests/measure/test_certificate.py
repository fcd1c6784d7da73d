"""What was timed is certified: the evidence of two arms is held together, and what differs is named."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import PEFT, arm, request

from lorabench.contract.ablation import Tolerance
from lorabench.measure import depth_noise, numerics
from lorabench.measure.certificate import MOST, certify
from lorabench.measure.trial import run_rounds, run_trial
from lorabench.measure.witness import SKETCH, Witness, sketch


def evidence(made, folder, rounds=4, spoil=lambda made, number: None):
    """One arm's testimony over these rounds, as a cell takes it; `spoil` is called before each timed trial."""
    made.kind.first(made, lambda: run_trial(made), replace(request(), scratch=folder))
    made.kind.begin(made)

    def tell(number):
        spoil(made, number)

    run_rounds({"candidate": made}, rounds, 0, tell, lambda name, done: made.kind.seen(made, done.losses))
    made.kind.feed(made, rounds + 1)
    made.kind.last(made, lambda: run_trial(made))
    return made.witnesses[0].testimony


def failed(checks):
    return {c.name for c in checks if not c.passed}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return evidence(arm(*PEFT), tmp_path_factory.mktemp("reference"))


def test_right_arms_are_certified_whatever_they_warmed_up(reference, tmp_path):
    for names in (PEFT, ("eager",), ("gradient_checkpointing",), ("adamw_fused",)):
        made = arm(*names)
        checks = certify(reference, evidence(made, tmp_path), torch.float32)
        assert not failed(checks) and len(checks) == 16, (names, failed(checks))


def after(trials, change):
    """Spoil an arm from this trial on."""
    return lambda made, number: change(made) if number == trials else None


def no_backward(made):
    made.step.backward = lambda loss: None


def no_update(made):
    made.step.update = lambda: None


def other_rate(made):
    made.step.optimizer.param_groups[0]["lr"] *= 1.01


def no_decay(made):
    made.step.optimizer.param_groups[0]["weight_decay"] = 0.0


def same_tokens(made):
    made.feeds = [lambda number: None]


def scaled(made):
    _, p = next(made.adapters())
    p.register_hook(lambda grad: 1.02 * grad)


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        (no_backward, "each gradient of each trial"),
        (no_update, "the candidate's update against AdamW on its own gradients"),
        (other_rate, "the candidate's update against AdamW on its own gradients"),
        (no_decay, "the candidate's update against AdamW on its own gradients"),
        (same_tokens, "the loss of each trial"),
        (scaled, "the scale of each gradient of each trial"),
    ],
)
def test_what_goes_wrong_after_the_warm_up_is_caught(reference, tmp_path, change, caught):
    found = certify(reference, evidence(arm(*PEFT), tmp_path, spoil=after(2, change)), torch.float32)
    assert caught in failed(found)


def with_noise(testimony, later):
    """A testimony of a model in which two right runs agree, and a step moves each gradient by `later`."""
    tensors = dict.fromkeys(testimony.names, (0.0, 0.0))
    moved = depth_noise.DepthNoise(dict.fromkeys(testimony.names, (later, 0.0)), 0.0, 0.0)
    return replace(testimony, noise=depth_noise.DepthNoise(tensors, 0.0, 0.0, later=moved))


def test_a_trial_may_differ_by_what_the_distance_of_the_parameters_does_and_not_by_its_number(reference):
    def checks(apart, off):
        places = [p + apart / p.size**0.5 for p in reference.places]
        sketches = [s * (1 + off) for s in reference.sketches]
        other = replace(reference, places=places, sketches=sketches)
        found = certify(with_noise(reference, 0.02), other, torch.float32)
        return {c.name: c for c in found}["each gradient of each trial"]

    assert len(reference.places) == len(reference.losses) == 4
    assert not checks(apart=0, off=0.01).passed and checks(apart=0, off=0).allowed < 1e-3
    assert checks(apart=1, off=0.01).passed and not checks(apart=1, off=0.05).passed
    assert checks(apart=3, off=0.05).passed
    assert not checks(apart=1000, off=-1).passed  # no gradient at all


def test_how_far_parameters_are_apart_is_counted_in_steps(tmp_path):
    made = arm(*PEFT)
    made.kind.first(made, lambda: run_trial(made), replace(request(), scratch=tmp_path))
    witness = made.witnesses[0]
    before, rate = witness._place(), made.step.job.learning_rate
    with torch.no_grad():
        for _, p in made.adapters():
            p.add_(rate * torch.randn(p.shape).sign())
    assert np.linalg.norm(witness._place() - before) == pytest.approx(1, rel=0.1)


def test_adapters_in_16_bits_may_fall_behind_and_still_have_to_be_right(tmp_path):
    rounds = 8
    names = (*PEFT, "adapters_in_compute_dtype")
    plain = arm(*PEFT, dtype=torch.bfloat16)
    noise = depth_noise.measure(plain, partial(numerics.one_pass, plain, plain.step))
    right = replace(evidence(plain, tmp_path, rounds), noise=noise)
    low = evidence(arm(*names, dtype=torch.bfloat16), tmp_path, rounds)
    assert not failed(certify(right, low, torch.bfloat16))
    apart = [float(np.linalg.norm(a - b)) for a, b in zip(right.places, low.places, strict=True)]
    assert 0.3 < apart[0] < 1 < apart[-1]
    spoilt = evidence(arm(*names, dtype=torch.bfloat16), tmp_path, rounds, spoil=after(rounds - 1, no_backward))
    assert "each gradient of each trial" in failed(certify(right, spoilt, torch.bfloat16))


def test_a_phase_that_only_one_arm_has_is_named(reference):
    (check,) = [c for c in certify(reference, replace(reference, phases=("forward",)), torch.float32) if not c.passed]
    assert check.name == "phases that only one arm has" and check.where == "backward, step"


def test_evidence_of_numbers_that_are_not_finite_fails(reference):
    sketches = [s.copy() for s in reference.sketches]
    sketches[1][0, 0] = np.nan
    found = certify(reference, replace(reference, sketches=sketches, losses=[float("nan")] * 4), torch.float32)
    assert failed(found) >= {"the loss of each trial", "each gradient of each trial"}


@pytest.mark.parametrize("tolerance", [Tolerance(words="anything", grad=9.0, loss=9.0), None])
def test_an_arm_without_a_gradient_fails_whatever_is_declared(reference, tmp_path, tolerance):
    made = arm(*PEFT)
    made.step.backward = lambda loss: None
    testimony = evidence(made, tmp_path, rounds=1)
    checks = {c.name: c for c in certify(reference, testimony, torch.bfloat16, [tolerance] if tolerance else [])}
    assert not checks["each gradient before the trials"].passed
    assert checks["each gradient before the trials"].allowed <= MOST


def test_what_two_right_runs_differ_by_is_measured_at_full_depth():
    made = arm(*PEFT, dtype=torch.bfloat16)
    start = {n: p.detach().clone() for n, p in made.adapters()}
    noise = depth_noise.measure(made, partial(numerics.one_pass, made, made.step))
    assert noise.later and 0.01 < np.median([error for error, _ in noise.later.tensors.values()]) < 0.2
    assert all(torch.equal(p, start[n]) for n, p in made.adapters())
    errors = [error for error, _ in noise.tensors.values()]
    assert 0.004 < np.median(errors) < 0.05 and noise.masks is None and 0 < noise.loss < 1e-3
    other = arm("sdpa_math", dtype=torch.bfloat16)
    _, gradients = numerics.one_pass(made, made.step)
    _, others = numerics.one_pass(other, other.step)
    for name, gradient in gradients.items():
        found = depth_noise.distance(others[name], gradient)
        assert found.error < 3 * max(noise.tensors[name][0], np.median(errors)), name
    assert not any(m._forward_hooks for m in made.model.modules())


def test_noise_under_dropout_is_that_of_the_masks(tmp_path):
    made = arm(*PEFT, overrides=("lora.lora_dropout=0.1",))
    noise = depth_noise.measure(made, partial(numerics.one_pass, made, made.step))
    assert noise.masks and np.median([e for e, _ in noise.masks.tensors.values()]) > 0.05
    assert np.median([e for e, _ in noise.tensors.values()]) < 1e-5
    file = tmp_path / "noise.json"
    assert depth_noise.cached(file, lambda: noise) == noise == depth_noise.read(file)
    assert depth_noise.cached(tmp_path / "none.json", lambda: None) is None


def test_a_sketch_keeps_lengths_angles_and_factors():
    generator = torch.Generator().manual_seed(0)
    a, e = (torch.randn(5000, generator=generator) for _ in range(2))
    plain, doubled, noisy = (sketch({"a": t})[0] for t in (a, 2 * a, a + 0.1 * e))
    assert plain.shape == (SKETCH,) and np.allclose(doubled, 2 * plain)
    assert np.linalg.norm(plain) == pytest.approx(float(a.norm()), rel=0.4)
    assert np.linalg.norm(noisy - plain) == pytest.approx(float(0.1 * e.norm()), rel=0.4)


def test_both_arms_start_the_timed_trials_where_the_first_one_ended(tmp_path):
    made = arm(*PEFT)
    made.kind.first(made, lambda: run_trial(made), replace(request(), scratch=tmp_path))
    once = {n: p.detach().clone() for n, p in made.adapters()}
    state = [t.clone() for s in made.step.optimizer.state.values() for t in s.values()]
    for _ in range(3):
        run_trial(made)
    made.kind.begin(made)
    assert all(torch.equal(p, once[n]) for n, p in made.adapters())
    again = [t for s in made.step.optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True))


def test_gradients_that_stay_in_their_buffers_are_made_useless_before_a_trial(tmp_path):
    made = arm(*PEFT)
    run_trial(made)
    made.step.keeps_gradients = True
    made.kind.clear(made)
    assert all(p.grad is not None and p.grad.isnan().all() for _, p in made.adapters())
    assert isinstance(Witness(made, made.step, tmp_path).gradients([]), dict)


def test_a_reference_that_rounds_its_updates_on_purpose_is_allowed_its_own_tolerance(reference):
    name = "the reference's update against AdamW on its own gradients"
    rounding = replace(reference, update_errors=[(0.05, "w")])
    declared = [Tolerance(words="states in 8 bits", update=0.1)]
    assert name in failed(certify(rounding, reference, torch.float32, declared))
    assert name not in failed(certify(rounding, reference, torch.float32, declared, declared))
