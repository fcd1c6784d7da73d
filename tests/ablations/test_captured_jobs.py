"""A captured joint step is the uncaptured one: losses, updates, a job that turns NaN. The graphs are those of
`fake_graphs.py`, which keep a CUDA graph's promises on a CPU."""

from collections import Counter

import pytest
import torch
from fake_graphs import FakeGraphs
from several_jobs import ONE_LENGTH, UNEQUAL, build, request

from lorabench.contract.ablation import Evidence, conflict
from lorabench.measure.trial import run_trial
from lorabench.plan import registry
from lorabench_ablations.captured_jobs import CapturedJoint

LINEARS = "{fused_multi_lora:{form:linears}}"
WAYS = ["batched", "batched_packed", "fused_multi_lora", LINEARS, "{fused_multi_lora:{at_a_time:2}}"]
GROUPED = "{batched_packed:{tokens:64}}"
ONCE = "workload={2x16: {jobs: [{name: first, lora: {r: 4}}, {name: second, seed: 3}]}}"  # one micro-batch a step
GUARDED = "fused_multi_lora,adamw_fused"  # the graph of the update looks itself


def captured(wanted):
    """The arm, with what `cuda_graph` wraps around its joint steps; the recorders."""
    arm, fakes = build(wanted), []
    for number, turn in enumerate(arm.turns):
        fakes.append(FakeGraphs(list(arm.model.parameters())))
        arm.turns[number] = made = CapturedJoint(turn, fakes[-1])
        for share in arm.steps:
            if share.joint is turn:
                share.joint = made
    return arm, fakes


WORKLOADS = {"unequal": UNEQUAL, "once": ONCE, "one length": ONE_LENGTH}
FAST = {  # gradients that are looked at in a graph of their own, that are not, several joint steps, the update's graph
    *(("unequal", name) for name in ("batched_packed", "fused_multi_lora", WAYS[-1], GUARDED)),
    ("once", "fused_multi_lora"),  # without a second micro-batch, which adds to the gradients of the first
}


@pytest.mark.parametrize(
    ("name", "workload"),  # samples of one length are one shape out of several; jobs that turn NaN have them below
    [
        pytest.param(name, feed, id=f"{which}-{name}", marks=[] if (which, name) in FAST else [pytest.mark.exhaustive])
        for which, feed in WORKLOADS.items()
        for name in (*WAYS, GROUPED, GUARDED)
    ],
)
def test_replayed_trials_are_those_that_are_not_captured(name, workload):
    wanted = request(name, workload=workload)
    (arm, fakes), plain = captured(wanted), build(wanted)
    for number in range(3):
        before = [fake.replays for fake in fakes]
        one, other = run_trial(arm, number=number), run_trial(plain, number=number)
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
        looks = "fused_multi_lora" in name and name not in (LINEARS, GUARDED)  # at the gradients, in a graph of its own
        count = [2 * turn.innermost.count + 1 + looks for turn in arm.turns]
        assert [fake.replays - n for fake, n in zip(fakes, before, strict=True)] == count
    jobs = [len(turn.innermost.steps) for turn in arm.turns]
    assert [fake.branches for fake in fakes] == [4 * n for n in jobs], "recorded once, and replayed three times"
    for step, other in zip(arm.steps, plain.steps, strict=True):
        after = dict(plain.adapters(other))
        assert all(torch.allclose(p, after[n], rtol=1e-4, atol=1e-6) for n, p in arm.adapters(step))
        assert all(torch.allclose(p.grad, after[n].grad, rtol=1e-4, atol=1e-7) for n, p in arm.adapters(step))


