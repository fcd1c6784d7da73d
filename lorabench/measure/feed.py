"""Fresh tokens for every trial, in the layout that a toggle gave its batches.

A toggle's `batch` is asked twice, when the arm is built: for the workload's own samples, and for the same samples with
a marker in place of each token. Where the markers came to lie is the layout. From then on the harness fills the tokens
in itself, so no toggle sees a trial's data before the clock runs, and none can answer from what it saw before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch, Sample
from lorabench.measure.fairness import Untrusted

FIRST_MARKER = 1 << 24  # above every vocabulary, so that a padding token is never taken for a marker
FILLED = ("input_ids", "labels", "shift_labels")  # the last where a sequence is cut after its labels were shifted


def marked(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a number of its own in place of each token."""
    return _with_tokens(samples, itertools.count(FIRST_MARKER))


def _with_tokens(samples: Sequence[Sample], tokens: Iterable[int]) -> list[Sample]:
    """The samples with these in place of their tokens, one after the other; labels are left out where they were."""
    rest, made = iter(tokens), []
    for sample in samples:
        own = list(itertools.islice(rest, len(sample.tokens)))
        labels = [IGNORE if old == IGNORE else new for old, new in zip(sample.labels, own, strict=True)]
        made.append(Sample(own, labels))
    return made


def own_tokens(samples: Sequence[Sample]) -> np.ndarray:
    """The tokens of all samples, one after the other, int64."""
    return np.fromiter((token for sample in samples for token in sample.tokens), dtype=np.int64)


def fresh_tokens(samples: Sequence[Sample], vocabulary: int, random: bool, seed: int, number: int) -> np.ndarray:
    """The tokens of a trial, in the order of `own_tokens`. Trial 0 has the samples' own. Later ones have other tokens
    in samples of the same lengths: drawn anew where they were `random`, of real text each sample's own in another
    order."""
    if number == 0:
        return own_tokens(samples)
    rng = np.random.default_rng([seed, number])
    if random:
        return rng.integers(0, vocabulary, sum(len(s.tokens) for s in samples))
    return np.concatenate([rng.permutation(np.asarray(s.tokens, dtype=np.int64)) for s in samples])


@dataclass
class _Slots:
    """Where one input of one batch takes its values from: the n-th token of the step, or (-1) what it has always."""

    name: str
    token: Tensor
    constant: Tensor


class Feed:
    """Fills the batches of one step. `batches` are the step's own, on their device; `layout` the same of the marked
    samples. Raises Unsupported where the batches depend on what the tokens are, and not only on where they stand, and
    Untrusted where they are made of anything that may do work while it is filled: nothing of a toggle's runs in here.
    """

    def __init__(
        self, batches: list[Batch], layout: Sequence[Batch], samples: Sequence[Sample], vocabulary: int, random: bool,
        seed: int,
    ) -> None:  # fmt: skip
        check_type(batches, list, "list of batches")
        self.batches, self.samples = batches, samples
        self.vocabulary, self.random, self.seed = vocabulary, random, seed
        self.counts = [_counts(batch) for batch in batches]
        own = self.own = [_plain(batch.inputs) for batch in batches]
        self.slots = [_slots(inputs, marks.inputs) for inputs, marks in zip(own, layout, strict=False)]
        if len(batches) != len(layout) or not all(_same(a, b) for a, b in zip(own, self._filled(0), strict=True)):
            raise Unsupported("its batches depend on what the tokens are, so they cannot take a trial's fresh ones")

    def __call__(self, number: int) -> None:
        """Put the tokens of trial `number` into the step's batches."""
        self.batches[:] = [
            Batch(inputs, *counts) for inputs, counts in zip(self._filled(number), self.counts, strict=True)
        ]

    def _filled(self, number: int) -> list[dict[str, Any]]:
        flat = torch.from_numpy(fresh_tokens(self.samples, self.vocabulary, self.random, self.seed, number))
        made = []
        for inputs, slots in zip(self.own, self.slots, strict=True):
            filled = {}
            for slot in slots:
                tokens = flat.to(slot.token.device)
                filled[slot.name] = torch.where(slot.token >= 0, tokens[slot.token.clamp_min(0)], slot.constant)
            made.append({**inputs, **filled})
        return made


def check_type(value: Any, expected: type, what: str) -> None:
    """Raises Untrusted for what is not of this very type: a subclass may do work whenever it is used."""
    if type(value) is not expected:
        raise Untrusted(
            f"a step has a {type(value).__name__} for its {what}, which may do work outside the clock; expected a "
            f"plain {expected.__name__}"
        )


def _counts(batch: Batch) -> tuple[int, int, int]:
    check_type(batch, Batch, "batch")
    return batch.real, batch.padded, batch.trained


def _plain(inputs: dict[str, Any]) -> dict[str, Any]:
    """A copy of a batch's inputs. What is not filled (an attention's own mask) may be anything: nobody asks it."""
    check_type(inputs, dict, "batch's inputs")
    for name, value in inputs.items():
        check_type(name, str, "batch's name of an input")
        if name in FILLED:
            check_type(value, Tensor, f"batch's {name}")
    return dict(inputs)


def _slots(own: dict[str, Any], marks: dict[str, Any]) -> list[_Slots]:
    slots = []
    for name in FILLED:
        constant, marker = own.get(name), marks.get(name)
        if isinstance(constant, Tensor) and isinstance(marker, Tensor):
            token = torch.where(marker >= FIRST_MARKER, marker - FIRST_MARKER, -1)
            slots.append(_Slots(name, token.to(constant.device), constant))
    return slots


def _same(own: dict[str, Tensor], filled: dict[str, Tensor]) -> bool:
    return all(own[n].shape == filled[n].shape and torch.equal(own[n], filled[n]) for n in FILLED if n in own)


def fresh_samples(samples: Sequence[Sample], vocabulary: int, random: bool, seed: int, number: int) -> list[Sample]:
    """The samples of a trial, as a feed puts them into the batches: see `fresh_tokens`."""
    return _with_tokens(samples, fresh_tokens(samples, vocabulary, random, seed, number).tolist())
