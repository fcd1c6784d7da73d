"""Energy: what a counter that moves some ten times a second says of a block of steps, and when it says nothing."""

import math
import threading
import time
from functools import partial
from time import perf_counter
from types import SimpleNamespace

import pytest
from helpers import PEFT, arm, cells, seat_of

from lorabench.measure import energy
from lorabench.measure.energy import EVERY_S, LEAST_S, MOVEMENTS, Movements, block
from lorabench.measure.kind import TURN
from lorabench.record.schema import Energy


class Gpu:
    """A GPU of `watts` with a counter that moves every `period` seconds, and steps of `step_s`. Its time is made up,
    and the counter is looked at where the thread would."""

    def __init__(self, watts=500.0, period=0.1, step_s=0.01):
        self.watts, self.period, self.step_s, self.time, self.steps = watts, period, step_s, 100.03, 0
        self.moved = Looked(self.read, self.now)

    def step(self):
        end = self.time + self.step_s
        while self.time + EVERY_S < end:
            self.time += EVERY_S
            self.moved.look()
        self.time = end
        self.steps += 1

    def read(self):
        return int(self.watts * 1000 * self.period * math.floor(self.time / self.period)) if self.period else 7

    def now(self):
        return self.time

    def block(self, usual_ms=None):
        return block(self.step, self.moved, 1000 * self.step_s if usual_ms is None else usual_ms, self.now)


class Looked(Movements):
    """Without the thread."""

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass


@pytest.mark.parametrize("step_s", [0.003, 0.013, 0.09, 0.35, 4.0])
@pytest.mark.parametrize("period", [0.02, 0.1])
def test_a_step_costs_its_power_times_its_length(step_s, period):
    gpu = Gpu(step_s=step_s, period=period)
    found = gpu.block()
    assert found.steps == gpu.steps == math.ceil(LEAST_S / step_s - 1e-9)
    assert found.seconds / found.steps == pytest.approx(step_s)
    assert found.joules / found.steps == pytest.approx(500 * step_s, rel=0.005)


def test_a_counter_that_moves_seldom_gets_more_time():
    found = Gpu(period=0.3).block()
    assert 1.2 < found.seconds <= 2.0
    assert found.joules / found.steps == pytest.approx(5.0, rel=0.01)


def test_nothing_is_said_where_the_counter_stands_still_or_goes_back():
    assert Gpu(period=0).block() is None
    assert Gpu(watts=-5.0).block() is None


def test_nothing_is_said_of_steps_that_were_shorter_than_the_trials():
    assert Gpu(step_s=0.01).block(usual_ms=20.0) is None
    assert Gpu(step_s=0.01).block(usual_ms=5.0) is not None  # the host's share between two steps is no part of a trial


def test_the_thread_sees_what_moves_and_ends_with_its_context():
    began, threads = perf_counter(), threading.active_count()
    with Movements(lambda: int(500 * 1000 * 0.05 * ((perf_counter() - began) // 0.05))) as moved:
        time.sleep(0.8)
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert moved.watts == pytest.approx(500, rel=0.1) and len(moved) >= MOVEMENTS


class FakeNvml:
    """NVML's binding, of which only the counter is asked."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpu):
        self.gpu = gpu

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.gpu is None:
            raise self.NVMLError("Not Supported")
        return self.gpu.read()


@pytest.fixture
def on_gpu(monkeypatch):
    """(energy of an arm on a made-up GPU, how often the arm was cleared); None: a GPU that does not count."""

    def measure(gpu, ranks=1):
        monkeypatch.setattr(energy, "nvml_handle", lambda: (FakeNvml(gpu), "handle"))
        monkeypatch.setattr(energy, "run_trial", lambda arm: gpu.step() if gpu else time.sleep(0.01))
        monkeypatch.setattr(energy, "block", partial(block, now=gpu.now if gpu else perf_counter))
        monkeypatch.setattr(energy, "Movements", lambda read: gpu.moved if gpu else Movements(read))
        cleared = []
        made = SimpleNamespace(
            device=SimpleNamespace(type="cuda"), ranks=SimpleNamespace(size=ranks),
            kind=SimpleNamespace(clear=cleared.append),
        )  # fmt: skip
        return energy.measure(made, 10.0), len(cleared)

    return measure


def test_an_arm_on_a_gpu_is_measured_by_nvmls_counter(on_gpu):
    found, cleared = on_gpu(Gpu())
    assert found.joules / found.steps == pytest.approx(5.0, rel=0.01) and cleared == 1
    assert on_gpu(None) == (None, 1)  # it does not count
    assert on_gpu(Gpu(), ranks=2)[0] is None


def test_on_a_cpu_and_without_nvml_it_is_unknown(monkeypatch):
    made = arm(*PEFT)
    monkeypatch.setattr(energy, "run_trial", lambda arm: pytest.fail("a step was taken"))
    assert energy.measure(made, 1.0) is None
    monkeypatch.setattr(energy, "nvml_handle", lambda: None)
    made.device = SimpleNamespace(type="cuda")
    assert energy.measure(made, 1.0) is None


@pytest.mark.parametrize("wanted", [True, False])
def test_a_seat_asks_once_an_arm_where_it_is_wanted_and_says_how_long_it_took(wanted, tmp_path, monkeypatch):
    """Of several processes of an arm one is asked to."""
    asked, found = [], Energy(joules=1.0, steps=2, seconds=3.0)
    monkeypatch.setattr(energy, "measure", lambda arm, usual_ms: asked.append((arm.name, usual_ms)) or found)
    seat, _ = seat_of(cells("ablations=[eager]")[1], tmp_path)
    stacks = seat.family.stacks
    for stack in stacks:
        seat.prepare(stack.name, stack, False)
        seat.turn(stack.name, [TURN])
    ended = [seat.end(stack.name, 0, 4.0, wanted) for stack in stacks]
    assert asked == ([("reference", 4.0), ("eager", 4.0)] if wanted else [])
    assert [one.energy for one in ended] == 2 * [found if wanted else None]
    assert all(one.seconds["energy"] >= 0 for one in ended)


@pytest.mark.gpu
def test_on_a_gpu_an_arm_draws_the_same_twice_within_a_tenth():
    """Watts: so small a step waits for the host, whose time for it is another one each second."""
    if energy.nvml_handle() is None:
        pytest.skip("no NVML here")
    made = arm("sdpa", "adamw_fused", "padding", model="smollm2-135m", device="cuda")
    usual_ms = min(energy.run_trial(made).total_ms for _ in range(5))
    _, first, second = (energy.measure(made, usual_ms) for _ in range(3))  # in its first second a cold GPU draws less
    if first is None or second is None:
        pytest.skip("this GPU, or the part of it that is here, does not count its energy")
    assert first.seconds >= LEAST_S and first.steps > 1
    assert 50 < first.joules / first.seconds < 1500  # watts of one GPU
    assert first.joules / first.seconds == pytest.approx(second.joules / second.seconds, rel=0.1)
