"""What was timed is certified: the evidence of two arms is held together, and what differs is named."""

from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from helpers import PEFT, arm, request
from peft.tuners.lora import Linear
from safetensors.torch import save_file

from lorabench.contract.ablation import Tolerance
from lorabench.contract.kind import kind
from lorabench.measure.judging import certificate, depth_noise, numerics, witness
from lorabench.measure.judging.certificate import certify
from lorabench.measure.judging.limits import LOSS_MASKED, MOST
from lorabench.measure.judging.witness import BLOCK, SKETCH, Look, Witness, sketch
from lorabench.measure.kind import TURN
from lorabench.measure.trial import run_trial
from lorabench.record.schema import Numerics


def evidence(made, folder, rounds=4, spoil=lambda made, number: None, turn=1):
    """One arm's testimony over these rounds, as the runner assembles it; `spoil` is called before each round."""
    kind = made.kind
    found = kind.first_trial(made, lambda: run_trial(made), replace(request(), scratch=folder))
    for round_ in range(rounds):
        spoil(made, round_)
        kind.begin_turn(made, round_ * TURN)
        for number in range(round_ * TURN, round_ * TURN + turn):
            kind.feed(made, number)
            done = run_trial(made)
            observed, look = kind.observe(made, number, done.losses), kind.look(made, number)
            kind.take(found, number, *ForkingPickler.loads(ForkingPickler.dumps((observed, look))))
            kind.clear(made)
    kind.feed(made, rounds * TURN)
    kind.finish(found, kind.last_trial(made, lambda: run_trial(made)))
    return found[""]


def failed(checks):
    return {c.name for c in checks if not c.passed}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return evidence(arm(*PEFT), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory):
    """The reference's evidence of turns of several trials; a right arm passes beside it."""
    folder = tmp_path_factory.mktemp("turns")
    plain, eager = (evidence(arm(*names), folder, rounds=2, turn=4) for names in (PEFT, ("eager",)))
    assert not failed(certify(plain, eager, torch.float32))
    return plain


def test_right_arms_are_certified_whatever_they_warmed_up(reference, tmp_path):
    for names in (PEFT, ("eager",), ("gradient_checkpointing",), ("adamw_fused",)):
        made = arm(*names)
        checks = certify(reference, evidence(made, tmp_path), torch.float32)
        assert not failed(checks) and len(checks) == 14, (names, failed(checks))


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


def scaled_by_a_third(made):
    for _, p in made.adapters():
        p.register_hook(lambda grad: 1.34 * grad)


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


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        (no_backward, "each gradient of each trial"),
        (no_update, "the candidate's update against AdamW on its own gradients"),
        (same_tokens, "each gradient of each trial"),
        (scaled, "the scale of each gradient of each trial"),
    ],
)
def test_what_goes_wrong_later_in_a_turn_is_caught(in_turns, tmp_path, change, caught):
    def later(made):
        """From the third trial of each turn on."""
        feed = made.feeds[0]
        made.feeds = [lambda number: change(made) if number % TURN == 2 else feed(number)]

    made = arm(*PEFT)
    later(made)
    found = certify(in_turns, evidence(made, tmp_path, rounds=2, turn=4), torch.float32)
    assert caught in failed(found)


