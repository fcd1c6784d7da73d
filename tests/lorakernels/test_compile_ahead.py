"""Kernels compiled before they are launched: several at once, nothing run, errors left to who launches."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lorakernels import compile_ahead, runtime
from lorakernels.runtime import Kernel

ON_A_PRETENDED_GPU = """
import sys
import threading
import torch
torch.version.cuda = torch.version.cuda or "none"
from lorakernels import compile_ahead
from lorakernels.ops import concat_operand
import triton
from triton.compiler import CompiledKernel
from compile_kernels import Driver

triton.runtime.driver.set_active(Driver(90))
concat_operand.use_triton = lambda *tensors: True
concat_operand.fuses = lambda *a: True
compiling, most = set(), []
def begins(**_):
    compiling.add(threading.get_ident())
triton.knobs.compilation.listener = begins
launched = []
CompiledKernel.__getitem__ = lambda self, grid: lambda *a, **k: launched.append(self)
compile_ahead.threads = lambda: 2
x, a = torch.ones(64, 256, dtype=torch.bfloat16), torch.ones(16, 256, dtype=torch.bfloat16)
out = torch.full((64, 272), 7.0, dtype=torch.bfloat16)
columns = concat_operand.LoraColumns(a)
compile_ahead.kernels_of([
    lambda tile=tile: concat_operand.concat_operand_into(x, columns, out, tile) for tile in ("fused", "fused_small")
])
kernel = concat_operand._concat_operand_kernel
(cache, *_), = kernel.function.device_caches.values()
assert len(cache) == 2 and all(isinstance(c, CompiledKernel) for c in cache.values()), cache
assert all(c.asm["cubin"] for c in cache.values())
assert threading.get_ident() not in compiling and len(compiling) == 2, compiling
assert not kernel._compiled and bool((out == 7).all()), "nothing was launched"
print("compiled", len(cache))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_forms_are_compiled_on_threads_and_not_launched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    command = [sys.executable, "-W", "ignore", "-c", ON_A_PRETENDED_GPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.strip() == "compiled 2"


class Mode:
    """What Triton offers, without Triton."""

    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_a_launch_inside_compiles_and_one_outside_launches(monkeypatch):
    seen = []
    function = SimpleNamespace(run=lambda *a, grid, warmup, **options: seen.append((grid, warmup, options)))
    driver = SimpleNamespace(get_current_device=lambda: 0)
    fake = SimpleNamespace(
        AsyncCompileMode=Mode, jit=lambda f: function, runtime=SimpleNamespace(driver=SimpleNamespace(active=driver))
    )
    monkeypatch.setattr(runtime, "triton", fake)
    monkeypatch.setitem(sys.modules, "triton", fake)

    def scale(x_ptr, n):
        """Never run."""

    launched = Kernel(scale)
    compile_ahead.kernels_of([lambda: launched[(3,)](torch.zeros(1), 64, num_warps=4)])
    assert seen == [((3,), True, {"num_warps": 4})]
    assert not launched._compiled, "the first real launch still goes through Triton"
    assert not compile_ahead.collecting()


def test_errors_are_left_to_the_call_that_meets_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=Mode))
    inside = []

    def broken():
        inside.append(compile_ahead.collecting())
        raise RuntimeError("out of something")

    compile_ahead.kernels_of([broken])
    assert inside == [True] and not compile_ahead.collecting()


def test_a_triton_that_cannot_is_no_obstacle(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    called = []
    compile_ahead.kernels_of([lambda: called.append(1)])
    assert not called


def test_one_thread_a_core(monkeypatch):
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert compile_ahead.threads() == 3
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda _: set(range(200)), raising=False)
    assert compile_ahead.threads() == compile_ahead.MAX_THREADS
