"""FLOPs against torch's own count, labels, and ceilings that were measured."""

import pytest
import torch
from helpers import PEFT, arm
from torch.utils.flop_counter import FlopCounterMode

from lorabench.measure.profile import union, waits
from lorabench.measure.roofline import bounds, ceilings, flops, label
from lorabench.measure.trial import Trial
from lorabench.plan.compose import load_config, model
from lorabench.run.record import PhaseBound


def test_forward_flops_match_torch_s_counter():
    made = arm("eager", "adamw", "padding")
    spec = model("tiny-llama", load_config([]))
    with FlopCounterMode(display=False) as counter:
        made.step.forward(made.step.batches[0])
    counted = counter.get_total_flops() / 1e12
    ours = flops(spec.shape(), made.samples)
    attention = spec.shape().layers * 2 * sum(len(s.tokens) ** 2 for s in made.samples) * 64 / 1e12
    assert ours["forward"] + attention == pytest.approx(counted, rel=0.02)  # eager computes the upper triangle too


def test_backward_flops_match_torch_s_counter_without_attention():
    made = arm("eager", "adamw", "padding")
    spec = model("tiny-llama", load_config([]))
    loss = made.step.forward(made.step.batches[0])
    with FlopCounterMode(display=False) as counter:
        made.step.backward(loss)
    shape = spec.shape()
    attention = 2.5 * shape.layers * 2 * sum(len(s.tokens) ** 2 for s in made.samples) * 64 / 1e12
    eager_attention = 2 * 2 * shape.layers * 2 * sum(len(s.tokens) ** 2 for s in made.samples) * 64 / 1e12
    ours = flops(shape, made.samples)["backward"] - attention + eager_attention
    assert ours == pytest.approx(counter.get_total_flops() / 1e12, rel=0.1)


def part(**fields):
    return PhaseBound(**fields)


def test_labels():
    assert label(10.0, part(device_busy_ms=7.0, tflop=1.0), 100.0) == "host-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.6), 100.0) == "compute-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.2), 100.0) == "memory-bound"
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.2, recompute_tflop=0.4), 100.0) == "compute-bound"
    assert label(10.0, part(device_busy_ms=9.5), 100.0) == "memory-bound"


def test_an_unknown_ceiling_or_busy_time_gives_no_label():
    assert label(10.0, part(tflop=1.0), 100.0) is None
    assert label(10.0, part(device_busy_ms=9.5, tflop=0.6), None) is None
    trial = Trial(
        {"forward": 2.0, "backward": 4.0, "step": 1.0}, {"forward": 2.0, "backward": 4.0, "step": 1.0}, 1, 0, 1
    )
    made = bounds([trial], None, {"forward": 1.0, "backward": 1.0, "step": 0.0}, None, recomputes=True)
    assert made["forward"].of_ceiling is None and made["backward"].recompute_tflop == 1.0
    known = bounds([trial], None, {"forward": 1.0, "backward": 1.0, "step": 0.0}, 1000.0, recomputes=False)
    assert known["forward"].of_ceiling == pytest.approx(0.5)


def test_ceilings_are_measured():
    found = ceilings(torch.device("cpu"), torch.float32)
    assert 1e-3 < found["gemm_tflops"]["float32"] < 100
    assert 0.1 < found["copy_gbs"] < 10_000


@pytest.mark.parametrize("names", [PEFT, ("eager", "packing")])
def test_memory_parts_count_tied_weights_once(names):
    from lorabench.measure.memory import _parts

    made = arm(*names)
    distinct = {p.data_ptr(): p.nbytes for p in made.model.parameters() if not p.requires_grad}
    assert _parts(made)["weights"] == sum(distinct.values())


def test_the_device_is_busy_for_the_union_of_its_intervals():
    spans = [(10, 20, "a"), (12, 15, "b"), (18, 30, "c"), (30, 31, "d"), (40, 45, "e"), (60, 61, "f")]
    assert union(spans) == 21 + 5 + 1
    assert waits(spans) == [(15, "e", "f"), (9, "d", "e")]
    assert union([]) == 0 and waits([]) == []
