"""Two or four processes of a CPU that build arms and take steps together: one start for all cases of a test module.

What each case finds on rank 0 is handed back through a file; a case that raises hands back its words.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers import arm

from lorabench.contract.batch import Sample
from lorabench.contract.ranks import Ranks, whole
from lorabench.measure.judging import numerics
from lorabench.run.ranks import free_port

Case = tuple[Any, ...]  # names of toggles; a dict among them may hold `overrides` of the request under the name ""
STEPS = 5


def samples() -> list[Sample]:
    """Eight of unequal lengths, so that a mean of the ranks' means is another loss."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (48, 16, 33, 7, 64, 21, 5, 40)]
    return [Sample(tokens, list(tokens)) for tokens in drawn]


def steps_of(names: Sequence[Any], ranks: Ranks, **kwargs: Any) -> dict[str, Any]:
    """Of an arm the first step's outcome, and what its parameters are after STEPS of them."""
    made = arm(*names, samples=samples(), ranks=ranks, **kwargs)
    first = numerics.one_step(made)
    for _ in range(STEPS - 1):
        numerics.one_pass(made, made.step)
        made.step.update()
    after = {name: whole(p.detach()).clone() for name, p in made.adapters()}
    mine = torch.cat([p.flatten() for p in after.values()])
    return {"loss": first.loss, "gradients": first.gradients, "after": after, "differs": _differs(mine, ranks)}


def _differs(mine: torch.Tensor, ranks: Ranks) -> float:
    """0 where these numbers are bit for bit the same on all ranks."""
    if ranks.size == 1:
        return 0.0
    others = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(others, mine.contiguous())
    return max(float((other != mine).sum()) for other in others)


def together(size: int, work: Callable[[Ranks, Any], Any], cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `work` returns on rank 0 for each of the cases."""
    file = folder / f"found-{size}.pt"
    torch.multiprocessing.spawn(_rank, (size, free_port(), work, cases, str(file)), nprocs=size)
    return torch.load(file, weights_only=False)


def _rank(rank: int, size: int, port: int, work: Any, cases: dict[str, Any], file: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def total(value: float) -> float:
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number)
        return float(number)

    ranks, found = Ranks(rank, size, total=total), {}
    for name, case in cases.items():
        try:
            found[name] = work(ranks, case)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found[name] = f"{type(error).__name__}: {error}"
    if not rank:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()
