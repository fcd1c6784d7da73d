"""The kernel's page cache of files: made to hold them, or to forget them, and looked at whether it did."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from lorabench.contract.ablation import Unsupported

PAGE = 4096
BLOCK = 1 << 24
TRIES, STILL_THERE = 20, 0.1  # how often, and which share of a file may stay
PROBES = 32  # pages of a file that are looked at to see whether the page cache forgot it


def hold(files: Iterable[Path]) -> None:
    """Read the files, so that the page cache has them."""
    block = bytearray(BLOCK)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def forget(file: Path) -> None:
    """Tell the page cache to drop a file. Raises Unsupported where it still holds it (tmpfs has nowhere else)."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        for _ in range(TRIES):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if resident(opened.fileno(), size) <= STILL_THERE:
                return
            time.sleep(0.05)  # pages that somebody still writes, reads or maps stay for a moment
    raise Unsupported(f"the page cache does not forget {file.parent}: a cold cache needs a disk behind it")


def resident(descriptor: int, size: int) -> float:
    """Share of the file's probed pages that can be read without waiting for the disk. Probing one page at a time, from
    the end: a read that had to wait would start the kernel's read-ahead."""
    pages = max(1, size // PAGE)
    offsets = sorted({pages * i // PROBES for i in range(PROBES)}, reverse=True)
    found = 0
    for page in offsets:
        try:
            found += bool(os.preadv(descriptor, [bytearray(1)], page * PAGE, os.RWF_NOWAIT))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
    return found / len(offsets)
