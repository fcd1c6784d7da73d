"""What the forkserver imports must not ask for the GPU: a process that has cannot fork workers that use it."""

import subprocess
import sys

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


def test_preloading_never_asks_for_the_gpu():
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["never asked"], done.stderr[-1000:]
