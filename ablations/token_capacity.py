"""How many positions a micro-batch of several jobs may hold, by the memory model that `auto_batch_size` has.

LoRAFusion's published capacities are a table of numbers, one a model and GPU. Here a few joint micro-batches of growing
size are tried, the model is fitted to their peaks, and the largest that is predicted to fit is confirmed by one step.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from lorabench.contract.memory_fit import GIB, Load, Measured, fit, largest
from lorabench.contract.rehearsal import Capacity, Reading, Rehearsal
from lorabench_ablations.batch_size import AutoBatchSize, confirmed, held_to

HEAD_ROOM = AutoBatchSize.head_room  # share of the memory that is left over
PROBED = 0.5  # share of the memory up to which micro-batches are tried for the model's sake
PROBES = 4


def capacity(rehearsal: Rehearsal, room: int) -> Capacity:
    """In `room` bytes. Raises torch.OutOfMemoryError where not even the longest sample fits."""
    began = perf_counter()
    longest = max(len(sample.tokens) for sample in rehearsal.samples)
    most = len(rehearsal.samples) * longest

    def step(tokens: int) -> tuple[Load, Reading]:
        """Of the fullest micro-batch of so many positions."""
        batch = max(rehearsal.lay_out(rehearsal.samples, tokens), key=lambda batch: Load.of(batch).positions)
        return Load.of(batch), rehearsal.run([batch], room)

    def measured(tokens: int) -> Measured:
        load, reading = step(tokens)
        return load, reading.peak

    def fits(tokens: int) -> bool:
        return model(Load(tokens, tokens * (longest if side_by_side else tokens))) <= (1 - HEAD_ROOM) * room

    tried = _tried(measured, longest, most, room)
    if len(tried) == 1:
        return Capacity(longest, {"found_by": "the longest sample, of which two do not fit or are not there"})
    model, (last, _) = fit(tried), tried[-1]
    side_by_side = last.squares <= last.positions * longest
    asked = max(longest, largest(fits, most))
    tokens, (load, reading) = confirmed(step, asked, longest)
    told = {"found_by": f"a fit to {len(tried)} steps", "budget_gib": round(room / GIB, 3), "head_room": HEAD_ROOM}
    told |= {"stepped_back": asked - tokens} if tokens < asked else {}
    told |= held_to(model(load), reading)
    return Capacity(tokens, told | {"search_s": round(perf_counter() - began, 3)})


def _tried(measured: Callable[[int], Measured], longest: int, most: int, room: int) -> list[Measured]:
    """Micro-batches of the longest sample, twice as much, and so on, while one as much larger is predicted to leave
    half of the memory free. Only the first may raise torch.OutOfMemoryError."""
    from torch import OutOfMemoryError

    found = [measured(longest)]
    tokens = longest
    while len(found) < PROBES and tokens < most:
        tokens = min(most, 2 * tokens)
        if len(found) > 1 and fit(found)(Load(tokens, tokens * longest)) > PROBED * room:
            break
        try:
            found.append(measured(tokens))
        except OutOfMemoryError:
            break
    return found
