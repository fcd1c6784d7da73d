"""Which job each row of a batch belongs to, as kernels want it: a table on the device of programs, each of which has
some neighbouring rows of one job.

A batch is M rows in runs of one job each; a job may have several runs, or none. ⌈run / block⌉ programs of a block's
rows cover each run, and the last one's further rows are masked: no run has to be a multiple of anything. Run: python -m
pytest tests/lorakernels/test_multi_lora.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class JobRows:
    """Of M rows, by runs of (job, number of rows), jobs counted from 0; runs without rows are left out.

    rows: M; counts: each job's rows, by job; present: the jobs that have any, in order.
    """

    def __init__(self, runs: Iterable[tuple[int, int]], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.runs = [(int(job), int(count)) for job, count in runs if count]
        if wrong := next((run for run in self.runs if min(run) < 0), None):
            raise ValueError(f"a run of {wrong[1]} rows of job {wrong[0]}; expected no number below 0")
        self.counts: dict[int, int] = {}
        self._segments: list[tuple[int, int, int, int]] = []  # first row, end, job, the job's rows before it
        first = 0
        for job, count in self.runs:
            before = self.counts.get(job, 0)
            self._segments.append((first, first + count, job, before))
            self.counts[job] = before + count
            first += count
        self.rows = first
        self.present = tuple(sorted(self.counts))
        self._programs: dict[int, torch.Tensor] = {}
        self._of: dict[int, torch.Tensor] = {}

    @classmethod
    def each(cls, job: Sequence[int] | torch.Tensor, device: torch.device | str = "cpu") -> JobRows:
        """Of a job for each row, (M,). A tensor on a GPU makes the host wait for it: give it on the host."""
        values, counts = torch.unique_consecutive(torch.as_tensor(job).flatten().cpu(), return_counts=True)
        return cls(zip(values.tolist(), counts.tolist(), strict=True), device)

    def programs(self, block: int) -> torch.Tensor:
        """(programs, 4) int32 on the device: first row, end of its run, job, and how many rows of the job lie before
        the first one. Made once a block size."""
        if block not in self._programs:
            made = [
                (start, end, job, before + start - first)
                for first, end, job, before in self._segments
                for start in range(first, end, block)
            ]
            table = torch.tensor(made, dtype=torch.int32).view(-1, 4)
            self._programs[block] = table.to(self.device)
        return self._programs[block]

    def of(self, job: int) -> torch.Tensor:
        """The numbers of a job's rows, int64 on the host."""
        if job not in self._of:
            own = [torch.arange(first, end) for first, end, other, _ in self._segments if other == job]
            self._of[job] = torch.cat(own) if own else torch.empty(0, dtype=torch.int64)
        return self._of[job]
