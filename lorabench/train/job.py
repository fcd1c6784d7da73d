"""One job in training: which samples its next step has, its optimizer and learning rate, and when it ends."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lorabench.contract.batch import Sample
from lorabench.contract.job import Job
from lorabench.plan.jobs_file import EarlyStop, Entry

WAITING, RUNNING, DONE, STOPPED, NAN = "waiting", "running", "done", "stopped early", "not a number"
OF_A_SWEEP = ("samples", "batch_size", "jobs")  # fields of a text that a job says by itself
HELD_OUT = 1 << 32  # no epoch has this number: the draw of what is held out


@dataclass
class Progress:
    """What a job has come to; all of it is saved. `loss` is that of the last step; `best` the lowest held-out loss and
    `worse` how many times in a row it was not lower."""

    step: int = 0
    status: str = WAITING
    loss: float | None = None
    held_out: float | None = None
    best: float | None = None
    worse: int = 0


@dataclass
class Training:
    """A job. `samples` are those that are trained on, `held_out` those of its early stop, `rows` a fingerprint of both:
    which ones a step has follows from its number as long as they are the same. `left_out`: how many rows have nothing
    to train on."""

    entry: Entry
    job: Job
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    micro_batch_size: int
    rows: str
    left_out: int
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        from transformers import get_scheduler

        entry = self.entry
        named = "constant_with_warmup" if entry.schedule == "constant" else entry.schedule
        self.rate: Any = get_scheduler(named, self.optimizer, entry.warmup_steps, self.steps)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def steps_an_epoch(self) -> int:
        return math.ceil(len(self.samples) / self.entry.batch_size)

    @property
    def steps(self) -> int:
        return steps_of(self.entry, len(self.samples))

    @property
    def ended(self) -> bool:
        return self.progress.status not in (WAITING, RUNNING)

    def batch(self) -> list[Sample]:
        """The samples of the next step: each epoch has all of them, in an order of its own."""
        epoch, place = divmod(self.progress.step, self.steps_an_epoch)
        order = np.random.default_rng([self.entry.seed, epoch]).permutation(len(self.samples))
        size = self.entry.batch_size
        return [self.samples[i] for i in order[place * size : (place + 1) * size]]

    def stepped(self, loss: float) -> None:
        """The update has been made."""
        self.rate.step()
        self.progress.step += 1
        self.progress.loss = loss
        if self.progress.step >= self.steps:
            self.progress.status = DONE

    @property
    def asks(self) -> bool:
        """Whether the loss on what is held out is to be taken now."""
        stop = self.entry.early_stop
        return stop is not None and self.progress.step % stop.every == 0 and bool(self.progress.step)

    def evaluated(self, loss: float) -> None:
        stop, mine = self.entry.early_stop or EarlyStop(), self.progress
        mine.held_out = loss
        if mine.best is None or loss < mine.best - stop.min_delta:
            mine.best, mine.worse = loss, 0
        else:
            mine.worse += 1
        if mine.worse >= stop.patience and not self.ended:
            mine.status = STOPPED


def steps_of(entry: Entry, rows: int) -> int:
    """Of the whole job, over so many rows."""
    most = max(1, math.ceil(entry.epochs * math.ceil(rows / entry.batch_size)))
    return most if entry.steps is None else min(most, entry.steps)


def fingerprint(*parts: Sequence[Sample]) -> str:
    """Of the tokens and labels of all samples, in their order."""
    found = hashlib.sha256()
    for part in parts:
        for sample in part:
            found.update(np.array([len(sample.tokens), *sample.tokens, *sample.labels], dtype=np.int64).tobytes())
    return found.hexdigest()[:16]


def check(entry: Entry, rows: int) -> None:
    """Raises ValueError for numbers that do not go together, over so many rows that are trained on."""
    of_text = next(iter(entry.data.values())) if isinstance(entry.data, dict) else {}
    if own := next((field for field in OF_A_SWEEP if field in of_text), None):
        raise ValueError(f"data with {own} is for a sweep's step; expected the job's own batch_size, steps and epochs")
    for name, value, most, which in (
        ("batch_size", entry.batch_size, rows, "the number of rows that it is trained on"),
        ("micro_batch_size", entry.micro_batch_size or 1, entry.batch_size, "its batch_size"),
        ("warmup_steps", entry.warmup_steps, steps_of(entry, rows), "the number of its steps"),
    ):
        if value > most:
            raise ValueError(f"{name} {value}: expected at most {most}, {which}")


def parted(samples: Sequence[Sample], entry: Entry) -> tuple[list[Sample], list[Sample]]:
    """(what is trained on, what is held out); nothing is held out where nothing stops early. Raises ValueError where a
    part would be empty."""
    if entry.early_stop is None:
        return list(samples), []
    order = np.random.default_rng([entry.seed, HELD_OUT]).permutation(len(samples))
    aside = max(1, round(entry.early_stop.held_out * len(samples)))
    if aside >= len(samples):
        raise ValueError(f"{len(samples)} rows: expected more, of which {entry.early_stop.held_out:g} can be held out")
    return [samples[i] for i in sorted(order[aside:])], [samples[i] for i in sorted(order[:aside])]
