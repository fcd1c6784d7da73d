"""How FSDP2 gathers weights by the copy engines of the GPUs, and leaves their multiprocessors to the computation.

NCCL copies so where its group has the zero-CTA policy and the buffer that it gathers into is registered on all ranks
(NCCL's user guide, "Zero-CTA Optimization"; torch 2.11's documentation, "Copy Engine Collectives"). torch 2.13's own
`FSDPModule.set_symm_mem_for_comm` takes its buffers from a memory pool that torch 2.11 does not have for NCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from lorabench.contract.ablation import Unsupported

# FSDP2 gathers into one buffer while it copies weights out of another, and waits for that before it asks for a third.
IN_FLIGHT = 2


def options() -> Any:
    """Of the process group whose collectives keep off the multiprocessors where they can."""
    if dist.get_backend() != "nccl":
        raise Unsupported(f"copy engines copy between GPUs, and these ranks send over {dist.get_backend()}")
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if not hasattr(nccl, "NCCL_CTA_POLICY_ZERO"):
        raise Unsupported(f"copy engines need NCCL 2.28's zero-CTA policy, and torch {torch.__version__} has none")
    found = nccl.Options()
    found.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return found


def gather_in(group: dist.ProcessGroup) -> CopyEngineGather:
    """The one of this group, whose buffers all modules share."""
    found = _GATHERS.get(group.group_name)
    if found is None:
        found = _GATHERS[group.group_name] = CopyEngineGather(group)
    return found


class CopyEngineGather(AllGather):
    """FSDP2's all-gather into buffers that all ranks of the group have registered. A buffer is made and registered when
    its size is first asked for, and used again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        symmetric_memory.set_backend("NCCL")
        dist.barrier(group=group)  # a group without a communicator yet cannot register anything
        self.name = group.group_name
        self.rings: dict[tuple[Any, ...], deque[torch.Tensor]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer of this size that was lent longest ago. All ranks ask in the same order."""
        ring = self.rings.setdefault((*size, dtype), deque())
        if len(ring) == IN_FLIGHT:
            ring.rotate(-1)
        else:
            ring.append(symmetric_memory.empty(*size, dtype=dtype, device=device))
            symmetric_memory.rendezvous(ring[-1], group=self.name)
        return ring[-1]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


_GATHERS: WeakValueDictionary[str, CopyEngineGather] = WeakValueDictionary()
