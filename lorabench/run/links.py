"""How fast the ranks of one machine talk: the time of a collective by the bytes that each rank gives to it.

Bus bandwidth is as in NCCL's own tests: what a ring sends over each link in a second, so that it can be held against
the link's rate whatever the number of ranks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from lorabench.contract.ranks import Ranks
from lorabench.measure.trial import synchronize
from lorabench.run.ranks import Place, free_port, joined

SIZES = [4**n * 1024 for n in range(1, 11)]  # 4 KiB to 1 GiB
TIMEOUT_S = 240.0  # of one collective, beside what `joined` adds
BUSY_S = 0.1  # of each collective and size, after one that is not timed


class Link(BaseModel):
    """One point of a curve: what a rank of `ranks` gives (`bytes`), the slowest rank's time, and the bus bandwidth."""

    model_config = ConfigDict(extra="forbid")

    collective: str
    ranks: int
    bytes: int
    ms: float
    gbs: float  # 10⁹ bytes a second


_LINKS = TypeAdapter(list[Link])


def curve(device_type: str, ranks: int, sizes: Sequence[int] = SIZES) -> list[Link]:
    """Of all-reduce, all-gather and send over gloo (`cpu`), and of reduce-scatter and all-to-all as well over NCCL
    (`cuda`, one GPU a rank). Raises torch's ProcessRaisedException where a rank raises."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "links.json"
        place = Place(0, ranks, free_port(), str(found), time.time(), os.getpid(), TIMEOUT_S)
        torch.multiprocessing.spawn(_rank, (place, device_type, tuple(sizes), found), nprocs=ranks)
        return _LINKS.validate_json(found.read_bytes())


def _rank(rank: int, place: Place, device_type: str, sizes: Sequence[int], found: Path) -> None:
    import torch.distributed as dist

    ranks, device = joined(replace(place, rank=rank), device_type, lambda: None)
    points = [
        Link(collective=name, ranks=ranks.size, bytes=size, ms=1000 * (taken := _slowest(call, ranks, device)),
             gbs=share * size / taken / 1e9)
        for size in sizes
        for name, share, call in _collectives(rank, ranks.size, size, device)
    ]  # fmt: skip
    if rank == 0:
        found.write_bytes(_LINKS.dump_json(points))
    dist.destroy_process_group()


def _collectives(rank: int, ranks: int, size: int, device: torch.device) -> list[tuple[str, float, Callable[[], Any]]]:
    """Name, bytes over a link for each byte given, and the call."""
    import torch.distributed as dist

    mine = torch.ones(size // 4, device=device)
    every = torch.empty(size // 4 * ranks, device=device)
    part = torch.empty(size // 4 // ranks, device=device)
    whole = mine[: len(part) * ranks]
    share = (ranks - 1) / ranks
    turn = lambda: dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0) if rank == 1 else None  # noqa: E731
    found: list[tuple[str, float, Callable[[], Any]]] = [
        ("all_reduce", 2 * share, lambda: dist.all_reduce(mine)),
        ("all_gather", ranks - 1, lambda: dist.all_gather_into_tensor(every, mine)),
        ("send", 1.0, turn),
    ]
    if device.type == "cuda":
        found += [
            ("reduce_scatter", share, lambda: dist.reduce_scatter_tensor(part, whole)),
            ("all_to_all", share, lambda: dist.all_to_all_single(torch.empty_like(whole), whole)),
        ]
    return found


def _slowest(call: Callable[[], Any], ranks: Ranks, device: torch.device) -> float:
    """Seconds a call, back to back, of the rank that takes the longest; as many calls on every rank."""

    def took(calls: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return ranks.largest((time.perf_counter() - began) / calls)

    took(1)
    return took(max(3, min(1000, int(BUSY_S / took(2)))))
