"""A toggle that goes wrong in whatever way its parameter names; the tests bring it with their third party's."""

import contextlib
import gc
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar

import torch

from lorabench.contract.ablation import Ablation, NotApplied, Requires, Unsupported
from lorabench.contract.step import Wrapped
from lorabench.run.messages import HEAD, MARK, send

PATCHES = {"patch_words": "many", "patch_float": 2.5, "patch_negative": -1}
AUDITS = {"audit_words": "many", "audit_float": 2.5, "audit_none": None, "audit_negative": -1}


def nested(depth):
    made = {}
    for _ in range(depth):
        made = {"deeper": made}
    return made


NOTES = {
    "notes_dtype": {"x": torch.float32}, "notes_bytes": {"x": b"\xff"}, "notes_surrogate": {"x": "\ud800"},
    "notes_deep": nested(5000), "notes_list": ["x"], "notes_keys": {1: "x"},
}  # fmt: skip


def pipe():
    """The worker's connection to the sweep, which a toggle has no business with."""
    return next(o for o in gc.get_objects() if isinstance(o, Connection) and o.writable and not o.closed)


class Silent(Exception):
    def __str__(self):
        raise LookupError("for words")


def write_everywhere():
    """Into every descriptor that the fork server has handed on."""
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(number, b"garbage")


class OddRequires(Requires):
    def unmet(self, machine, model=None):
        raise LookupError("of its needs")


@dataclass(frozen=True, kw_only=True)
class Odd(Ablation):
    name: ClassVar[str] = "odd"
    slot: ClassVar[str] = "third_party"

    way: str = "none"

    def __post_init__(self):
        if self.way == "constructor":
            raise LookupError("while it was made")
        if self.way == "constructor_exit":
            sys.exit(0)

    @property
    def content(self):
        if self.way == "content":
            raise LookupError("what I am")
        return {"way": object()} if self.way == "content_object" else super().content

    @property
    def label(self):
        if self.way == "label_time":
            return f"odd({time.monotonic_ns()})"
        if self.way == "label":
            raise LookupError("who am I")
        return 7 if self.way == "label_number" else super().label

    @property
    def excludes(self):
        if self.way == "excludes":
            raise LookupError("whom")
        return {"attention": ""} if self.way == "excludes_empty" else {}

    @property
    def requires(self):
        return OddRequires() if self.way == "requires" else Requires()

    def without_effect(self, reference, dtype):
        if self.way == "effect":
            raise LookupError("on what")
        if self.way == "effect_exit":
            sys.exit(0)
        if self.way == "effect_silent":
            raise Silent
        return {"effect_empty": "", "effect_number": 3}.get(self.way)

    def patch(self, model):
        if self.way == "patch":
            raise LookupError("nothing like it")
        if self.way == "patch_exit":
            sys.exit(0)
        if self.way == "patch_silent":
            raise Silent
        if self.way == "descriptors":
            write_everywhere()
        if self.way == "unsupported_empty":
            raise Unsupported
        if model is not None:
            model.odd = self.way
        return PATCHES.get(self.way, 1)

    def batch(self, samples, workload):
        return [] if self.way == "batch" else None

    def collate(self, batch):
        return None if self.way == "collate" else batch

    def step(self, step):
        if self.way == "garbage":
            os.write(pipe().fileno(), b"Segmentation fault (core dumped)\n")
        if self.way == "half":
            os.write(pipe().fileno(), HEAD.pack(MARK, 1000) + b"and then")
            time.sleep(10_000)
        if self.way == "other":
            send(pipe(), {"status": "ok"})
        if self.way == "closed":
            pipe().close()
            time.sleep(10_000)
        return BackInTime(step) if self.way == "clock" else None if self.way == "step" else step

    def audit(self, evidence):
        if self.way == "not_applied_empty":
            raise NotApplied(" ")
        return AUDITS.get(self.way, 1)

    def notes(self, evidence):
        return NOTES.get(self.way, {})


class BackInTime(Wrapped):
    """Puts the clock back by an hour in every backward."""

    def backward(self, loss):
        super().backward(loss)
        now = time.perf_counter
        time.perf_counter = lambda: now() - 3600
