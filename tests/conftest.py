"""Shared by all tests: small models and workloads, and the marker for a GPU."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two cores, and tests beside one another

import pytest
from hypothesis import settings

# The same examples on each run: what only another run would find helps nobody, and stops whoever comes next.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# Of what a script runs in its background Ctrl-C is ignored, and so of all that the tests would start there.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_zoo",
    "test_interpreter",
    "test_ranks",
    "test_faults",
    "test_outcomes",
    "test_weights",
    "test_ray_queue",
)


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """What the harness sets for its workers ends with the test: a sweep in another environment than that of the server
    of sweeps is a whole command (helpers.sweep), and takes twenty seconds more."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    """A test that left torch with two threads made some after it thirty times as slow, beside the other worker's tests:
    threads of which one waits for a core keep the others' cores busy with waiting."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def what_is_older_is_no_garbage() -> None:
    """A seat collects garbage before each arm. A worker does not walk what was there before it (lorabench.run.preload),
    and a test in the middle of a thousand walked whatever these had left: two jobs took 130 seconds in place of 20."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What lorabench warns of, whatever handlers other tests have left."""
    heard: list[str] = []
    monkeypatch.setattr(logging.getLogger("lorabench"), "warning", heard.append)
    return heard


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What collecting imports stays: that the collector walks it again and again takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # What libraries count at their end is counted; behind pytest's own end, which collects again and again.
        atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # The longest begin: beside the others, not alone at the end.
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skipif(True, reason="needs a CUDA device; none here"))
