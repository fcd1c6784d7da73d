"""Signals: what they do in a block, and blocks that they do not interrupt; and the end of another process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[[int, object], None]]) -> Iterator[None]:
    """Signals handled so in the block; only the main thread can say how, and elsewhere they are left as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the sweep when the block has ended. In the middle of it they could leave a worker that
    runs and that nobody kills, for which Python would wait before it exits.

    (Not by blocking them: what this thread blocks another one takes, NumPy's for instance, and Python raises here.)
    """
    came: list[int] = []
    try:
        with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, _: came.append(number))):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


def has_ended(process: int, within_s: float | None) -> bool:
    """Whether the process with this id has ended, asleep for at most so many seconds (None: until it has). Raises
    AttributeError and OSError where the system cannot say."""
    try:
        descriptor = os.pidfd_open(process)  # Linux only
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)
