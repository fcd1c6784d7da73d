"""Several ranks of one cell: joining them inside their processes, and one result out of theirs.

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

from lorabench.contract.cell import Cell
from lorabench.contract.ranks import Ranks
from lorabench.measure.cell import Result
from lorabench.measure.kind import JobCounts
from lorabench.record.schema import TOTAL, RankSpread

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """Where a task's process belongs: its rank, the sweep that it must not outlive, its log.

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


def joined(seat: Seat, device_type: str, beat: Callable[[], None]) -> tuple[Ranks, torch.device]:
    """This process among its ranks, connected, and its device: one GPU each, over NCCL; on a CPU over gloo."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(seat.rank), "LOCAL_RANK": str(seat.rank), "WORLD_SIZE": str(seat.size),
        "LOCAL_WORLD_SIZE": str(seat.size), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank), "ROLE_WORLD_SIZE": str(seat.size), "MASTER_ADDR": HOST,
        "MASTER_PORT": str(seat.port), "TORCHELASTIC_RUN_ID": str(seat.sweep), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, seat.rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seat.timeout_s))

    def reduced(value: float, how: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(number, op=how)
        return float(number)  # waits for the device

    def barrier() -> None:
        beat()
        reduced(0.0, dist.ReduceOp.SUM)

    total = lambda value: reduced(value, dist.ReduceOp.SUM)  # noqa: E731
    largest = lambda value: reduced(value, dist.ReduceOp.MAX)  # noqa: E731
    return Ranks(seat.rank, seat.size, barrier, total, largest, beat), device


def merged(cell: Cell, results: Sequence[Result]) -> Result:
    """Rank 0's result, with the times of the slowest rank in each trial for the arms that stepped on all of them."""
    first = results[0]
    for name, arm in first.arms.items():
        if cell.ranks_of(name) == 1 or not arm.times:
            continue
        own = [result.arms[name].times for result in results]
        totals = list(zip(*(times[TOTAL] for times in own), strict=True))
        slowest = [max(range(len(row)), key=row.__getitem__) for row in totals]
        arm.times = {phase: [own[rank][phase][i] for i, rank in enumerate(slowest)] for phase in arm.times}
        spread = statistics.median((max(row) - min(row)) / (max(row) or 1.0) for row in totals)
        first.ranks[name] = RankSpread(size=len(results), slowest=slowest, spread=spread)
        arm.evidence = [one for result in results for one in result.arms[name].evidence]
        arm.jobs = _whole_batch([result.arms[name].jobs for result in results])
    return first


def _whole_batch(counts: Sequence[dict[str, JobCounts]]) -> dict[str, JobCounts]:
    """The counts of each job over all ranks: every rank has counted the positions of its own share of the batch. The
    trained tokens, by which losses are normalized, are the whole step's on each of them."""
    return {
        job: replace(own, real=sum(c[job].real for c in counts), padded=sum(c[job].padded for c in counts))
        for job, own in counts[0].items()
    }
