"""Folders that a sweep's cells share, each made once: a checkpoint, and what is made of it."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch


def saved_once(folder: Path, save: Callable[[Path], object]) -> Path:
    """The folder, filled by `save` where it is not there yet, and all of it on the disk: only what lies there can be
    forgotten by the page cache. Another process may be at it, too; whoever is first is kept."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        save(partial)
        for file in partial.iterdir():
            with open(file, "rb+") as opened:
                os.fsync(opened.fileno())
        with contextlib.suppress(OSError):  # the other one's is there by now
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
        gc.collect()  # the model that was saved holds itself in circles, and is no part of any arm's memory
        torch.cuda.empty_cache()
    return folder
