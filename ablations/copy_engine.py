"""How FSDP2 gathers weights by the copy engines of the GPUs, and leaves their multiprocessors to the computation.

NCCL copies so where its group has the zero-CTA policy and the buffer that it gathers into is registered on all ranks
(NCCL's user guide, "Zero-CTA Optimization"; torch 2.11's documentation, "Copy Engine Collectives").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from lorabench.contract.ablation import Unsupported


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


class CopyEngineGather(AllGather):
    """FSDP2's all-gather into buffers that all ranks of the group have registered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        symmetric_memory.set_backend("NCCL")
        dist.barrier(group=group)  # a group without a communicator yet cannot register anything

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From a pool, so that a buffer is registered when it is first used, and not at each gather."""
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        symmetric_memory.rendezvous(output_tensor, group=group.group_name)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