def merged_once(made):
    """Every adapter's product as it was when it was first asked for."""
    for module in made.model.modules():
        if isinstance(module, Linear):
            a, b, kept = module.lora_A["default"], module.lora_B["default"], []

            def forward(x, module=module, a=a, b=b, kept=kept):
                kept.append((a.weight.detach().clone(), b.weight.detach().clone())) if not kept else None
                product = Product.apply(x.float(), a.weight, b.weight, *kept[0])
                return module.base_layer(x) + (product * module.scaling["default"]).to(x.dtype)

            module.forward = forward


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, old_a, old_b):
        ctx.save_for_backward(x, a, b)
        return x @ old_a.T @ old_b.T

    @staticmethod
    def backward(ctx, dy):
        x, a, b = ctx.saved_tensors
        dy, rows = dy.flatten(0, -2), x.flatten(0, -2)
        return (dy @ b @ a).view_as(x), (dy @ b).T @ rows, dy.T @ (rows @ a.T), None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_kept_of_the_parameters_of_an_earlier_turn_is_caught(tmp_path, dtype):
    """All turns may begin at one place: who merges the adapters there, once, would be right in each first trial."""
    plain = arm(*PEFT, dtype=dtype)
    noise = depth_noise.measure(plain, partial(numerics.one_pass, plain, plain.step))
    right = replace(evidence(plain, tmp_path), noise=noise)
    assert not failed(certify(right, evidence(arm("eager", dtype=dtype), tmp_path), dtype))
    cheats = evidence(arm(*PEFT, dtype=dtype), tmp_path, spoil=after(1, merged_once))
    assert "each gradient of each trial" in failed(certify(right, cheats, dtype))


def test_a_later_trial_of_a_turn_may_differ_by_more_than_its_first_one(reference):
    def checks(number, off, low=False):
        one = replace(reference, sketches={number: reference.sketches[0]}, low_precision=low)
        other = replace(one, sketches={number: reference.sketches[0] * (1 + off)})
        found = certify(one, other, torch.bfloat16)
        return {c.name: c for c in found}["each gradient of each trial"]

    known = depth_noise.DepthNoise(dict.fromkeys(reference.names, (0.0, 0.0)), 0.0, 0.0)
    reference = replace(reference, noise=known)
    assert not checks(TURN, off=0.04).passed and checks(TURN + 1, off=0.04).passed
    assert checks(TURN + 9, off=0.06).passed is False and checks(TURN + 9, off=0.06, low=True).passed
    assert not checks(TURN + 20, off=-1, low=True).passed  # no gradient at all


def test_arms_are_compared_over_the_trials_that_both_took(reference):
    fewer = replace(reference, losses={TURN: reference.losses[TURN]}, sketches={0: reference.sketches[0]})
    assert not failed(certify(reference, fewer, torch.float32))
    fewer = replace(fewer, losses={TURN: reference.losses[0]})
    assert failed(certify(reference, fewer, torch.float32)) == {"the loss of each trial"}


def test_adapters_in_16_bits_may_fall_behind_and_still_have_to_be_right(tmp_path):
    turn = 8
    names = (*PEFT, "adapters_in_compute_dtype")
    plain = arm(*PEFT, dtype=torch.bfloat16)
    noise = depth_noise.measure(plain, partial(numerics.one_pass, plain, plain.step))
    right = replace(evidence(plain, tmp_path, 2, turn=turn), noise=noise)
    low = evidence(arm(*names, dtype=torch.bfloat16), tmp_path, 2, turn=turn)
    assert not failed(certify(right, low, torch.bfloat16))
    spoilt = evidence(arm(*names, dtype=torch.bfloat16), tmp_path, 2, spoil=after(1, no_backward), turn=turn)
    assert "each gradient of each trial" in failed(certify(right, spoilt, torch.bfloat16))


def test_a_phase_that_only_one_arm_has_is_named(reference):
    (check,) = [c for c in certify(reference, replace(reference, phases=("forward",)), torch.float32) if not c.passed]
    assert check.name == "phases that only one arm has" and check.where == "backward, step"


def test_evidence_of_numbers_that_are_not_finite_fails(reference):
    odd = reference.sketches[TURN].copy()
    odd[0, 0] = np.nan
    losses = dict.fromkeys(reference.losses, float("nan"))
    found = certify(reference, replace(reference, sketches={TURN: odd}, losses=losses), torch.float32)
    assert failed(found) >= {"the loss of each trial", "each gradient of each trial"}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """How an arm in 4 bits is made, and the gradients of plain PEFT over its weights in plain linears."""
    folder = tmp_path_factory.mktemp("yardstick")
    wanted = replace(request(*PEFT, "nf4_base"), dense=True)
    made = kind(wanted.cell.kind).build(wanted)
    save_file(numerics.one_pass(made, made.step)[1], folder / "yardstick.safetensors")
    return partial(arm, *PEFT, "nf4_base"), folder / "yardstick.safetensors"