@pytest.mark.parametrize(
    "name",  # with gradients that are looked at in a graph of their own, and without
    [name if name in ("batched_packed", "fused_multi_lora") else pytest.param(name, marks=pytest.mark.exhaustive)
     for name in WAYS[:4]],
)  # fmt: skip
def test_whoever_asks_job_by_job_gets_the_step_as_it_is(name):
    arm, (fake,) = captured(request(name))
    run_trial(arm, number=0)
    replays, plain = fake.replays, build(request(name))
    run_trial(plain, number=0)
    for step, other in zip(arm.steps, plain.steps, strict=True):
        for one in (step, other):
            one.clear()
            for batch in one.batches:
                one.backward(one.forward(batch))
        after = dict(plain.adapters(other))
        assert all(torch.allclose(p.grad, after[n].grad, rtol=1e-4, atol=1e-7) for n, p in arm.adapters(step))
    assert fake.replays == replays


@pytest.mark.parametrize("workload", [ONE_LENGTH, ONCE], ids=["several", "once"])
@pytest.mark.parametrize(
    "name", ["fused_multi_lora", GUARDED, pytest.param("batched", marks=pytest.mark.exhaustive)]
)  # fmt: skip
def test_a_job_that_turns_nan_leaves_the_others_as_they_are(name, workload):
    """Its losses are looked at between the graphs, or behind the last one."""
    wanted, found = request(name, workload=workload), []
    for spoilt in (True, False):
        arm, _ = captured(wanted)
        run_trial(arm, number=0)
        if spoilt:
            with torch.no_grad():
                for n, p in arm.adapters(arm.steps[1]):
                    if "lora_B" in n:
                        p.fill_(float("nan"))
        losses = run_trial(arm, number=1).losses
        found.append((losses, {s.name: [p.detach().clone() for _, p in arm.adapters(s)] for s in arm.steps}))
    (losses, left), (usual, kept) = found
    second = arm.steps[1].name
    assert losses[second] != losses[second]
    for job in usual.keys() - {second}:
        assert losses[job] == pytest.approx(usual[job], rel=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left[job], kept[job], strict=True))


@pytest.mark.parametrize("name", ["fused_multi_lora", GUARDED])
def test_gradients_that_are_not_finite_are_computed_once_more_each_job_s_alone(name):
    (arm, _), plain = captured(request(name)), build(request(name))
    run_trial(arm, number=0), run_trial(plain, number=0)
    (turn,), alone = arm.turns, []
    assert turn.guarded == (name == GUARDED)
    own, attach = turn.gradients, turn.gradients.attach

    def spoilt():
        attach()
        own.buffers[0].fill_(float("nan"))

    apart = turn.innermost._apart

    def once_more():
        own.attach = attach
        alone.append(apart())

    own.attach, turn.innermost._apart = spoilt, once_more
    assert run_trial(arm, number=1).losses == pytest.approx(run_trial(plain, number=1).losses, rel=1e-5)
    assert len(alone) == 1
    for step, other in zip(arm.steps, plain.steps, strict=True):
        after = dict(plain.adapters(other))
        assert all(torch.allclose(p, after[n], rtol=1e-4, atol=1e-6) for n, p in arm.adapters(step))


def test_other_lengths_than_were_captured_are_refused_by_name():
    arm, _ = captured(request("batched_packed"))
    run_trial(arm, number=0)
    (turn,) = arm.turns
    turn.innermost.begin = lambda phase: None
    first, second = (turn.innermost.micro_batch(n) for n in range(2))
    assert first.inputs["input_ids"].shape != second.inputs["input_ids"].shape
    with pytest.raises(ValueError, match="cuda_graph captured another"):
        turn.forward(second)


def test_the_toggle_captures_joint_steps_and_says_so():
    graph, together = registry.ablation("cuda_graph"), registry.ablation("fused_multi_lora")
    assert conflict([graph, together]) is None
    arm, _ = captured(request("fused_multi_lora"))
    run_trial(arm, number=0)
    evidence = Evidence(arm, 0, Counter(), {})
    assert graph.audit(evidence) == sum(len(turn.graphs) for turn in arm.turns) > 4
    assert graph.notes(evidence)["cuda_graph"]["captured"] == ["backward", "forward", "step"]
