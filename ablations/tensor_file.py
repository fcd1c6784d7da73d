"""Saved tensors on their way to a file on the disk and back, counted. `disk_offloading.py` has the toggle.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lorabench.contract.ablation import Unsupported

WRITES = 2  # host buffers that may wait for the disk: a disk that is slower than the forward then holds it up
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(eq=False)
class Place:
    """Where in the file a tensor's numbers lie, contiguous and raw, and what they were."""

    number: int
    offset: int  # bytes
    shape: torch.Size
    dtype: torch.dtype
    written: Future[None] | None = None
    read: Future[tuple[Tensor, torch.cuda.Event | None]] | None = None


class TensorFile:
    """A file without a name that holds tensors between forward and backward: `pack` and `unpack` of saved tensors.

    Having no name it is gone with its last user, however that ends. It lies in Python's folder for temporary files,
    where a sweep's own are (`TMPDIR` names another), and takes the bytes of what waits at one time; the next step
    writes over them.

    One thread does all that waits for the disk, in the order in which it was asked: a tensor is read after it was
    written, and bytes are written over after they were read. On a GPU it goes through pinned memory and a stream of its
    own. As with every copy beside the computation, nobody may write into a tensor in place once it is saved.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: whose tensors are moved. Raises OSError where the folder takes no file."""
        self.device, self.folder = device, tempfile.gettempdir()
        self.tensors = self.bytes_out = self.bytes_back = 0  # of all steps so far; bytes as the system counted them
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it is open as long as this object is
        weakref.finalize(self, file.close)
        self.descriptor = file.fileno()
        self.size = self.end = 0  # bytes: reserved, and given to those who wait
        self.places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
        self.writes: deque[Future[None]] = deque()
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        # A new thread is on the first GPU, and would set up a context there beside the one of its process.
        beginning = {"initializer": torch.cuda.set_device, "initargs": (device,)} if on_gpu else {}
        self.thread = ThreadPoolExecutor(1, "tensor_file", **beginning)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """torch's `checkpoint`, whose inputs wait in the file."""
        with saved_tensors_hooks(self.pack, self.unpack):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """Begin to write a tensor of any shape and dtype; a subclass, another device's or an empty one stays as it is.
        Raises Unsupported where the disk has no room, and what an earlier write raised."""
        if type(tensor) is not Tensor or tensor.device != self.device or not tensor.numel():
            return tensor
        if len(self.writes) == WRITES:
            self.writes.popleft().result()
        place = Place(self.tensors, self._reserve(tensor.nbytes), tensor.shape, tensor.dtype)
        buffer = self._buffer(tensor.nbytes)
        place.written = self.thread.submit(self._write, buffer, self._to_host(tensor, buffer), place.offset)
        self.writes.append(place.written)
        self.places[place.number] = place
        self.tensors += 1
        return place

    def unpack(self, packed: Tensor | Place) -> Tensor:
        """The tensor again, contiguous, once it is there. The one that was packed before it is asked for meanwhile,
        because backward takes the layers in reverse. Raises what its write or its read raised."""
        if isinstance(packed, Tensor):
            return packed
        self._ask(packed)
        if (before := self.places.get(packed.number - 1)) is not None:
            self._ask(before)
        assert packed.read is not None and packed.written is not None
        reading, packed.read = packed.read, None
        packed.written.result()  # first, for what it raised
        tensor, copied = reading.result()
        if copied is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            tensor.record_stream(computing)
        return tensor

    def _reserve(self, nbytes: int) -> int:
        """The offset of so many bytes of the file: from its beginning again where nobody waits any more."""
        offset = self.end if self.places else 0
        end = offset + nbytes
        if end > self.size:
            with self._room(end - self.size):
                os.posix_fallocate(self.descriptor, self.size, end - self.size)
            self.size = end
        self.end = end
        return offset

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise Unsupported(
                f"the disk of {self.folder} has no room for {nbytes:,} more bytes ({error.strerror}); let TMPDIR name "
                "a folder on a larger one"
            ) from error

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def _to_host(self, tensor: Tensor, buffer: Tensor) -> torch.cuda.Event | None:
        """Copy a tensor into a buffer; returns when the copy is done, where that is later."""
        host = buffer.view(tensor.dtype).view(tensor.shape)
        if self.stream is None:
            host.copy_(tensor.detach())
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self.stream)
        return self._behind_it()

    def _write(self, buffer: Tensor, copied: torch.cuda.Event | None, offset: int) -> None:
        """In the thread. Onto the disk and out of the page cache: there it would lie in the host's memory, which other
        toggles use and say so, and be written while somebody else is measured."""
        if copied is not None:
            copied.synchronize()
        left = buffer.numpy().data
        with self._room(len(left)):
            while left:
                done = os.pwrite(self.descriptor, left, offset)
                left, offset, self.bytes_out = left[done:], offset + done, self.bytes_out + done
            os.fdatasync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _ask(self, place: Place) -> None:
        if place.read is None:  # not the place itself: while the thread held it, its bytes would not be free
            place.read = self.thread.submit(self._read, place.offset, place.shape, place.dtype)

    def _read(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, torch.cuda.Event | None]:
        """In the thread. A tensor on the device, and when its copy is done, where that is later."""
        buffer = self._buffer(shape.numel() * dtype.itemsize)
        left = buffer.numpy().data
        while left:
            done = os.preadv(self.descriptor, [left], offset)
            if not done:
                raise EOFError(f"{len(left)} bytes of a tensor are missing in the file in {self.folder}")
            left, offset, self.bytes_back = left[done:], offset + done, self.bytes_back + done
        host = buffer.view(dtype).view(shape)
        if self.stream is None:
            return host.to(self.device), None
        with torch.cuda.stream(self.stream):
            return host.to(self.device, non_blocking=True), self._behind_it()

    def _behind_it(self) -> torch.cuda.Event:
        """When all is done that the stream was given so far."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def filesystem(self) -> str | None:
        """Its name as Linux gives it ("ext4", "tmpfs"), or None where that is not to be seen."""
        device = os.fstat(self.descriptor).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        except OSError:
            return None
        return next((fields[fields.index("-") + 1] for fields in mounts if fields[2] == number), None)