NF4 = Tolerance(words="frozen weights in 4 bits", loss=0.05)


def test_an_arm_with_weights_of_its_own_is_held_against_its_own_yardstick(reference, rounded, tmp_path):
    made, yardstick = rounded
    testimony = evidence(made(), tmp_path)
    without = {c.name: c for c in certify(reference, testimony, torch.float32, [NF4])}
    assert without["each gradient before the trials"].found > 0.05  # of what 4 bits make of the weights
    checks = {c.name: c for c in certify(reference, replace(testimony, yardstick=yardstick), torch.float32, [NF4])}
    assert not failed(checks.values())
    assert checks["each gradient before the trials"].found < 1e-3 >= checks["each gradient before the trials"].allowed


@pytest.mark.parametrize("change", [no_backward, scaled_by_a_third])
def test_what_such_an_arm_does_wrong_in_its_trials_is_caught(reference, rounded, tmp_path, change):
    made, yardstick = rounded
    testimony = replace(evidence(made(), tmp_path, spoil=after(2, change)), yardstick=yardstick)
    assert {c for c in failed(certify(reference, testimony, torch.float32, [NF4])) if c.endswith("each trial")}


@pytest.mark.parametrize("tolerance", [Tolerance(words="anything", grad=9.0, loss=9.0), None])
def test_an_arm_without_a_gradient_fails_whatever_is_declared(reference, tmp_path, tolerance):
    made = arm(*PEFT)
    made.step.backward = lambda loss: None
    testimony = evidence(made, tmp_path, rounds=1)
    checks = {c.name: c for c in certify(reference, testimony, torch.bfloat16, [tolerance] if tolerance else [])}
    assert not checks["each gradient before the trials"].passed
    assert checks["each gradient before the trials"].allowed <= MOST


def test_what_two_right_runs_differ_by_is_measured_at_full_depth():
    made = arm(*PEFT, dtype=torch.bfloat16, depth=3)
    start = {n: p.detach().clone() for n, p in made.adapters()}
    noise = depth_noise.measure(made, partial(numerics.one_pass, made, made.step))
    assert all(torch.equal(p, start[n]) for n, p in made.adapters())
    errors = [error for error, _ in noise.tensors.values()]
    assert 0.004 < np.median(errors) < 0.05 and noise.masks is None and 0 < noise.loss < 1e-3
    other = arm("sdpa_math", dtype=torch.bfloat16, depth=3)
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
    depth_noise.keep(file, noise)
    assert depth_noise.read(file) == noise
    depth_noise.keep(tmp_path / "none.json", None)
    assert depth_noise.read(tmp_path / "none.json") is None and depth_noise.read(tmp_path / "no file") is None


def test_right_trials_under_masks_of_their_own_stay_within_the_noise_whatever_pairs_it_was_made_of():
    """A linear's loss moves by 4 % between masks. The limit is made of a few pairs and holds the worst of 60 trials."""
    made = arm(*PEFT, overrides=("lora.lora_dropout=0.1",))
    random, beyond, ones = np.random.default_rng(1), 0, {"a": torch.ones(2)}
    for _ in range(400):
        noise = depth_noise.measure(made, lambda backward=True: (1 + 0.03 * random.standard_normal(), ones))
        pairs = 1 + 0.03 * random.standard_normal((2, 60))
        beyond += np.abs(pairs[1] / pairs[0] - 1).max() > LOSS_MASKED * noise.masks.loss
    assert beyond <= 1


