"""FLOPs against torch's own count, labels, and ceilings that were measured."""

from types import SimpleNamespace

import pytest
import torch
from helpers import PEFT
from helpers import deep_arm as arm
from torch.utils.flop_counter import FlopCounterMode

from lorabench.contract.work import Work
from lorabench.measure import flops
from lorabench.measure.profile import busy_by_phase, union, waits, watched_trial
from lorabench.measure.roofline import ceilings, label, phase_rooflines
from lorabench.measure.trial import Trial
from lorabench.plan.compose import load_config, model
from lorabench.record.schema import PhaseRoofline


def tiny_llama():
    spec = model("tiny-llama", load_config([]))
    return flops.decoder(spec, spec.lora)


def test_forward_flops_match_torch_s_counter():
    made = arm("eager", "adamw", "padding")
    shape = tiny_llama()
    with FlopCounterMode(display=False) as counter:
        made.step.forward(made.step.batches[0])
    counted = counter.get_total_flops() / 1e12
    lengths = flops.lengths_of(made.samples)
    attention = shape.attention * 2 * sum(len(s.tokens) ** 2 for s in made.samples) / 1e12
    assert flops.forward_tflop(shape, lengths) + attention == pytest.approx(
        counted, rel=0.02
    )  # eager computes the upper triangle too


def test_backward_flops_match_torch_s_counter_without_attention():
    made = arm("eager", "adamw", "padding")
    shape = tiny_llama()
    loss = made.step.forward(made.step.batches[0])
    with FlopCounterMode(display=False) as counter:
        made.step.backward(loss)
    attention = 2.5 * shape.attention * 2 * sum(len(s.tokens) ** 2 for s in made.samples) / 1e12
    eager_attention = 2 * 2 * shape.attention * 2 * sum(len(s.tokens) ** 2 for s in made.samples) / 1e12
    ours = flops.backward_tflop(shape, flops.lengths_of(made.samples)) - attention + eager_attention
    assert ours == pytest.approx(counter.get_total_flops() / 1e12, rel=0.1)


def part(**fields):
    return PhaseRoofline(**fields)


def test_labels():
    assert label(10.0, part(device_busy_ms=7.0, tflop=1.0), 100.0) == "host-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.6), 100.0) == "compute-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.2), 100.0) == "memory-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.2, recompute_tflop=0.4), 100.0) == "compute-bound"
    assert label(10.0, part(device_busy_ms=9.5), 100.0) == "memory-bound"


def test_an_unknown_ceiling_or_busy_time_gives_no_label():
    assert label(10.0, part(tflop=1.0), 100.0) is None
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.6), None) is None
    times = {"forward": 2.0, "backward": 4.0, "step": 1.0}
    trial = Trial(times, times, {"": 1.0}, 0, 1)
    work = Work({"forward": 1.0, "backward": 1.0}, recompute_tflop={"backward": 1.0})
    made = phase_rooflines([trial], None, work, None)
    assert made["forward"].of_ceiling is None and made["backward"].recompute_tflop == 1.0
    known = phase_rooflines([trial], None, work, 1000.0)
    assert known["forward"].of_ceiling == pytest.approx(0.5)


def test_work_adds_up_by_phase():
    both = Work({"a": 1.0}, {"b": 2.0}) + Work({"a": 0.5, "c": 1.0})
    assert (both.tflop, both.gbytes, both.recompute_tflop) == ({"a": 1.5, "c": 1.0}, {"b": 2.0}, {})


def test_ceilings_are_measured():
    found = ceilings(torch.device("cpu"), torch.float32)
    assert 1e-3 < found["gemm_tflops"]["float32"] < 100
    assert 0.1 < found["copy_gbs"] < 10_000


@pytest.mark.parametrize("names", [PEFT, ("eager", "packing")])
def test_memory_parts_count_tied_weights_once(names):
    made = arm(*names)
    distinct = {p.data_ptr(): p.nbytes for p in made.model.parameters() if not p.requires_grad}
    assert made.kind.held(made)["weights"] == sum(distinct.values())


def test_the_device_s_busy_time_goes_to_the_phase_whose_mark_was_before_it():
    spans = [
        (0, 9, "before"), (10, 11, "at::spin_kernel(long)"), (20, 30, "gemm"), (25, 40, "copy"),
        (50, 51, "at::spin_kernel(long)"), (60, 61, "at::spin_kernel(long)"), (70, 75, "gemm"),
    ]  # fmt: skip
    phases = ("forward", "backward", "step")
    found = busy_by_phase(spans, ["forward", "backward", "forward"], phases)
    assert {phase: ran.device for phase, ran in found.items()} == {
        "forward": pytest.approx(25e-6), "backward": 0.0, "step": 0.0,
    }  # fmt: skip
    assert all(ran.communication == ran.exposed == 0.0 for ran in found.values())
    assert busy_by_phase(spans, ["forward", "backward"], phases) is None


@pytest.mark.gpu
def test_a_watched_trial_says_how_long_the_gpu_was_busy_in_each_phase():
    made = arm("sdpa", "adamw_fused", "padding", device="cuda")
    done, busy = watched_trial(made)
    assert busy is not None and busy.keys() == done.device_ms.keys() and all(ran.device > 0 for ran in busy.values())
    assert not any(ran.communication for ran in busy.values())


def test_a_collective_is_exposed_where_nothing_else_runs():
    spans = [
        (0, 1, "at::spin_kernel(long)"), (10, 30, "gemm"), (20, 50, "ncclDevKernel_AllGather"), (45, 60, "copy"),
        (70, 71, "at::spin_kernel(long)"), (80, 90, "ncclDevKernel_AllReduce"), (90, 95, "gemm"),
    ]  # fmt: skip
    found = busy_by_phase(spans, ["forward", "backward"], ("forward", "backward"))
    in_ns = {phase: tuple(round(1e6 * ms) for ms in ran) for phase, ran in found.items()}
    assert in_ns == {"forward": (50, 30, 15), "backward": (15, 10, 10)}
    trials = [SimpleNamespace(device_ms=dict.fromkeys(found, 1.0), host_ms=dict.fromkeys(found, 1.0))]
    parts = phase_rooflines(trials, found, Work(), None)
    assert (parts["forward"].communication_ms, parts["forward"].exposed_ms) == pytest.approx((30e-6, 15e-6))
    alone = {phase: ran._replace(communication=0.0, exposed=0.0) for phase, ran in found.items()}
    assert phase_rooflines(trials, alone, Work(), None)["forward"].exposed_ms is None


def test_the_device_is_busy_for_the_union_of_its_intervals():
    spans = [(10, 20, "a"), (12, 15, "b"), (18, 30, "c"), (30, 31, "d"), (40, 45, "e"), (60, 61, "f")]
    assert union(spans) == 21 + 5 + 1
    assert waits(spans) == [(15, "e", "f"), (9, "d", "e")]
    assert union([]) == 0 and waits([]) == []
