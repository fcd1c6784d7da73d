"""How long samples may be, or how many jobs, for a step to fit: on memories that are known, and by real steps."""

from __future__ import annotations

import math
import time

import pytest
import torch
from helpers import cells, request

from lorabench.contract.kind import kind
from lorabench.contract.memory_fit import GIB, JOBS, TOKENS, Edge, Load
from lorabench.contract.workload import Workload
from lorabench.measure.edge import search
from lorabench.measure.kind import request_of

ASKED = 64


class Device:
    """Steps that take `static` bytes, so many for each of what is asked for, and for its square; `tried` has what was
    asked for, in order."""

    def __init__(self, room: int, static: int = 10 * GIB, each: int = 100 << 20, square: float = 0.0) -> None:
        self.room, self.static, self.each, self.square = room, static, each, square
        self.tried: list[int] = []

    def peak(self, much: float) -> int:
        return int(self.static + self.each * much + self.square * much * much)

    def run(self, much: int) -> int:
        self.tried.append(much)
        if self.peak(much) > self.room:
            raise torch.OutOfMemoryError
        return self.peak(much)

    def edge(self, until: float = math.inf) -> Edge:
        return search(TOKENS, self.run, lambda much: Load(much, much * much), ASKED, self.room, until)


@pytest.mark.parametrize("square", [0.0, 20e6])
@pytest.mark.parametrize("fits", [1, 12, 32, 63])
def test_the_edge_is_the_last_that_ran_and_the_first_that_did_not(fits, square):
    device = Device(0, square=square)
    device.room = device.peak(fits + 0.5)
    found = device.edge()
    assert (found.fits, found.too_many) == (fits, fits + 1)
    assert found.measured_gib == pytest.approx(device.peak(fits) / GIB, abs=1e-4)


def test_the_model_says_where_to_look():
    device = Device(0)
    device.room = device.peak(50.5)
    found = device.edge()
    assert found.predicted_gib == pytest.approx(found.measured_gib, rel=1e-3)
    assert device.tried == [1, 2, 4, 8, 16, 50, 51]  # five small steps, and the edge's two sides


def test_a_model_that_is_wrong_costs_steps_and_not_the_answer():
    device = Device(0)
    device.room = device.peak(50.5)
    honest = device.peak
    device.peak = lambda much: honest(much) + (3 * GIB if much > 16 else 0)  # another kernel from there on
    found = device.edge()
    assert device.peak(found.fits) <= device.room < device.peak(found.too_many)
    assert found.too_many == found.fits + 1 and len(device.tried) > 20


def test_nothing_is_tried_above_what_a_small_step_has_said():
    device = Device(0, each=6 * GIB)
    device.room = device.peak(2.5)
    found = device.edge()
    assert (found.fits, found.too_many) == (2, 3)
    assert max(device.tried) == 3


def test_where_not_even_the_least_runs():
    found = Device(room=GIB).edge()
    assert (found.fits, found.too_many, found.measured_gib) == (0, 1, None)


def test_with_the_time_up_it_says_what_it_has():
    device = Device(0)
    device.room = device.peak(50.5)
    assert device.edge(until=time.perf_counter() - 1).fits == 0 and not device.tried


@pytest.mark.parametrize(
    ("edge", "says"),
    [
        (Edge(TOKENS, 2048, 1024, 1056, 80.0), "samples of 1,024 tokens fit, of 1,056 they do not"),
        (Edge(TOKENS, 2048, 0, 32, 80.0), "not even samples of 32 tokens fit"),
        (Edge(JOBS, 8, 3, 4, 80.0), "3 jobs fit, 4 do not"),
        (Edge(JOBS, 8, 0, 1, 80.0), "not even one of its jobs fits"),
    ],
)
def test_in_words(edge, says):
    assert str(edge) == says


WORKLOAD = Workload(name="test", kind="fixed", batch_size=2, seq_len=256)


@pytest.mark.parametrize("batching", ["padding", "packing"])
def test_real_steps_are_tried_until_one_is_refused(batching, monkeypatch):
    from lorabench.measure import rehearsal

    made = request("eager", "adamw_foreach", batching, workload=WORKLOAD)
    tried, honest = [], rehearsal.Rehearsing._gradients

    def refused(self, batches):
        positions = max(b.inputs["input_ids"].numel() for b in batches)
        tried.append(positions)
        if positions > 2 * 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        honest(self, batches)

    monkeypatch.setattr(rehearsal.Rehearsing, "_gradients", refused)
    found = kind("train").edge(made, math.inf)
    assert (found.asked, found.fits, found.too_many) == (256, 148, 152)
    assert 2 * 148 in tried and 2 * 152 in tried
    assert 0 < found.measured_gib < found.room_gib


def test_a_toggle_that_searches_itself_is_not_searched():
    made = request("eager", "adamw_foreach", "padding", "auto_batch_size", workload=WORKLOAD)
    assert kind("train").edge(made, math.inf) is None


@pytest.mark.parametrize(
    "way", ["sequential", "fused_multi_lora", pytest.param("batched", marks=pytest.mark.exhaustive)]
)
def test_jobs_are_added_until_one_is_too_many(way, monkeypatch):
    """With every way that trains several; the step that is refused is that of all jobs together."""
    cell = next(c for c in cells("workload={jobs_4: {seq_len: 16}}", f"ablations=[{way}]") if c.toggles)
    made = request_of(cell, "candidate", torch.float32, torch.device("cpu"))
    of_kind, honest = kind("train"), type(kind("train")).trial
    tried = []

    def refused(self, arm, begin):
        tried.append(len(arm.steps))
        if len(arm.steps) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return honest(self, arm, begin)

    monkeypatch.setattr(type(of_kind), "trial", refused)
    found = of_kind.edge(made, math.inf)
    assert (found.of, found.asked, found.fits, found.too_many) == ("jobs", 4, 2, 3)
    assert set(tried) == {1, 2, 3}
    assert found.processes > 2  # of a model that small


@pytest.mark.gpu
@pytest.mark.parametrize("batching", ["padding", "packing"])
def test_on_a_full_gpu_the_edge_is_where_a_step_of_the_arm_ends(batching):
    """Of a GPU of which this process may have four GiB."""
    long = Workload(name="long", kind="fixed", batch_size=1, seq_len=16_384)
    made = request("sdpa", "adamw_fused", batching, model="smollm2-135m", workload=long, device="cuda")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * GIB) / total)
    try:
        found = kind("train").edge(made, math.inf)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 0 < found.fits < found.too_many < found.asked
    assert found.too_many - found.fits == 16_384 // 64
    assert found.measured_gib < 4.0 and found.predicted_gib == pytest.approx(found.measured_gib, rel=0.1)