@pytest.mark.parametrize(
    ("reference", "candidate", "says"),
    [
        (0.8, 5e28, ": with dropout on, two runs of the candidate have gradients in the second alone and two of the "
         "reference differ"),
        (0.8, 0.0, ": with dropout on, two runs of the candidate do not differ and two of the reference differ"),
        (0.0, 0.8, ": with dropout on, two runs of the candidate differ and two of the reference do not differ"),
        (0.8, 0.08, "is off by 4 (allowed 1)"),
    ],
)  # fmt: skip
def test_dropout_that_moves_one_arm_alone_is_said_in_words(reference, candidate, says):
    check = certificate._spread(reference, candidate)
    verdict = Numerics(
        passed=False, loss_error=0, loss_allowed=0, grad_error=0, grad_allowed=0, plain_grad_error=0, worst="a",
        tensors=1, checks=[check],
    )  # fmt: skip
    words = numerics.explain(verdict)
    assert words.startswith("how far dropout moves the gradients, against the reference is off by ")
    assert words.endswith(says)
    right = certificate._spread(0.8, 0.7)
    assert right.passed and not right.where


def test_a_sketch_keeps_lengths_angles_and_factors():
    generator = torch.Generator().manual_seed(0)
    a, e = (torch.randn(5000, generator=generator) for _ in range(2))
    plain, doubled, noisy = (sketch({"a": t})[0] for t in (a, 2 * a, a + 0.1 * e))
    assert plain.shape == (SKETCH,) and np.allclose(doubled, 2 * plain)
    assert np.linalg.norm(plain) == pytest.approx(float(a.norm()), rel=0.4)
    assert np.linalg.norm(noisy - plain) == pytest.approx(float(0.1 * e.norm()), rel=0.4)


def test_a_row_of_a_sketch_depends_on_nothing_but_its_tensor(monkeypatch):
    sizes = {"a": (5000,), "b": (64, 65), "c": (3,), "d": (2 * BLOCK,)}
    tensors = {n: torch.randn(size) for n, size in sizes.items()}
    tensors |= {"e": tensors["a"].bfloat16(), "f": torch.randn(70, 60).T}
    together = sketch(tensors | {"none": None, "empty": torch.zeros(0)})
    assert together.dtype == np.float32 and not together[-2:].any() and together[:-2].any(1).all()
    backwards = sketch(dict(reversed(tensors.items())))[::-1]
    monkeypatch.setattr(witness, "AT_ONCE", {"cpu": 6000})
    monkeypatch.setattr(witness, "_drawn", {})
    for row, (name, tensor) in enumerate(tensors.items()):
        assert np.array_equal(together[row], sketch({name: tensor})[0]), name
    assert np.array_equal(together[:-2], backwards) and np.array_equal(together[:-2], sketch(tensors))
    assert np.array_equal(sketch({"a": tensors["b"].float()}), sketch({"a": tensors["b"].reshape(-1)}))


def test_a_sketch_of_other_tensors_is_refused(reference):
    with pytest.raises(ValueError, match="shape"):
        reference.add_sketch(1, Look(np.zeros((3, SKETCH), np.float32), None))


def test_all_turns_of_all_arms_start_at_a_place_that_follows_from_the_number(tmp_path):
    def place(names, number, trials):
        made = arm(*names)
        made.kind.first_trial(made, lambda: run_trial(made), replace(request(), scratch=tmp_path))
        optimizer = made.step.optimizer
        once = [t.clone() for s in optimizer.state.values() for t in s.values()]
        where = [t.data_ptr() for s in optimizer.state.values() for t in s.values()]
        for _ in range(trials):
            run_trial(made)
        made.kind.begin_turn(made, number)
        again = [t for s in optimizer.state.values() for t in s.values()]
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        assert where == [t.data_ptr() for t in again]
        return {n: p.detach().clone() for n, p in made.adapters()}

    one, same, other = place(PEFT, 64, 1), place(("adamw_fused", "eager"), 64, 3), place(PEFT, 128, 1)
    start = {n: p.detach() for n, p in arm(*PEFT).adapters()}
    assert one.keys() == start.keys() and all(torch.equal(one[n], same[n]) for n in one)
    halved = {n for n in one if not torch.equal(one[n], start[n])}
    assert all(torch.equal(one[n], start[n] / 2) for n in halved) and 0.2 < len(halved) / len(one) < 0.8
    assert halved != {n for n in other if not torch.equal(other[n], start[n])}


