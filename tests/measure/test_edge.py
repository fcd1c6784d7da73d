"""How long samples may be for a step to fit: the search on memories that are known, and real steps of an arm."""

from __future__ import annotations

import math
import time

import pytest
import torch
from helpers import cells, request

from lorabench.contract.kind import kind
from lorabench.contract.memory_fit import GIB, Edge, Load
from lorabench.contract.workload import Workload
from lorabench.measure.edge import search
from lorabench.measure.kind import request_of

ASKED = 6400  # a grain is 100 tokens


class Device:
    """Steps of one sample that take `static` bytes and so many a token and a token's square; `tried` has their
    lengths, in order."""

    def __init__(self, room: int, static: int = 10 * GIB, token: int = 1 << 20, square: float = 0.0) -> None:
        self.room, self.static, self.token, self.square = room, static, token, square
        self.tried: list[int] = []

    def peak(self, tokens: int) -> int:
        return int(self.static + self.token * tokens + self.square * tokens * tokens)

    def run(self, tokens: int) -> int:
        self.tried.append(tokens)
        if self.peak(tokens) > self.room:
            raise torch.OutOfMemoryError
        return self.peak(tokens)

    def edge(self, until: float = math.inf) -> Edge:
        return search(self.run, lambda tokens: Load(tokens, tokens * tokens), ASKED, self.room, until)


@pytest.mark.parametrize("square", [0.0, 2000.0])
@pytest.mark.parametrize("fits", [150, 1234, 3299, 6399])
def test_the_edge_is_the_last_length_that_ran_and_the_first_that_did_not(fits, square):
    device = Device(0, square=square)
    device.room = device.peak(fits)
    found = device.edge()
    assert (found.tokens, found.too_many) == (fits // 100 * 100, fits // 100 * 100 + 100)
    assert device.peak(found.tokens) <= device.room < device.peak(found.too_many)
    assert found.measured_gib == pytest.approx(device.peak(found.tokens) / GIB, abs=1e-4)


def test_the_model_says_where_to_look():
    device = Device(0)
    device.room = device.peak(5050)
    found = device.edge()
    assert found.predicted_gib == pytest.approx(found.measured_gib, rel=1e-3)
    assert device.tried == [100, 200, 400, 800, 1600, 5000, 5100]  # five small steps, and the edge's two sides


def test_a_model_that_is_wrong_costs_steps_and_not_the_answer():
    device = Device(0)
    device.room = device.peak(5050)
    honest = device.peak
    device.peak = lambda tokens: honest(tokens) + (3 << 30 if tokens > 1600 else 0)  # another kernel from there on
    found = device.edge()
    assert device.peak(found.tokens) <= device.room < device.peak(found.too_many)


def test_nothing_is_tried_above_what_a_small_step_has_said():
    device = Device(0, token=64 << 20)
    device.room = device.peak(250)
    found = device.edge()
    assert (found.tokens, found.too_many) == (200, 300)
    assert max(device.tried) == 300


def test_where_not_even_the_shortest_runs():
    found = Device(room=GIB).edge()
    assert (found.tokens, found.too_many, found.measured_gib) == (0, 100, None)
    assert str(found) == "not even samples of 100 tokens fit"


def test_with_the_time_up_it_says_what_it_has():
    device = Device(0)
    device.room = device.peak(5050)
    assert device.edge(until=time.perf_counter() - 1).tokens == 0 and not device.tried


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
    assert (found.asked, found.tokens, found.too_many) == (256, 148, 152)
    assert 2 * 148 in tried and 2 * 152 in tried
    assert 0 < found.measured_gib < found.room_gib


def test_a_toggle_that_searches_itself_is_not_searched():
    made = request("eager", "adamw_foreach", "padding", "auto_batch_size", workload=WORKLOAD)
    assert kind("train").edge(made, math.inf) is None


def test_several_jobs_are_not_searched():
    (cell, *_) = cells("workload=two_jobs", "ablations=[eager]")
    made = request_of(cell, "candidate", torch.float32, torch.device("cpu"))
    assert kind("train").edge(made, math.inf) is None
