"""What the forkserver imports must not ask for the GPU: a process that has cannot fork workers that use it."""

import multiprocessing
import subprocess
import sys
import threading

import pytest

WATCHED = """
import torch

def refuse(*arguments, **options):
    raise SystemExit("asked for the GPU")

torch.cuda.is_available = lambda: True
for name in ("_lazy_init", "current_device", "get_device_capability", "get_device_properties", "get_device_name"):
    setattr(torch.cuda, name, refuse)
import lorabench.run.preload
print("never asked")
"""


@pytest.mark.exhaustive
def test_preloading_never_asks_for_the_gpu():
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["never asked"], done.stderr[-1000:]


def test_progress_bars_in_a_worker_take_no_semaphore_that_would_leak(monkeypatch):
    """The worker is killed when its cell ends, and the resource tracker would complain of it on the sweep's stderr."""
    from tqdm import tqdm

    from lorabench.run import worker

    def refuse(*arguments, **options):
        raise AssertionError("a lock among processes")

    monkeypatch.setattr(multiprocessing, "RLock", refuse)
    monkeypatch.setattr(tqdm, "_lock", None, raising=False)
    worker._own_progress_lock()
    assert list(tqdm(range(2), disable=True)) == [0, 1]
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))
