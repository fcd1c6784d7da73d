"""What a seat answers."""

import gc
import weakref

import torch

from lorabench.measure.seat import Seat


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
