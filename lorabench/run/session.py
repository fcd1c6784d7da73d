"""The session: one run's entry in environment.json, which the records that it measured name."""

from __future__ import annotations

import itertools
import os
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

Session = dict[str, Any]
SERVER_FOLDER = (
    "LORABENCH_SERVER_FOLDER"  # names to the fork server the folder of its socket, which it may have to remove
)


def scratch_prefix(sweep: int) -> str:
    """How the name of a sweep's temporary folder begins, by its process id: what outlives the sweep can remove it."""
    return f"lorabench-{sweep}-"


_earlier = itertools.count()  # sessions of this process: two may begin within one second


def new_session(command: list[str]) -> Session:
    """One run's entry in environment.json: when, what command, which code. To be made before the run, which may write
    into the checkout; the machine is added by who has looked at it."""
    from lorabench.measure.machine import commit

    now, number = datetime.now(UTC), next(_earlier)
    head, dirty = commit()
    return {
        "id": f"{now:%Y%m%dT%H%M%S}-{os.getpid()}" + (f"-{number}" if number else ""),
        "started": now.isoformat(timespec="seconds"),
        "command": command,
        "lorabench": version("lorabench"),
        "commit": head,
        "dirty": dirty,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }
