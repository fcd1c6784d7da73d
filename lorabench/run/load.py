"""What else runs on this machine: the load, to be looked at before the first worker, whose own work makes load too."""

from __future__ import annotations

import os

from lorabench.contract.machine import Machine

QUIET = 0.5  # of the cores: of more, a step that wants them all waits for others


def load_average() -> float:
    """Of the last minute: processes that ran or wanted to."""
    return os.getloadavg()[0]


def disturbing(load: float, machine: Machine) -> str:
    """What a load of others does to the times, in a line; '' where it does nothing, as on a GPU."""
    if machine.device != "cpu" or load <= QUIET * machine.cores:
        return ""
    return (
        f"load {load:.1f} on {machine.cores} cores: other processes disturb the times, and intervals widen; better "
        f"measure while it is below {QUIET * machine.cores:g}"
    )
