"""Compiles every kernel of lorakernels for a GPU that need not be there, down to its machine code, in one dtype.

    python tests/lorakernels/compile_kernels.py 90 bfloat16        # compute capability 9.0
    python tests/lorakernels/compile_kernels.py 90 bfloat16 once   # the first launch of each, not every tile

A kernel that the interpreter runs may still be one that the compiler refuses. The launches are those of memcheck.py;
instead of running, each is compiled. Needs the package triton, and a process of its own: it makes torch look like a
CUDA build, so that the kernels are real ones.
"""

# ruff: noqa: E402 (torch has to look like a CUDA build before lorakernels is imported)
from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import torch

torch.version.cuda = torch.version.cuda or "none"

import lorakernels
import memcheck
import triton
from lorakernels.runtime import Kernel
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: str, dtype: str, which: str = "all") -> None:
    triton.runtime.driver.set_active(Driver(int(capability)))
    compiled: set[Any] = set()  # the functions: two modules have kernels of the same name

    def launch(self: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            if which == "all" or self not in compiled:
                self.run(*args, grid=grid, warmup=True, **kwargs)
            compiled.add(self)

        return compile_only

    JITFunction.__getitem__ = launch  # type: ignore[method-assign]
    kernels = set()
    for module in [
        memcheck,
        *(importlib.import_module(m.name) for m in pkgutil.walk_packages(lorakernels.__path__, "lorakernels.")),
    ]:
        if hasattr(module, "use_triton"):
            module.use_triton = lambda *tensors: tensors[0].numel() > 0  # type: ignore[attr-defined]
        kernels |= {f.function for f in vars(module).values() if isinstance(f, Kernel)}
    memcheck.kernels(getattr(torch, dtype))
    missing = kernels - compiled
    if missing:
        names = sorted(f"{f.fn.__module__}.{f.fn.__name__}" for f in missing)
        raise SystemExit(f"memcheck.py launches no {', '.join(names)}")
    print(f"compiled {len(compiled)} kernels for compute capability {capability}, {dtype}")


if __name__ == "__main__":
    main(*sys.argv[1:])
