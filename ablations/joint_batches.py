"""How the batches of several jobs are laid out to go through a model together: padded to one width, packed into one
row, or shared out anew over micro-batches of a budget. Everything here is on the host and goes by lengths alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch
from lorabench.contract.joint import Place

OWN_WIDTH = "own_width"  # of a job's batch that was padded further: what its longest sample has


def shared_out(
    batches: Sequence[Sequence[Batch]], together: Sequence[Sequence[Place]]
) -> tuple[list[list[Batch]], list[list[int]]]:
    """(each job's batches, in which micro-batch each of them is) where these of their samples go together. Raises
    Unsupported unless each sample is in one micro-batch."""
    samples = [[sample for batch in own for sample in samples_of(batch)] for own in batches]
    every = sorted((job, place) for job, own in enumerate(samples) for place in range(len(own)))
    if sorted(place for held in together for place in held) != every:
        raise Unsupported("the schedule has a sample twice or not at all; expected each of them in one micro-batch")
    made: list[list[Batch]] = [[] for _ in batches]
    places: list[list[int]] = [[] for _ in batches]
    for number, held in enumerate(filter(None, together)):
        for job in sorted({job for job, _ in held}):
            made[job].append(_side_by_side([samples[owner][place] for owner, place in held if owner == job]))
            places[job].append(number)
    return made, places


def evenly(lengths: Sequence[Sequence[int]], tokens: int, packed: bool) -> list[list[Place]]:
    """The samples of all jobs over few micro-batches of at most so many positions each, whoever's they are. Packed, the
    longest sample first, each to where the fewest tokens are; else samples of like length, because they are padded.
    Raises Unsupported for a sample that is longer."""
    samples = [(length, (job, place)) for job, own in enumerate(lengths) for place, length in enumerate(own)]
    samples.sort(key=lambda sample: -sample[0])
    if (longest := samples[0][0]) > tokens:
        raise Unsupported(f"a sample of {longest} tokens does not fit a micro-batch of {tokens}")
    return [[place for _, place in held] for held in (_even(samples, tokens) if packed else _alike(samples, tokens))]


def halved(together: Sequence[Sequence[Place]], lengths: Sequence[Sequence[int]], count: int) -> list[list[Place]]:
    """These micro-batches, of which the one with the most tokens is cut in two until there are `count`, as long as one
    has several samples."""
    made = [list(held) for held in together if held]

    def tokens(held: Sequence[Place]) -> int:
        return sum(lengths[job][place] for job, place in held)

    while len(made) < count and (several := [held for held in made if len(held) > 1]):
        most = max(several, key=tokens)
        cut = min(range(1, len(most)), key=lambda at: max(tokens(most[:at]), tokens(most[at:])))
        where = made.index(most)
        made[where : where + 1] = [most[:cut], most[cut:]]
    return made


Long = tuple[int, Place]  # tokens of a sample, and whose it is


def _even(samples: Sequence[Long], tokens: int) -> list[list[Long]]:
    """The longest first, each into the bin that has the fewest tokens so far; as few bins as hold them so."""
    count = max(1, -(-sum(length for length, _ in samples) // tokens))
    while True:
        bins, filled = [list[Long]() for _ in range(count)], [0] * count
        for sample in samples:
            where = filled.index(min(filled))
            bins[where].append(sample)
            filled[where] += sample[0]
        if max(filled) <= tokens:
            return [held for held in bins if held]
        count += 1


def _alike(samples: Sequence[Long], tokens: int) -> list[list[Long]]:
    """Neighbours in the order of their length, the longest first: as many as fit when they are as long as the first."""
    bins: list[list[Long]] = []
    for sample in samples:
        if not bins or (len(bins[-1]) + 1) * bins[-1][0][0] > tokens:
            bins.append([])
        bins[-1].append(sample)
    return bins


def samples_of(batch: Batch) -> list[Batch]:
    """A batch's samples, each a batch of its own without padding."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    if (positions := batch.inputs.get("position_ids")) is not None:
        starts = [*(positions[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        cuts = [(0, slice(a, b)) for a, b in itertools.pairwise(starts)]
    else:
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
        cuts = [(row, slice(0, length)) for row, length in enumerate(mask.sum(1).tolist())]
    made = []
    for row, cut in cuts:
        own = {"input_ids": ids[row : row + 1, cut], "labels": labels[row : row + 1, cut]}
        trained = int((own["labels"][:, 1:] != IGNORE).sum())
        made.append(Batch(own, own["input_ids"].shape[1], 0, trained))
    return made


def _side_by_side(samples: Sequence[Batch]) -> Batch:
    """Batches of one sample each as one, padded to the longest."""
    width = max(sample.real for sample in samples)
    rows = [sample if sample.real == width else _padded(sample, width) for sample in samples]
    whole = all(row is sample for row, sample in zip(rows, samples, strict=True))
    names = ["input_ids", "labels", *(["attention_mask"] if not whole else [])]
    inputs = {
        n: torch.cat([row.inputs.get(n, torch.ones_like(row.inputs["input_ids"])) for row in rows]) for n in names
    }
    return Batch(inputs, *(sum(getattr(row, n) for row in rows) for n in ("real", "padded", "trained")))


def widened(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of several jobs, all as wide as the widest of them."""
    if any("position_ids" in batch.inputs for batch in batches):
        raise Unsupported("the jobs' rows are packed, so there is nothing to pad; take batched_packed")
    width = max(batch.inputs["input_ids"].shape[1] for batch in batches)
    whole = all(not batch.padded and batch.inputs["input_ids"].shape[1] == width for batch in batches)
    return [batch if whole else _padded(batch, width) for batch in batches]


def _padded(batch: Batch, width: int) -> Batch:
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    rows, own = ids.shape
    mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
    more = (0, width - own)
    inputs = {
        "input_ids": F.pad(ids, more), "labels": F.pad(labels, more, value=IGNORE),
        "attention_mask": F.pad(mask, more), OWN_WIDTH: own,
    }  # fmt: skip
    return Batch(inputs, batch.real, rows * width - batch.real, batch.trained)


def bucket(what: str, tokens: int) -> int:
    """Of lorakernels' captured steps the shortest row that holds so many. Raises Unsupported."""
    from lorakernels.capturing.inputs import BUCKETS, bucket_of

    if (width := bucket_of(tokens)) is None:
        raise Unsupported(f"{what} of {tokens} tokens is longer than the largest bucket, {max(BUCKETS)}")
    return width


def bucketed(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of several jobs, all as wide as the bucket that holds the widest, without a mask: what is padded on the
    right comes behind all that is real."""
    if any("position_ids" in batch.inputs for batch in batches):
        raise Unsupported("the jobs' rows are packed, and each step of such rows would be a graph of its own")
    width = bucket("a sample", max(batch.inputs["input_ids"].shape[1] for batch in batches))
    made = [_padded(batch, width) for batch in batches]
    return [replace(b, inputs={n: b.inputs[n] for n in ("input_ids", "labels")}) for b in made]


def flat(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of several jobs without padding: each one row, or as they are where all samples have one length."""
    shapes = [batch.inputs["input_ids"].shape for batch in batches]
    packed = ["position_ids" in batch.inputs for batch in batches]
    if not any(packed) and not any(batch.padded for batch in batches) and len({width for _, width in shapes}) == 1:
        return list(batches)
    return [batch if done else in_a_row(batch) for batch, done in zip(batches, packed, strict=True)]


def end_to_end(samples: Sequence[Batch]) -> Batch:
    """Batches of one sample each as one row."""
    return in_a_row(_side_by_side(samples))


def in_a_row(batch: Batch) -> Batch:
    """A batch of samples side by side as one row: its real tokens, sample after sample."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"].clone()
    real = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
    labels[:, 0] = IGNORE  # in a row it would be predicted from the sample before
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    inputs: dict[str, Any] = {"input_ids": ids[real], "labels": labels[real], "position_ids": positions[real]}
    return Batch({name: x[None] for name, x in inputs.items()}, batch.real, 0, batch.trained)
