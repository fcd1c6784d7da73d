"""The rehearsal: steps that are tried before a step's batches are laid out.

By what they take, a toggle may say how many samples go into a micro-batch (`Ablation.size`). The samples of the step
stay the same set, and so does the gradient: see `Step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.workload import Workload


@dataclass(frozen=True)
class Reading:
    """What a tried step took: `peak`, the most bytes that the arm held at any time of forward and backward, its weights
    included, and nothing of what was there before it was built; and seconds, with the update."""

    peak: int
    seconds: float


@dataclass(frozen=True)
class Sizing:
    """What `size` answers: samples a micro-batch, and (`found`) how that was found, for the toggle's notes."""

    batch_size: int
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"a micro-batch of {self.batch_size} samples: expected 1 or more")


@dataclass(frozen=True)
class Capacity:
    """What `capacity` answers: positions that a micro-batch of several jobs may hold, and (`found`) how that was found,
    for the toggle's notes."""

    tokens: int
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a micro-batch of {self.tokens} positions: expected 1 or more")


class Rehearsal(Protocol):
    """What `size` is given. The arm is finished but for its batches; all that a tried step changes of it (parameters,
    optimizer, gradients, random numbers) is put back afterwards."""

    samples: Sequence[Sample]  # of the whole step
    workload: Workload  # as it is; what the toggle answers will take the place of its `batch_size`
    room: int  # bytes that the device had free for the whole arm before it was built
    on_cpu: bool  # then no allocator says when memory runs out: the system swaps, or ends the process
    configuration: Mapping[str, Any]  # what the memory of a step depends on but for its layout, as JSON has it
    folder: Path  # of the sweep: what is kept there its other cells find

    def lay_out(self, samples: Sequence[Sample], batch_size: int) -> list[Batch]:
        """The micro-batches of these samples, as the arm's toggles make them, on its device. Of a joint step: those of
        all its samples, whichever are named, of at most `batch_size` positions or of one sample."""
        ...

    def run(self, batches: Sequence[Batch], budget: int) -> Reading:
        """Forward and backward of each, then the update. Raises torch.OutOfMemoryError, all that it held given back,
        where memory runs out or the peak is above `budget`: a device of that many bytes would have none left."""
        ...
