"""Readers of safetensors files: threads, page-locked memory, fastsafetensors, transformers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorabench.contract.reading import Checkpoint, WeightsReader
from lorabench.measure.plain_reader import PlainReader, fill, read_file, taken
from lorabench.measure.rates import host_bytes
from lorabench.measure.safetensors_file import Entry, aligned, entries
from lorabench.plan.architecture import quiet

CHUNK = 1 << 23  # bytes that are read and copied at once
ALIGNED = 256  # bytes: as torch's own allocator of GPU memory at the least, and what any kernel may ask for


def from_pretrained(source: Checkpoint) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        source.folder, device_map={"": source.device}, trust_remote_code=False, use_safetensors=True,
        local_files_only=True, **source.load,
    )  # fmt: skip


class ByTransformers(WeightsReader):
    """`modules`: how many of the model hold the weights that it last brought."""

    def read(self, checkpoint: Checkpoint) -> Any:
        with quiet():
            return from_pretrained(checkpoint)

    def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The model is left without its weights: it holds itself in circles, and would keep them, and the files that it
        maps, until Python's garbage collector comes by."""
        found = list(held.named_parameters())
        holding = [module for module in held.modules() if module._parameters]
        self.modules = len(holding)
        for module in holding:
            module._parameters.clear()
            vars(module).pop("quant_state", None)
        yield from found


class ByFastsafetensors(WeightsReader):
    """`read_files`: those of the last trial."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def read(self, checkpoint: Checkpoint) -> tuple[Any, Any]:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, str(checkpoint.device), max_threads=self.threads, nogds=True)
        self.read_files = [str(file) for file in checkpoint.files]
        loader.add_filenames({0: self.read_files})
        return loader, loader.copy_files_to_device()

    def place(self, held: tuple[Any, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The package's buffers live as long as a tensor in them does, so both can be closed."""
        loader, buffers = held
        for name in loader.get_keys():
            yield name, buffers.get_tensor(name)
        buffers.close()
        loader.close()


def by_threads(threads: int, pinned: bool) -> WeightsReader | None:
    """None: one thread without page-locked memory is what reads where there is no toggle."""
    if pinned:
        return Chunked(threads)
    return Parallel(threads) if threads > 1 else None


class Parallel(PlainReader):
    """A file a thread. `readers`: the threads that read in the last trial, and how many files each."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.readers: dict[int, int] = {}

    def read(self, checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
        self.readers = {}
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self._one, checkpoint.files))

    def _one(self, file: Path) -> dict[str, Tensor]:
        me = threading.get_ident()
        self.readers[me] = self.readers.get(me, 0) + 1
        return read_file(file)

    def notes(self) -> dict[str, Any]:
        return {"threads": self.threads, "pinned": False}


@dataclass
class Chunk:
    """Bytes of a file without a gap from `offset` on, and where in `into` each piece of them goes, (begin, bytes)."""

    file: Path
    offset: int
    into: Tensor
    pieces: list[tuple[int, int]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return self.pieces[0][0]

    @property
    def end(self) -> int:
        return sum(self.pieces[-1])


def chunks(file: Path, found: Sequence[Entry], begins: Sequence[int], into: Tensor) -> Iterator[Chunk]:
    """A file's tensors in chunks of at most CHUNK bytes: many small ones together, a large one in several."""
    chunk: Chunk | None = None
    for entry, begin in zip(found, begins, strict=True):
        for at in range(0, entry.size, CHUNK):
            piece = begin + at, min(CHUNK, entry.size - at)
            if chunk is None or sum(piece) - chunk.begin > CHUNK:
                if chunk:
                    yield chunk
                chunk = Chunk(file, entry.offset + at, into)
            chunk.pieces.append(piece)
    if chunk:
        yield chunk


class Lane:
    """One thread's way to the device. To a GPU: two page-locked buffers, of which one is filled while the other is
    copied, on a stream of its own. To a CPU there is no way to go: what is read is there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.chunks = device, 0
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.buffers = [host_bytes(CHUNK, device) for _ in range(2)]
            self.copied = [torch.cuda.Event() for _ in range(2)]

    def begin(self) -> None:
        self.chunks = 0
        if self.stream is not None:  # the current stream may still use the memory that it gives out
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def arrive(self) -> None:
        """Whatever comes next on the current stream waits for what was brought."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def carry(self, todo: deque[Chunk]) -> None:
        """Bring chunks until there are no more."""
        for chunk in taken(todo):
            self.chunks += 1
            with open(chunk.file, "rb", buffering=0) as opened:
                self._bring(opened.fileno(), chunk)

    def _bring(self, descriptor: int, chunk: Chunk) -> None:
        target = chunk.into[chunk.begin : chunk.end]
        pieces = [(begin - chunk.begin, size) for begin, size in chunk.pieces]
        if self.stream is None:
            fill(descriptor, chunk.offset, target.numpy(), pieces)
            return
        turn = self.chunks % 2
        self.copied[turn].synchronize()  # its last copy; at once where there was none
        fill(descriptor, chunk.offset, self.buffers[turn].numpy(), pieces)
        with torch.cuda.stream(self.stream):
            target.copy_(self.buffers[turn][: len(target)], non_blocking=True)
            self.copied[turn].record()


class Chunked(WeightsReader):
    """Chunks of all files, by several threads. The tensors of a file are views of one piece of device memory. The lanes
    are made in the first trial and kept, as a process keeps them for its next checkpoint; how long it took is noted."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lanes: list[Lane] = []

    @property
    def readers(self) -> list[Lane]:
        """Those that brought anything in the last trial."""
        return [lane for lane in self.lanes if lane.chunks]

    def read(self, checkpoint: Checkpoint) -> list[tuple[str, Tensor]]:
        """The tensors are made while the lanes bring what will be in them."""
        device = checkpoint.device
        self._ready(device)
        shards, todo = [], deque()
        for file in checkpoint.files:
            found = entries(file)
            begins, size = aligned(found, ALIGNED)
            into = torch.empty(size, dtype=torch.uint8, device=device)
            shards.append((found, begins, into))
            todo.extend(chunks(file, found, begins, into))
        with ThreadPoolExecutor(self.threads) as pool:
            running = [pool.submit(lane.carry, todo) for lane in self.lanes]
            made = [
                (e.name, e.of(into, at)) for found, begins, into in shards for e, at in zip(found, begins, strict=True)
            ]
            for lane in running:
                lane.result()
        return made

    def _ready(self, device: torch.device) -> None:
        if not self.lanes:
            began = time.perf_counter()
            self.lanes = [Lane(device) for _ in range(self.threads)]
            self.made_ms = 1000 * (time.perf_counter() - began)
        for lane in self.lanes:
            lane.begin()

    def place(self, held: list[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for lane in self.lanes:
            lane.arrive()
        yield from held

    def notes(self) -> dict[str, Any]:
        pinned = 2 * CHUNK * sum(lane.stream is not None for lane in self.lanes)
        return {"threads": self.threads, "pinned_bytes": pinned, "lanes_made_ms": self.made_ms}
