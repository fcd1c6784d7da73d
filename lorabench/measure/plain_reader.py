"""How safetensors files are read without any toggle: the reference of such cells, and what a toggle builds on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lorabench.contract.reading import Checkpoint, WeightsReader
from lorabench.measure.safetensors_file import aligned, entries

T = TypeVar("T")
ALIGNED = 64  # bytes: as torch's own allocator of host memory
MOST_AT_ONCE = 1000  # buffers that one call of preadv may fill (IOV_MAX is 1024)


class PlainReader(WeightsReader):
    """File after file into host memory, then tensor after tensor to the device. A file's memory is given back when its
    last tensor has been taken."""

    def read(self, checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
        return [read_file(file) for file in checkpoint.files]

    def place(self, held: list[dict[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        held.reverse()
        while held:
            shard = held.pop()
            for name in list(shard):
                yield name, shard.pop(name).to(device)


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, really read, each once and where it stays: `load_file` maps the file, and
    reads when a tensor is first used."""
    found = entries(file)
    begins, size = aligned(found, ALIGNED)
    memory = torch.empty(size, dtype=torch.uint8)
    pieces = [(begin, entry.size) for begin, entry in zip(begins, found, strict=True)]
    with open(file, "rb", buffering=0) as opened:
        fill(opened.fileno(), found[0].offset if found else 0, memory.numpy(), pieces)
    return {entry.name: entry.of(memory, begin) for begin, entry in zip(begins, found, strict=True)}


def taken(todo: deque[T]) -> Iterator[T]:
    """One after the other, until none is left; several threads may take from the same."""
    while True:
        try:
            yield todo.popleft()
        except IndexError:
            return


def fill(descriptor: int, offset: int, memory: Any, pieces: Sequence[tuple[int, int]]) -> None:
    """Read what lies in a file without a gap from `offset` on into pieces of `memory`, a buffer, each (begin, bytes).
    Raises EOFError where the file ends before."""
    view = memoryview(memory)
    wanted = [view[begin : begin + size] for begin, size in pieces if size]
    while wanted:
        got = os.preadv(descriptor, wanted[:MOST_AT_ONCE], offset)
        if not got:
            raise EOFError(f"the file ends at byte {offset}")
        offset += got
        while wanted and got >= len(wanted[0]):
            got -= len(wanted.pop(0))
        if got:
            wanted[0] = wanted[0][got:]
