"""Compiles the kernels of several calls at once, on threads, before the calls are made one after another.

    compile_ahead.kernels_of([f, g])      # f and g run without launching; what they would launch is compiled
    f(), g()                              # finds its kernels compiled

A new shape wants some 30 kernels at half a second each; Triton compiles outside of Python's lock but for the first
tenth of that, so threads share it. The calls do run, library products included, on whatever their inputs hold: they
must be ones that may run several times. What they make holds nothing of use, so whoever keeps a result for later asks
`collecting` first. Run: python -m pytest tests/lorakernels/test_compile_ahead.py
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

MAX_THREADS = 16  # more kernels than that are hardly ever asked for at once
_collecting: ContextVar[bool] = ContextVar("_collecting", default=False)  # of this thread: backward has its own


def collecting() -> bool:
    """Whether this thread is in a call that is made for the sake of what it would launch."""
    return _collecting.get()


@contextlib.contextmanager
def _collect() -> Iterator[None]:
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def kernels_of(calls: Iterable[Callable[[], Any]]) -> None:
    """Compiles every kernel that these calls launch and that is not compiled yet. What goes wrong is no error here: the
    call itself will meet it when it is made."""
    mode = getattr(sys.modules.get("triton"), "AsyncCompileMode", None)
    if mode is None:
        return
    with contextlib.suppress(Exception), ThreadPoolExecutor(threads()) as pool, mode(pool), _collect():
        for call in calls:
            call()


def threads() -> int:
    """How many kernels are compiled at once: one a core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores))
