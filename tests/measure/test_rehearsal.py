"""Steps tried before the batches are laid out: what they raise, and that they leave an arm as it was."""

from __future__ import annotations

import pytest
import torch
from helpers import arm, random_samples

from lorabench.contract.batch import pad
from lorabench.measure.rehearsal import Rehearsing

SAMPLES = random_samples([12, 5, 9])
PLENTY = 1 << 40


def rehearsal(made, tmp_path):
    return Rehearsing(
        made.step, SAMPLES, made.step.job.workload, pad, held=0, room=PLENTY, configuration={}, folder=tmp_path,
        device=made.device,
    )  # fmt: skip


@pytest.fixture
def made():
    return arm("sdpa", "adamw_foreach", "padding", samples=SAMPLES)


def state_of(made):
    groups = [{k: v for k, v in g.items() if k != "params"} for g in made.step.optimizer.param_groups]
    return [p.detach().clone() for _, p in made.adapters()], groups, torch.get_rng_state()


def same(one, other):
    tensors = [*zip(one[0], other[0], strict=True), (one[2], other[2])]
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in tensors)


def moved(step):
    """An update that changes what some optimizers change: a value of the group, and the parameters by much."""
    step.optimizer.param_groups[0]["lr"] *= 0.5
    torch.rand(1)
    type(step).update(step)


def test_a_tried_step_really_trains_and_is_undone(made, tmp_path):
    before = state_of(made)
    made.step.update = lambda: moved(made.step)
    with rehearsal(made, tmp_path) as tried:
        first, second = (tried.run(pad(SAMPLES, size), PLENTY) for size in (1, 3))
        assert second.peak > first.peak > 0 and first.seconds > 0
        assert made.step.optimizer.state
        assert not same(state_of(made), before)
    assert same(state_of(made), before)
    assert not made.step.optimizer.state
    assert all(p.grad is None for _, p in made.adapters())


def test_nothing_is_touched_where_nothing_is_tried(made, tmp_path):
    made.step.optimizer.load_state_dict = lambda state: pytest.fail("restored")
    with rehearsal(made, tmp_path):
        pass


def test_a_step_that_the_allocator_refuses_is_out_of_memory_and_undone(made, tmp_path):
    before = state_of(made)
    forward = made.step.forward

    def refused(batch):
        if len(batch.inputs["input_ids"]) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return forward(batch)

    made.step.forward = refused
    with rehearsal(made, tmp_path) as tried:
        with pytest.raises(torch.OutOfMemoryError, match=r" out of memory\. DefaultCPUAllocator"):
            tried.run(pad(SAMPLES, 3), PLENTY)
        assert tried.run(pad(SAMPLES, 1), PLENTY).peak > 0
    assert same(state_of(made), before)


def test_any_other_error_is_the_toggle_s_and_undone(made, tmp_path):
    before = state_of(made)
    made.step.forward = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError), rehearsal(made, tmp_path) as tried:
        tried.run(pad(SAMPLES, 1), PLENTY)
    assert same(state_of(made), before)


def test_a_budget_is_where_memory_ends(made, tmp_path):
    with rehearsal(made, tmp_path) as tried:
        peak = tried.run(pad(SAMPLES, 3), PLENTY).peak
        assert tried.run(pad(SAMPLES, 3), peak).peak == peak
        with pytest.raises(torch.OutOfMemoryError, match=f"takes {peak} bytes of {peak - 1}"):
            tried.run(pad(SAMPLES, 3), peak - 1)
