"""How fast these very files can be read, and how fast bytes come to the device: what loading is held
against. Nothing is made of the bytes, and the memory that they go to is reused.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lorabench.measure.plain_reader import fill, taken
from lorabench.measure.trial import synchronize

BLOCK = 1 << 23  # bytes that a thread reads at once
THREADS = (1, 4, 16)  # tried one after the other, up to the machine's cores
MOST = 4 << 30  # bytes after which no further file is read: a rate needs no more
LITTLE, PASSES = 1 << 30, 5  # so little is read several times: other processes disturb it more
COPIED = 1 << 28  # bytes of one copy to a GPU; to a CPU a quarter, which is beyond its caches, too
COPIES = 4


def read_gbs(files: Sequence[Path], device: torch.device, before: Callable[[], None]) -> float | None:
    """10⁹ bytes a second, the best of several numbers of threads, each with a page-locked buffer of its own where there
    is a GPU. `before` puts the page cache into the state that is wanted. None where there is nothing to read."""
    sizes = [file.stat().st_size for file in files]
    read = [file for i, file in enumerate(files) if sum(sizes[:i]) < MOST]
    total = sum(sizes[: len(read)])
    cores = len(os.sched_getaffinity(0))
    took = []
    for threads in sorted({min(n, cores) for n in THREADS}):
        buffers = [host_bytes(BLOCK, device) for _ in range(threads)]
        for _ in range(PASSES if total < LITTLE else 1):
            before()
            began = time.perf_counter()
            _read(read, buffers)
            took.append(time.perf_counter() - began)
    return total / min(took) / 1e9 if total else None


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Host memory from which a device can be filled: page-locked for a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _read(files: Sequence[Path], buffers: Sequence[Tensor]) -> None:
    blocks = deque((file, at) for file in files for at in range(0, file.stat().st_size, BLOCK))

    def work(buffer: Tensor) -> None:
        for file, offset in taken(blocks):
            with open(file, "rb", buffering=0) as opened:
                size = min(BLOCK, file.stat().st_size - offset)
                fill(opened.fileno(), offset, buffer.numpy(), [(0, size)])

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(work, buffers))


def copy_gbs(device: torch.device) -> float:
    """10⁹ bytes a second from page-locked host memory to the device; to a CPU from memory to memory."""
    size = COPIED if device.type == "cuda" else COPIED // 4
    source, target = host_bytes(size, device), torch.empty(size, dtype=torch.uint8, device=device)
    took = []
    for _ in range(COPIES + 1):  # the first one touches the memory
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        took.append(time.perf_counter() - began)
    return size / min(took[1:]) / 1e9
