"""Ranks: the processes of one arm, mostly one a GPU. One rank is the ordinary case, and the same code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# In every process of several GPUs: a program that uses NVLink multicast can put GPUs that others share out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def switch_multicast_off() -> None:
    """Set in this process's environment, for all that it starts, what is not set there."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


def multicast(environment: Mapping[str, str], started: bool = False) -> str | None:
    """The first variable that asks for NVLink multicast, in words, or None. One that is not set will be set by whoever
    starts the ranks, so in a rank that has `started` it asks for multicast, too."""
    for name, value in NO_MULTICAST.items():
        if (given := environment.get(name, None if started else value)) != value:
            found = f"{name} is not" if given is None else f"{name}={given}"
            return f"{found} in the environment; on several GPUs it has to be {value}, which lorabench sets itself"
    return None


def _nothing() -> None:
    pass


def _own(value: float) -> float:
    return value


@dataclass(frozen=True)
class Ranks:
    """This process among those that step together. `rank` counts from 0; rank 0 reports.

    `barrier` waits for all of them; `total` and `largest` give the sum and the maximum of a number over them; `beat`
    counts that something began, by which a rank that hangs is told from those that wait for it. With one rank all do
    nothing.
    """

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] = field(default=_nothing, compare=False)
    total: Callable[[float], float] = field(default=_own, compare=False)
    largest: Callable[[float], float] = field(default=_own, compare=False)
    beat: Callable[[], None] = field(default=_nothing, compare=False)

    def alone(self) -> Ranks:
        """This process as the only one of what it trains: nothing is divided or added up. Its trials still begin
        together with the others'."""
        return replace(self, rank=0, size=1, total=_own)


ONE = Ranks()


def local(tensor: Any) -> Any:
    """What this rank holds of a tensor: of a DTensor its part, as a plain tensor over the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> Any:
    """All of a tensor: a DTensor is gathered, for which every rank that holds a part has to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def put(tensor: Any, value: Any) -> None:
    """Write all of a tensor, in place: of a DTensor each rank keeps its part of `value`, which it has whole."""
    if hasattr(tensor, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(value))
