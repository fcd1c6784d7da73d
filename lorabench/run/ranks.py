"""Several ranks of one seat: joining them inside their processes, and one answer out of theirs.

They find each other as torchrun's do, by its environment variables, so a library that expects torchrun works in them.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch

from lorabench.contract.ranks import Ranks, multicast
from lorabench.measure.kind import JobCounts
from lorabench.measure.memory import CONTEXT
from lorabench.measure.seat import Made, Ready
from lorabench.record.schema import ArmMemory

HOST = "127.0.0.1"
LATER_S = 60.0
NCCL_BYTES = 4 << 30  # of a GPU that torch's allocator leaves to NCCL, whose buffers are none of its own


@dataclass(frozen=True)
class Place:
    """Where a seat's process belongs: its rank, the sweep that it must not outlive, its log.

    `port` is where rank 0 of several listens, and 0 with one rank. `beats` (shared memory, one count a rank) is
    counted up with whatever a rank begins; of ranks that hang, the one that began least is the one that the others
    wait for.
    """

    rank: int
    size: int
    port: int
    log: str  # file that takes the worker's stdout and stderr
    sweep: int  # process id of the sweep
    timeout_s: float
    beats: Any = None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def joined(
    place: Place, device_type: str, beat: Callable[[], None], one_gpu: bool = False
) -> tuple[Ranks, torch.device]:  # fmt: skip
    """This process among its ranks, connected, and its device: one GPU each, over NCCL; on a CPU over gloo. `one_gpu`:
    all of them on the first GPU, and over gloo, because NCCL wants a GPU for each. Raises RuntimeError, before CUDA and
    NCCL start, where whoever started this process has not switched NVLink multicast off."""
    import torch.distributed as dist

    nccl = device_type == "cuda" and not one_gpu
    if nccl and (reason := multicast(os.environ, started=True)):
        raise RuntimeError(reason)
    number = 0 if one_gpu else place.rank  # of its GPU, by which a library finds it
    os.environ |= {
        "RANK": str(place.rank), "LOCAL_RANK": str(number), "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank), "ROLE_WORLD_SIZE": str(place.size), "MASTER_ADDR": HOST,
        "MASTER_PORT": str(place.port), "TORCHELASTIC_RUN_ID": str(place.sweep), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    device = torch.device(device_type)
    if device_type == "cuda" or not one_gpu:  # else they share one CPU as a GPU's processes share the GPU
        # Each its share of the cores: threads that spin for cores of another rank make both many times as slow.
        torch.set_num_threads(max(1, torch.get_num_threads() // place.size))
    if nccl:  # else it is the first GPU, as in a seat of one process
        device = torch.device(device_type, place.rank)
        torch.cuda.set_device(device)
        if place.size > 1:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(max(0.5, 1 - NCCL_BYTES / total), device)
    backend = "nccl" if nccl else "gloo"
    # Later than the sweep's own limit: it says which rank hangs, torch only that a collective did not end.
    timeout = timedelta(seconds=place.timeout_s + LATER_S)
    if place.size > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:  # it has nobody to find
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)

    def reduced(value: float, how: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor(value, dtype=torch.float64, device=device if nccl else "cpu")
        dist.all_reduce(number, op=how)
        return float(number)  # waits for the device

    def barrier() -> None:
        beat()
        reduced(0.0, dist.ReduceOp.SUM)

    total, largest = partial(reduced, how=dist.ReduceOp.SUM), partial(reduced, how=dist.ReduceOp.MAX)
    return Ranks(place.rank, place.size, barrier, total, largest, beat), device


def slowest(ranks: Sequence[Sequence[Made]]) -> tuple[list[int], list[Made]]:
    """Of each trial which rank took the longest, and that rank's. `ranks`: what each made, in the ranks' order."""
    which = [max(range(len(row)), key=lambda rank: row[rank].trial.total_ms) for row in zip(*ranks, strict=True)]
    return which, [ranks[rank][n] for n, rank in enumerate(which)]


def spread_of(ranks: Sequence[Sequence[Made]]) -> float:
    """Median over the trials of (slowest - fastest) / slowest."""
    rows = [[made.trial.total_ms for made in row] for row in zip(*ranks, strict=True)]
    return statistics.median((max(row) - min(row)) / (max(row) or 1.0) for row in rows)


def whole_batch(counts: Sequence[dict[str, JobCounts]]) -> dict[str, JobCounts]:
    """The counts of each job over the ranks that train it: each has counted the positions of its own share of the
    batch. The trained tokens, by which losses are normalized, are the whole step's on each of them."""
    of: dict[str, list[JobCounts]] = {}
    for rank in counts:
        for job, own in rank.items():
            of.setdefault(job, []).append(own)
    return {
        job: replace(own[0], real=sum(c.real for c in own), padded=sum(c.padded for c in own))
        for job, own in of.items()
    }


def notes_by_rank(ranks: Sequence[dict[str, Any]], toggles: Iterable[str]) -> dict[str, Any]:
    """Rank 0's notes, in which whatever these toggles say of bytes is a list: what each rank says, in their order."""
    made = dict(ranks[0])
    for name in toggles:
        own: list[Any] = [notes.get(name) for notes in ranks]
        if all(isinstance(one, dict) for one in own):
            bytes_ = {key: _each([one.get(key) for one in own]) for key in own[0] if key.endswith("_bytes")}
            made[name] = own[0] | bytes_
    return made


def _each(values: Sequence[Any]) -> Any:
    """Part by part, where they have parts; what a rank has nothing of is 0."""
    if not all(isinstance(value, dict) for value in values):
        return list(values)
    return {part: _each([value.get(part, 0) for value in values]) for part in dict.fromkeys(chain(*values))}


def on_one_gpu(ranks: Sequence[Ready]) -> Ready:
    """What rank 0 says, with the memory of all processes on the GPU. Their peaks are added, although they need not come
    at one time: what a process's allocator has taken no other one can have."""
    held = [rank.memory.model_dump() for rank in ranks if rank.memory]
    return replace(
        ranks[0], memory=ArmMemory.model_validate(_summed(held)) if held else None,
        own_bytes=sum(rank.own_bytes for rank in ranks) + int(CONTEXT) * (len(ranks) - 1),
        base_bytes=sum(rank.base_bytes for rank in ranks),
    )  # fmt: skip


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Number by number; None where nobody has one."""
    made: dict[str, Any] = {}
    for name in rows[0]:
        given = [row[name] for row in rows if row[name] is not None]
        nested = bool(given) and isinstance(given[0], dict)
        made[name] = (_summed(given) if nested else sum(given)) if given else None
    return made
