"""Slot `jobs`: `processes`, several fine-tuning jobs at the same time on one GPU, each in a process of its own.

python -m lorabench.sweep workload=two_jobs 'ablations=[processes]'

It is what one does without any software for several adapters, and m-LoRA's baseline "Alpaca-Parallel". The processes
share nothing but the GPU: each holds its own copy of the base. They begin each trial together, and its time is that of
the slowest one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lorabench.contract.ablation import Ablation, Evidence, Unsupported
from lorabench.contract.step import Step

MPS = "nvidia-cuda-mps"  # how the names of its control daemon and of its server begin
ALONE = "each job trains alone in its process"


@dataclass(frozen=True, kw_only=True)
class Processes(Ablation):
    """A process a job, all on the first GPU. Each is plain PEFT with one adapter, so whatever goes with that goes with
    this, but for what looks for room on the GPU while the others do."""

    name: ClassVar[str] = "processes"
    slot: ClassVar[str] = "jobs"
    summary: ClassVar[str] = "all jobs at the same time on one GPU, each in a process and on a base of its own"
    parallel: ClassVar[bool] = True
    process_a_job: ClassVar[bool] = True
    excludes: ClassVar[dict[str, str]] = {
        "batch_size": "it takes the room that it finds on the GPU, and each job's process would do so at the same time",
        "parallel": f"{ALONE}, all on one GPU, and no step is divided",
        "scheduler": f"{ALONE}, so there is nothing to share out",
    }

    def join(self, steps: Sequence[Step]) -> list[Step]:
        if len(steps) > 1:
            raise Unsupported(f"{self.name} trains one job a process; here are {len(steps)} in one")
        return list(steps)

    def audit(self, evidence: Evidence) -> int:
        """The processes, where each of them trains one job that no other one trains."""
        import torch.distributed as dist

        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (os.getpid(), [step.name for step in evidence.arm.steps]))
        jobs = [job for _, own in every for job in own]
        apart = len({process for process, _ in every})
        return apart if apart == len(jobs) == len({*jobs}) else 0

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        import torch.distributed as dist

        found: dict[str, Any] = {"processes": dist.get_world_size(), "backend": dist.get_backend()}
        return {self.name: found | (served_by_mps() if evidence.arm.device.type == "cuda" else {})}


def served_by_mps() -> dict[str, Any]:
    """Whether NVIDIA's MPS can serve this process, which lets kernels of several processes run at the same time;
    without it they take turns on the GPU. `mps_daemon`: its daemon is seen to run; outside of a container it may run
    unseen.
    `mps_pipes`: the folder in which CUDA is told to look for it; None: nobody says, and CUDA looks in its usual one."""
    import psutil

    names = [process.info["name"] or "" for process in psutil.process_iter(["name"])]
    running = any(name.startswith(MPS) for name in names)
    return {"mps_daemon": running, "mps_pipes": os.environ.get("CUDA_MPS_PIPE_DIRECTORY")}
