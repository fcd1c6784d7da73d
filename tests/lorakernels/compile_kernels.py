"""Compiles every kernel of lorakernels for a GPU that need not be there, down to its machine code, in one dtype.

    python tests/lorakernels/compile_kernels.py 90 bfloat16        # compute capability 9.0
    python tests/lorakernels/compile_kernels.py 90 bfloat16 once   # the first launch of each, not every tile

A kernel that the interpreter runs may still be one that the compiler refuses, or makes wrong: see `overwritten`. The
launches are those of memcheck.py; instead of running, each is compiled, as it would be for sizes like those of models
and, with all tiles, for its own. Needs the package triton, and a process of its own: it makes torch look like a CUDA
build, so that the kernels are real ones.
"""

# ruff: noqa: E402 (torch has to look like a CUDA build before lorakernels is imported)
from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Sequence
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


def aligned(arguments: Sequence[Any]) -> list[Any]:
    """Arguments for which the compiler makes what it makes for a model's: pointers and strides of whole 16 bytes, with
    which rows are copied ahead."""
    made = list[Any]()
    for x in arguments:
        if isinstance(x, torch.Tensor):
            made.append(torch.empty(64, dtype=x.dtype))
        else:
            made.append(16 * x if type(x) is int and x > 1 else x)
    return made


def overwritten(ttgir: str) -> list[str]:
    """Buffers of a loop that a product on Hopper's tensor cores may still read while later rows are copied into them.

    Such a product goes on behind the wait that leaves it pending, and the copy for the iteration that is as many ahead
    as there are buffers goes into the one that it reads. Triton gives an operand one buffer more than there are copies
    ahead, but not if it has a second user (seen in 3.6: an x that was stored, too). With 128 columns of S an H200 then
    had wrong ones; with fewer the product is over before the copy arrives, mostly.
    """
    buffers = dict(re.findall(r"(%\S+) = ttg\.local_alloc\s*: \(\) -> !ttg\.memdesc<(\d+)x", ttgir))
    place = dict(re.findall(r"(%\S+) = ttg\.memdesc_index (%[^\[]+)\[", ttgir))
    before, _, loop = ttgir.partition("scf.for")
    ahead = Counter(place.get(to, "") for to in re.findall(r"async_copy_global_to_local [^,]+, (%\S+) ", before))
    found = set[str]()
    for operands, pending in re.findall(r"warp_group_dot_wait ([^{]*)\{pendings = (\d+)", loop):
        read = {place.get(operand.strip(), "") for operand in operands.split(",")} & {*buffers}
        found |= {name for name in read if int(pending) and ahead[name] >= int(buffers[name])}
    return sorted(found)


def main(capability: str, dtype: str, which: str = "all") -> None:
    triton.runtime.driver.set_active(Driver(int(capability)))
    compiled: set[Any] = set()  # the functions: two modules have kernels of the same name
    wrong: set[str] = set()

    def launch(self: Any, grid: Any) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            if which == "all" or self not in compiled:
                compiler = {k: v for k, v in kwargs.items() if k.isupper() or k.startswith("num_")}
                for taken in [aligned(args), args][: 2 if which == "all" else 1]:
                    found = self.run(*taken, grid=grid, warmup=True, **kwargs)
                    wrong.update(f"{self.fn.__name__} {compiler}: {name}" for name in overwritten(found.asm["ttgir"]))
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
    if wrong:
        raise SystemExit("tensor cores may read what is written meanwhile:\n" + "\n".join(sorted(wrong)))
    print(f"compiled {len(compiled)} kernels for compute capability {capability}, {dtype}")


if __name__ == "__main__":
    main(*sys.argv[1:])
