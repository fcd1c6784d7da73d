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
from pydantic import TypeAdapter

from lorabench.contract.family import Family
from lorabench.contract.hooks import described
from lorabench.contract.machine import Machine
from lorabench.contract.ranks import Ranks, switch_multicast_off
from lorabench.measure.trial import synchronize
from lorabench.plan.design import refusal
from lorabench.record.environment import Link
from lorabench.run.ranks import Place, free_port, joined
from lorabench.run.session import Session

SIZES = [4**n * 1024 for n in range(1, 11)]  # 4 KiB to 1 GiB
FEW = {"cpu": (4096, 1 << 20), "cuda": (4096, 1 << 20, 1 << 26)}  # latency, and bandwidth
TIMEOUT_S = 240.0  # of a whole curve
SESSION_S = 60.0  # of a session's, which takes a few where nothing is wrong
BUSY_S = 0.1  # of each collective and size, after one that is not timed
BRIEF_S = 0.01  # the same where a sweep waits for it


_LINKS = TypeAdapter(list[Link])


def with_links(session: Session, family: Family, machine: Machine, method: str) -> Session:
    """The session, to be asked before a family is measured: itself, or one whose ceilings have a short curve of as many
    ranks as this family has, where that is not known yet. `no_links` says why there is none. `method`: of starting
    processes, as multiprocessing names it."""
    if family.gpus == 1 or all(refusal(cell, machine) for cell in family.cells):
        return session
    ceilings = session["ceilings"]
    if "no_links" in ceilings or any(link["ranks"] == family.gpus for link in ceilings.get("links", ())):
        return session
    try:
        found = curve(machine.device, family.gpus, FEW[machine.device], BRIEF_S, method, SESSION_S)
    except Exception as error:  # whatever it is, the arms are still to be measured
        return session | {"ceilings": ceilings | {"no_links": described(error)}}
    links = [*ceilings.get("links", ()), *(link.model_dump() for link in found)]
    return session | {"ceilings": ceilings | {"links": links}}


def curve(
    device_type: str, ranks: int, sizes: Sequence[int] = SIZES, busy_s: float = BUSY_S, method: str = "spawn",
    within_s: float = TIMEOUT_S,
) -> list[Link]:  # fmt: skip
    """Of every collective over gloo (`cpu`) or NCCL (`cuda`, one GPU a rank), in processes of its own: nothing of it
    stays where arms are measured. Raises torch's ProcessRaisedException where a rank raises, and TimeoutError."""
    from torch.multiprocessing.spawn import start_processes

    switch_multicast_off()
    until = time.monotonic() + within_s
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "links.json"
        place = Place(0, ranks, free_port(), str(found), os.getpid(), within_s)
        arguments = place, device_type, tuple(sizes), busy_s, found
        started: Any = start_processes(_rank, arguments, nprocs=ranks, join=False, start_method=method)
        try:
            while not started.join(left := until - time.monotonic()):
                if left <= 0:
                    raise TimeoutError(f"{ranks} ranks have not answered each other within {within_s:g} s")
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        return _LINKS.validate_json(found.read_bytes())


def _rank(rank: int, place: Place, device_type: str, sizes: Sequence[int], busy_s: float, found: Path) -> None:
    import torch.distributed as dist

    ranks, device = joined(replace(place, rank=rank), device_type, lambda: None)
    points = [
        Link(collective=name, ranks=ranks.size, bytes=size, ms=1000 * (taken := _slowest(call, ranks, device, busy_s)),
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
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its names in torch 2.13 and before
    turn = lambda: dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0) if rank == 1 else None  # noqa: E731
    return [
        ("all_reduce", 2 * share, lambda: dist.all_reduce(mine)),
        ("all_gather", ranks - 1, lambda: dist.all_gather_into_tensor(every, mine)),
        ("reduce_scatter", share, lambda: scatter(part, whole)),
        ("all_to_all", share, lambda: dist.all_to_all_single(torch.empty_like(whole), whole)),
        ("send", 1.0, turn),
    ]


def _slowest(call: Callable[[], Any], ranks: Ranks, device: torch.device, busy_s: float) -> float:
    """Seconds a call, back to back, of the rank that takes the longest; as many calls on every rank."""

    def took(calls: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return ranks.largest((time.perf_counter() - began) / calls)

    took(1)
    return took(max(3, min(1000, int(busy_s / took(2)))))
