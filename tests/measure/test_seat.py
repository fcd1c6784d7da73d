"""What a seat answers."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers import cells, config, seat_of

from lorabench.measure import fairness, trial
from lorabench.measure.seat import Ready, Seat
from lorabench.plan.compose import plan


class Arm:
    """Something large."""


class Short(Seat):
    """Its arms run out of memory while they are prepared."""

    def __init__(self):
        self.alive = True

    def prepare(self, name):
        arm = Arm()
        self.held = weakref.ref(arm)
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name}")

    def drop(self, name):
        gc.collect()
        self.alive = self.held() is not None


def test_nothing_holds_an_arm_any_more_when_it_is_given_back():
    """The exception that ended it had done so, and the memory was missed by the others."""
    seat = Short()
    failed = seat.call("prepare", "eager")
    assert (failed.status, failed.reason) == ("oom", "it ran out of memory: CUDA out of memory: eager")
    assert not seat.alive


class Helped(Seat):
    """Two arms, of which one has a thread that computes when it is told to."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.guard, self.idle, self.turned, self.inside = fairness.Guard(alone=True), None, "", {}
        self.arms, self.host = {"own": None, "other": None}, {"own": [], "other": []}
        self.work, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._compute, name="helper", daemon=True).start()

    def _compute(self):
        while self.work.acquire():
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
            self.done.release()

    def on_trial(self, name, ms):
        pass

    def _check_base(self):
        pass

    def _kind(self, name):
        return SimpleNamespace(begin_turn=lambda *_: None, observe=lambda *_: None)

    def compute(self):
        self.work.release()
        self.done.acquire()


@pytest.mark.parametrize(
    ("within", "beside"), [(["own"], 0.0), (["own", "other"], 0.1), (["between"], 0.1), (["own", "between"], 0.1)]
)
def test_what_a_thread_computes_within_the_trials_of_one_arm_is_that_arm_s(within, beside, monkeypatch):
    def run_trial(arm, number):
        if number:
            seat.compute()
        return SimpleNamespace(total_ms=1.0, losses={})

    monkeypatch.setattr(trial, "run_trial", run_trial)
    seat = Helped()
    for name in ("own", "other"):
        seat.turn(name, [int(name in within)], on=True)
    if "between" in within:
        seat.compute()
    assert abs(seat.closing()["the thread helper"] - beside) < 0.05
    seat.turn("own", [0], on=True)  # for another family: what was before it is no work beside its trials
    seat.compute()
    assert abs(seat.closing()["the thread helper"] - 0.1) < 0.05


@pytest.mark.parametrize("toggle", ["lora_kernels", "fused_rms_norm", "gradient_checkpointing"])
def test_nothing_of_a_dropped_arm_is_left(toggle, tmp_path):
    cell = cells(f"ablations=[{toggle}]", "dtype=float32")[0]
    seat, stack = seat_of(cell, tmp_path)
    ready = seat.call("prepare", stack.name, stack)
    assert isinstance(ready, Ready), ready
    held = weakref.ref(seat.arms[stack.name].model)
    seat.call("turn", stack.name, [1])
    seat.call("drop", stack.name)
    assert held() is None


@pytest.mark.gpu
@pytest.mark.parametrize("toggles", ["cuda_graph", "[lora_kernels,cuda_graph]", "torch_compile"])
def test_an_arm_that_is_dropped_gives_its_memory_to_the_device(toggles, tmp_path):
    """Other processes need it, captured graphs' pools above all. What may stay is what libraries keep for a process:
    470 MB were seen on an H200, of 4.4 GB."""
    wanted = config("models=[smollm2-135m]", "workload=4x512", "dtype=bfloat16", f"ablations=[{toggles}]", "trials=3")
    machine = SimpleNamespace(device="cuda", dtype=lambda wanted: "bfloat16")
    seat, stack = seat_of(plan(wanted, "cuda").cells[0], tmp_path, machine)
    seat.give_back()
    before = torch.cuda.memory_reserved()
    ready = seat.call("prepare", stack.name, stack)
    assert isinstance(ready, Ready), ready
    seat.call("turn", stack.name, [1])
    most = torch.cuda.memory_reserved()
    seat.call("drop", stack.name)
    left = torch.cuda.memory_reserved() - seat.base.nbytes
    assert most - before > 1 << 30 and left - before < 512 << 20, (before, most, left)
