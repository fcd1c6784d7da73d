"""The rows of a pipeline's step: samples end to end, every row filled up to the longest of the step.

Fewer and longer rows leave the stages waiting while the pipeline fills and drains; more and shorter ones cost launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lorabench_ablations.packing import first_fit_decreasing

ROW = 256  # positions whose time a row takes beside its own, for what the host does and for small kernels
TRIED = 64  # capacities between the longest sample and what a row may hold

Rows = list[list[int]]


def shortest_step(
    lengths: Sequence[Sequence[int]], tokens: int, passes: Callable[[Sequence[int]], float]
) -> list[Rows]:
    """Of each job the samples of each of its rows of at most `tokens` tokens, so that a step takes least.

    lengths: of each job's samples. passes: how many rows' time a step takes, by how many rows each job has; infinite
    where the schedule cannot take so many. Raises ValueError where a sample is longer than a row, or no rows will do.
    """
    longest = max(max(own) for own in lengths)
    best, least = None, math.inf
    for capacity in [*range(longest, tokens, max(1, (tokens - longest) // TRIED)), tokens]:
        found = [first_fit_decreasing(own, capacity) for own in lengths]
        width = max(sum(own[n] for n in fit) for own, rows in zip(lengths, found, strict=True) for fit in rows)
        took = passes([len(rows) for rows in found]) * (width + ROW)
        if took < least:
            best, least = found, took
    if best is None:
        raise ValueError(f"there are no rows of {sum(map(len, lengths))} samples that it could take")
    return best
