"""Pipelines on two and four processes of a CPU: the loss and every adapter's gradient are those of one process."""

from __future__ import annotations

import pytest
import torch
from helpers import PEFT, arm, random_samples
from several_ranks import on_ranks

from lorabench.contract.workload import Workload
from lorabench.measure.judging.numerics import one_pass, one_step

FEED = Workload(name="test", kind="fixed", batch_size=2, seq_len=16)
LENGTHS = [16, 9, 12, 16, 3, 14, 7, 11]


DEEP = "tiny-llama-8-layers"  # cut to as many as a test needs


def plain(layers):
    made = arm(*PEFT, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers)
    return one_step(made)


def stepped(ranks, toggles, layers):
    made = arm(
        *PEFT[:2], *toggles, samples=random_samples(LENGTHS), workload=FEED, model=DEEP, layers=layers, ranks=ranks
    )
    outcome = one_step(made)
    counts = [batch.real for batch in made.step.batches]
    names = [name for name, _ in made.adapters(made.step)]
    gradients = {name: x.numpy() for name, x in outcome.gradients.items()}
    return outcome.loss, gradients, outcome.update_error, counts, names, made.step.innermost.machinery.split


def compare(answers, wanted):
    for loss, gradients, update_error, *_ in answers:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert gradients.keys() == wanted.gradients.keys()
        assert update_error < 1e-6
        for name, gradient in wanted.gradients.items():
            torch.testing.assert_close(torch.from_numpy(gradients[name]), gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("ranks", "layers", "toggle"),
    [
        (2, 3, "pipeline_gpipe"),
        (2, 3, "pipeline_1f1b"),
        (2, 4, {"pipeline_interleaved": {"v": 2}}),
        pytest.param(4, 4, "pipeline_1f1b", marks=pytest.mark.exhaustive),
        pytest.param(4, 4, "pipeline_gpipe", marks=pytest.mark.exhaustive),
        pytest.param(2, 6, {"pipeline_interleaved": {"v": 3}}, marks=pytest.mark.exhaustive),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(tmp_path, ranks, layers, toggle):
    answers = on_ranks(ranks, tmp_path, stepped, (toggle,), layers)
    compare(answers, plain(layers))
    assert [sum(counts) for *_, counts, _, _ in answers] == [sum(LENGTHS)] + [0] * (ranks - 1)
    names = [name for *_, own, _ in answers for name in own]
    assert len(names) == len(set(names)) == layers * 7 * 2  # each tensor is on one rank
    split = answers[0][-1]
    assert sum(split) == layers and min(split) >= 1 and all(answer[-1] == split for answer in answers)
