"""The same tricks where the arms have processes of their own, and only numbers can be compared."""

from __future__ import annotations

from zoo.clock import ClockOfTime, WorkInBatches
from zoo.gradients import CachedStep, NegatedWhenLong, NoBackward, WrongSignBelow
from zoo.optimizer import MovesOnce
from zoo.state import Tf32


class NoBackwardApart(NoBackward):
    name = "no_backward_apart"
    caught = "each gradient"
    global_patch = True


class NegatedWhenLongApart(NegatedWhenLong):
    name = "negated_when_long_apart"
    global_patch = True


class WrongSignBelowApart(WrongSignBelow):
    name = "wrong_sign_below_apart"
    global_patch = True


class CachedStepApart(CachedStep):
    name = "cached_step_apart"
    caught = "each gradient"
    global_patch = True


class MovesOnceApart(MovesOnce):
    name = "moves_once_apart"
    caught = "update against AdamW"
    global_patch = True


class WorkInBatchesApart(WorkInBatches):
    name = "work_in_batches_apart"
    caught = "each gradient"
    global_patch = True


class ClockOfTimeApart(ClockOfTime):
    name = "clock_of_time_apart"
    caught = "whole process"
    global_patch = True


class Tf32Apart(Tf32):
    name = "tf32_apart"
    summary = "turns TF32 on in its own process, which its reference has not"
    caught = "whole process"
    global_patch = True
