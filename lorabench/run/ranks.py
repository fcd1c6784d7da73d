"""Several ranks of one seat: joining them inside their processes, and one answer out of theirs.

They find each other as torchrun's do, by its environment variables, so a library that expects torchrun works in them.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from lorabench.contract.ranks import NO_MULTICAST, Ranks, multicast
from lorabench.measure.kind import JobCounts
from lorabench.measure.seat import Made

HOST = "127.0.0.1"
LATER_S = 60.0


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
    spawned: float  # time.time() when the runner started it
    sweep: int  # process id of the sweep
    timeout_s: float
    beats: Any = None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def joined(place: Place, device_type: str, beat: Callable[[], None]) -> tuple[Ranks, torch.device]:
    """This process among its ranks, connected, and its device: one GPU each, over NCCL; on a CPU over gloo."""
    import torch.distributed as dist

    if device_type == "cuda" and (reason := multicast(os.environ)):
        raise RuntimeError(reason)
    os.environ |= NO_MULTICAST | {
        "RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank), "ROLE_WORLD_SIZE": str(place.size), "MASTER_ADDR": HOST,
        "MASTER_PORT": str(place.port), "TORCHELASTIC_RUN_ID": str(place.sweep), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, place.rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    # Later than the sweep's own limit: it says which rank hangs, torch only that a collective did not end.
    dist.init_process_group(backend, timeout=timedelta(seconds=place.timeout_s + LATER_S))

    def reduced(value: float, how: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(number, op=how)
        return float(number)  # waits for the device

    def barrier() -> None:
        beat()
        reduced(0.0, dist.ReduceOp.SUM)

    total = lambda value: reduced(value, dist.ReduceOp.SUM)  # noqa: E731
    largest = lambda value: reduced(value, dist.ReduceOp.MAX)  # noqa: E731
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
    """The counts of each job over all ranks: every rank has counted the positions of its own share of the batch. The
    trained tokens, by which losses are normalized, are the whole step's on each of them."""
    return {
        job: replace(own, real=sum(c[job].real for c in counts), padded=sum(c[job].padded for c in counts))
        for job, own in counts[0].items()
    }
