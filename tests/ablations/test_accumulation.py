"""A step's samples in several micro-batches: one denominator, so the gradient is that of one batch. NEFTune's noise."""

import pytest
import torch
from helpers import PEFT, arm

from lorabench.contract.ablation import Evidence, NotApplied, Unsupported, conflict
from lorabench.contract.batch import Sample
from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_step
from lorabench.measure.trial import run_trial
from lorabench.plan import registry

FOUR = Workload(name="test", kind="fixed", batch_size=4, seq_len=16)
UNEVEN = [Sample(list(range(3, 3 + n)), list(range(3, 3 + n))) for n in (16, 2, 5, 9)]


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("batching", ["padding", "padding_free"])
def test_samples_of_other_lengths_are_weighted_by_their_trained_tokens(steps, batching):
    """A mean of the micro-batches' means would weigh a sample of two tokens as one of sixteen."""
    names = [n for n in PEFT if n != "padding"] + [batching]
    plain = one_step(arm(*names, workload=FOUR, samples=UNEVEN))
    made = arm(*names, {"gradient_accumulation": {"steps": steps}}, workload=FOUR, samples=UNEVEN)
    ours = one_step(made)
    toggle = next(a for a in made.ablations if a.name == "gradient_accumulation")
    assert toggle.audit(Evidence(made, None, None)) == len(made.step.batches) == -(-4 // -(-4 // steps))
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-3, atol=1e-7)


def test_what_divides_nothing_is_said():
    with pytest.raises(ValueError, match="steps: should be greater than or equal to 2, not 1"):
        registry.ablation({"gradient_accumulation": {"steps": 1}})
    with pytest.raises(Unsupported, match="9 micro-batches divide nothing: the step has 4 samples"):
        arm(*PEFT, {"gradient_accumulation": {"steps": 9}}, workload=FOUR)
    made = arm(*PEFT, workload=FOUR)
    with pytest.raises(NotApplied, match="still go into one micro-batch"):
        registry.ablation("gradient_accumulation").audit(Evidence(made, None, None))


def test_one_rule_for_the_micro_batch():
    both = [registry.ablation("gradient_accumulation"), registry.ablation("auto_batch_size")]
    assert "both fill the slot batch_size" in str(conflict(both))


def noise(alpha, rows=1, length=16, train=True):
    made = arm(*PEFT, {"neftune": {"neftune_noise_alpha": alpha}})
    embeddings = made.model.get_base_model().get_input_embeddings()
    made.model.train(train)
    ids = torch.ones(rows, length, dtype=torch.long)
    return embeddings(ids) - embeddings.weight[ids]


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_noise_is_uniform_up_to_alpha_over_the_root_of_a_row_s_numbers(alpha):
    most = alpha / (16 * 64) ** 0.5
    found = noise(alpha, rows=8)
    assert 0.95 * most < found.abs().max() <= most * 1.001
    assert found.std() == pytest.approx(most / 3**0.5, rel=0.05) and abs(found.mean()) < 0.05 * most


def test_a_longer_row_has_less_noise_and_evaluation_none():
    longer, shorter = (noise(5.0, length=length).abs().max().item() for length in (64, 16))
    assert longer == pytest.approx(shorter / 2, rel=0.1)
    assert not noise(5.0, train=False).any()


def test_noise_is_seen_in_a_step_and_missed_where_there_is_none():
    made = arm(*PEFT, "neftune")
    toggle = made.ablations[-1]
    with pytest.raises(NotApplied, match="not asked in a training step"):
        toggle.audit(Evidence(made, 1, None))
    run_trial(made)
    assert toggle.audit(Evidence(made, 1, None)) == 1
    with pytest.raises(ValueError, match="neftune_noise_alpha: should be greater than 0"):
        registry.ablation({"neftune": {"neftune_noise_alpha": 0}})
