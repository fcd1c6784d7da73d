"""The joint step of several jobs: their rows in one batch, one loss each.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.joint import Joint, Place
from lorabench.contract.step import Step
from lorabench_ablations.joint_batches import OWN_WIDTH, bucketed, evenly, flat, samples_of, shared_out, widened


class Part(NamedTuple):
    """One job's rows of a joint batch, which lie one below the other: (rows, width) positions, of which the first
    `own_width` of each row may hold tokens."""

    job: int
    adapter: str
    rows: int
    width: int
    own_width: int

    @property
    def positions(self) -> int:
        return self.rows * self.width


class Router(Protocol):
    """Says to the model's linears which adapter the rows of the batches to come have. tables: what it keeps on the
    device of the last batches, and a captured step reads."""

    tables: Sequence[Any]

    def set(self, parts: Sequence[Part]) -> None: ...

    def keep(self, adapters: Sequence[str]) -> None:
        """Which adapters are known to be finite, and may stay where they lie in batches without their rows."""


class JointStep(Joint):
    """Packed: samples end to end in one row, positions starting again at each, which keeps attention inside a sample;
    samples that are all of one length lie side by side instead. Else every row is padded to the longest of all. With
    `tokens` the samples are shared out anew over micro-batches of at most so many positions. Where `buckets` is on,
    which a captured training has, rows are padded to one of a few lengths in either case.

    Not `looks`: for as long as that is so, nothing is looked at on the host, which a captured step does in between by
    `looked_at` and `settle`.
    """

    looks = True

    def __init__(self, steps: Sequence[Step], router: Router, *, packed: bool, tokens: int | None = None) -> None:
        super().__init__(steps)
        self.router, self.packed, self.tokens = router, packed, tokens
        self.buckets = False
        self.items_of_jobs: Tensor | None = None

    @property
    def padded(self) -> bool:
        return self.buckets or not self.packed

    def trained(self, job: int) -> list[Tensor]:
        """What a job's optimizer updates in this process."""
        return [p for group in self.steps[job].optimizer.param_groups for p in group["params"]]

    def lay_out(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
        lay = bucketed if self.buckets else flat if self.packed else widened
        return self._beside(self._shared(batches) or batches, lay)

    def _shared(self, batches: Sequence[Sequence[Batch]]) -> list[list[Batch]] | None:
        """Each job's batches, of the samples that the schedule puts into one micro-batch, with `places` set; None where
        the jobs' own stay."""
        self.items_of_jobs = None  # of another step's samples, where these are laid out anew
        together = self._schedule([[sample.real for batch in mine for sample in samples_of(batch)] for mine in batches])
        if together is None:
            return None
        made, self.places = shared_out(batches, together)
        return made

    def _beside(
        self, own: Sequence[Sequence[Batch]], lay: Callable[[Sequence[Batch]], list[Batch]]
    ) -> list[list[Batch]]:
        """Each job's batches; `lay` is given those of one micro-batch."""
        places = self.places or [list(range(len(mine))) for mine in own]
        there = [dict(zip(at, mine, strict=True)) for at, mine in zip(places, own, strict=True)]
        made: list[dict[int, Batch]] = [{} for _ in own]
        for number in sorted({place for at in places for place in at}):
            jobs = [job for job, mine in enumerate(there) if number in mine]
            for job, batch in zip(jobs, lay([there[job][number] for job in jobs]), strict=True):
                made[job][number] = batch
        return [list(mine.values()) for mine in made]

    def _schedule(self, lengths: Sequence[Sequence[int]]) -> list[list[Place]] | None:
        if self.tokens is not None:
            return evenly(lengths, self.tokens, not self.padded)
        return self.schedule(lengths, self.padded, self.capacity and self.capacity.tokens)

    def joined(self, batches: Sequence[Batch | None]) -> Batch:
        there = [(i, batch) for i, batch in enumerate(batches) if batch is not None]
        parts, inputs = [], [dict(batch.inputs) for _, batch in there]
        for (i, _), own in zip(there, inputs, strict=True):
            rows, width = own["input_ids"].shape
            parts.append(Part(i, self.steps[i].adapter, rows, width, own.pop(OWN_WIDTH, width)))
        along = 1 if "position_ids" in inputs[0] else 0
        together = {name: torch.cat([own[name] for own in inputs], along) for name in inputs[0]}
        counts = [sum(getattr(batch, name) for _, batch in there) for name in ("real", "padded", "trained")]
        return Batch(together | {"parts": tuple(parts)}, *counts)

    def forward(self, batch: Batch) -> Tensor:
        inputs = dict(batch.inputs)
        parts, labels = inputs.pop("parts"), inputs.pop("labels")
        self.router.set(parts)
        return self.losses(self.call(**inputs).logits, labels, parts)

    @contextmanager
    def without_a_look(self) -> Iterator[None]:
        self.looks = False
        try:
            yield
        finally:
            self.looks = True

    def looked_at(self, batch: Batch, run: Callable[[Batch], Tensor], later: bool = False) -> Tensor:
        """The losses that `run` has for a micro-batch, or others where these may not stay. later: nobody looks before
        `settle`, which then writes what they should have been into them."""
        return run(batch)

    def gradients_finite(self) -> Tensor | None:
        """(), whether all gradients are finite, on the device; None where nobody needs to know."""
        return None

    def settle(self, finite: bool | None = None) -> None:
        """Before the optimizers step: the gradients as they may be used. finite: what `gradients_finite` has said."""

    def losses(self, logits: Tensor, labels: Tensor, parts: Sequence[Part]) -> Tensor:
        """(jobs,) of logits (B, S, V) and labels (B, S): transformers' loss, summed up for each job. No sum goes over
        rows of two jobs, so that a NaN stays with its own."""
        following = F.pad(labels, (0, 1), value=IGNORE)[:, 1:].flatten()
        each = F.cross_entropy(logits.flatten(0, 1).float(), following, ignore_index=IGNORE, reduction="none")
        sums = {p.job: own.sum() for p, own in zip(parts, each.split([p.positions for p in parts]), strict=True)}
        nothing = each.new_zeros(())
        if self.items_of_jobs is None:
            self.items_of_jobs = each.new_tensor([step.items for step in self.steps])
        return torch.stack([sums.get(job, nothing) for job in range(len(self.steps))]) / self.items_of_jobs


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """(), whether every number of these is finite, on the device."""
    largest = torch._foreach_norm(list(tensors), float("inf")) if tensors else []
    of_dtype = [[x for x in largest if x.dtype == dtype] for dtype in {x.dtype for x in largest}]
    finite = [torch.stack(same).isfinite().all() for same in of_dtype]
    return torch.stack(finite).all() if finite else torch.ones((), dtype=torch.bool)
