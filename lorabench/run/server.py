"""The server of workers: a process that has imported torch, transformers and peft, of which every worker is a fork.

Nothing here imports torch: a command starts the server before its own imports, which take as long, and both go on
beside each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import get_temp_dir
from pathlib import Path

from lorabench.contract.ranks import switch_multicast_off
from lorabench.run.session import SERVER_FOLDER
from lorabench.run.signals import uninterrupted

PRELOAD = ["lorabench.run.leftovers", "lorabench.run.preload"]
_redirecting = threading.Lock()  # seats may be opened side by side


def set_up() -> None:
    """The environment of the server and of all workers, and what it imports, as long as it does not run."""
    # torch then counts GPUs through NVML: asking the driver would start it in the server, and a fork of a process
    # in which the driver has started cannot use the GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Two arms of different shapes share one process: growing segments keep the cache from fragmenting.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    switch_multicast_off()
    os.environ[SERVER_FOLDER] = get_temp_dir()
    forkserver.set_forkserver_preload(PRELOAD)


def start() -> None:
    """The server begins to import, if it does not run; nobody waits for it. `set_up` comes before it."""
    with held_back():
        forkserver.ensure_running()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C goes to every process of the terminal, and would meet the server of workers, or a spawned worker, in
    the middle of its imports. What is started here inherits that it is held back; the sweep ends it."""
    with uninterrupted(), _output_into(log()):
        resource_tracker.ensure_running()  # else it is started on the way, and lets SIGINT through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def log() -> Path:
    """Where the server's output goes; it ends with the sweep."""
    return Path(get_temp_dir(), "server.log")


@contextlib.contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """What is started here has the log for its output: it outlives a sweep that is killed by some seconds, in which who
    reads the sweep's output would still wait for it."""
    kept: dict[int, int] = {}
    with _redirecting, open(log, "ab") as target:
        try:
            for number in (1, 2):
                with contextlib.suppress(OSError):  # it is closed
                    kept[number] = os.dup(number)
                os.dup2(target.fileno(), number)
            yield
        finally:
            for number in (1, 2):
                os.dup2(kept[number], number) if number in kept else os.close(number)
            for number in kept.values():
                os.close(number)