class OddOptimizer(torch.optim.SGD):
    """Keeps a tensor that another one's state has as well, a tensor of a class of its own, and numbers."""

    def step(self, closure=None):
        shared = next(iter(self.state.values()))["map"] if self.state else torch.arange(4.0)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("map", shared)
            state.setdefault("own", torch.zeros(3).as_subclass(Own)).add_(1)
            state["step"] = state.get("step", 0) + 1
        super().step()


class Own(torch.Tensor):
    pass


def test_any_optimizer_s_state_is_put_back_in_place():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = OddOptimizer([p, torch.nn.Parameter(torch.ones(2))])
    optimizer.step()
    state = optimizer.state[p]
    kept, own = witness.KeptState(optimizer), state["own"]
    for _ in range(2):
        optimizer.step()
        state["map"].zero_()
        kept.put_back()
        assert state["step"] == 1 and state["own"] is own and own.tolist() == [1, 1, 1]
        assert state["map"].tolist() == [0, 1, 2, 3]


def test_gradients_that_stay_in_their_buffers_are_made_useless_before_a_trial(tmp_path):
    made = arm(*PEFT)
    run_trial(made)
    made.step.keeps_gradients = True
    made.kind.clear(made)
    assert all(p.grad is not None and p.grad.isnan().all() for _, p in made.adapters())
    assert isinstance(Witness(made, made.step, tmp_path).gradients([]), dict)


def test_a_reference_that_rounds_its_updates_on_purpose_is_allowed_its_own_tolerance(reference):
    name = "the reference's update against AdamW on its own gradients"
    rounding = replace(reference, update_errors={TURN: (0.05, "w")})
    declared = [Tolerance(words="states in 8 bits", update=0.1)]
    assert name in failed(certify(rounding, reference, torch.float32, declared))
    assert name not in failed(certify(rounding, reference, torch.float32, declared, declared))


@pytest.mark.parametrize("factor, right", [(1.006, True), (1.02, False)])
def test_what_two_runs_hide_of_the_typical_scale_by_luck_is_known_from_all_tensors(reference, tmp_path, factor, right):
    """Two runs in which the middle of all projections is right to 1e-5, and nine tenths of them to 0.014."""
    noise = depth_noise.DepthNoise(dict.fromkeys(reference.names, (0.02, 0.014)), 1e-5, 0.01)
    made = arm(*PEFT)
    for _, p in made.adapters():
        p.register_hook(lambda grad: factor * grad)
    checks = {c.name: c for c in certify(replace(reference, noise=noise), evidence(made, tmp_path), torch.bfloat16)}
    assert checks["the typical gradient's scale before the trials"].passed == right


@pytest.mark.parametrize(("off", "right"), [(0.75, True), (0.95, False)])
def test_a_tensor_in_which_two_right_runs_are_far_apart_may_be_off_by_more_and_still_needs_a_gradient(off, right):
    noise = depth_noise.DepthNoise({"deep": (0.3, 0.1), "other": (0.01, 0.001)}, 0.001, 1e-4)
    allowed = certificate._Allowed(noise, False, torch.bfloat16, [])
    assert (off <= allowed.error("deep")) is right
    assert allowed.error("other") < 0.5
    assert 0.25 < allowed.scale("deep", off) <= 0.5


def test_a_trial_asks_nothing_of_a_tensor_that_dropout_turns_round():
    masks = depth_noise.DepthNoise({"k_proj": (0.7, 0.4), "v_proj": (0.2, 0.1)}, 0.1, 1e-3)
    noise = depth_noise.DepthNoise({"k_proj": (0.1, 0.01), "v_proj": (0.02, 0.001)}, 0.001, 1e-4, masks)
    masked, plain = (certificate._Allowed(noise, on, torch.bfloat16, []) for on in (True, False))
    assert masked.turned_round("k_proj") > 1.55  # which two right runs of the 8B came to
    assert masked.turned_round("v_proj") == plain.turned_round("k_proj") == 0.0
