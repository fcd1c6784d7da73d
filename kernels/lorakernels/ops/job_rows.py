"""Which job each row of a batch belongs to, as kernels want it: a table on the device of programs, each of which has
some neighbouring rows of one job.

A batch is M rows in runs of one job each; a job may have several runs, or none. ⌈run / block⌉ programs of a block's
rows cover each run, and the last one's further rows are masked: no run has to be a multiple of anything. Run: python -m
pytest tests/lorakernels/test_multi_lora.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from ..runtime import cdiv, jit, table, tl


@jit
def rows_of(program_ptr, number, m, ROWS: tl.constexpr, OWN: tl.constexpr):
    """(first row, end, job) of a program: where rows have adapters of their OWN, of the table's (`JobRows.programs`),
    else the next ROWS of m rows of job 0. A program ends after ROWS rows, too."""
    first, end, job = number * ROWS, m, number * 0
    if OWN:
        program = program_ptr + 4 * number
        first, end, job = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    return first, end, job


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
        self._pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of: dict[int, torch.Tensor] = {}
        self._of_input: dict[tuple[int, torch.device], JobRows] = {}
        self._job_of_row: torch.Tensor | None = None

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
            self._programs[block] = table(made, torch.int32, self.device).view(-1, 4)
        return self._programs[block]

    def pieces(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For tiles of a block's rows that are not cut at a run's end: (pieces, 4) int32 on the device, as `programs`,
        of rows of one run in one tile each, and (tiles + 1,) int32, where each tile's pieces begin and the last one's
        end. Made once a block size."""
        if block not in self._pieces:
            made = [
                (max(start, first), min(start + block, end), job, before + max(start - first, 0))
                for first, end, job, before in self._segments
                for start in range(first // block * block, end, block)
            ]
            count = [0] * (cdiv(self.rows, block) + 1)
            for start, *_ in made:
                count[start // block + 1] += 1
            ends = list(itertools.accumulate(count))
            self._pieces[block] = (
                table(made, torch.int32, self.device).view(-1, 4),
                table(ends, torch.int32, self.device),
            )
        return self._pieces[block]

    def of_input(self, x: torch.Tensor) -> JobRows:
        """The jobs of the rows of x (…, K), where these are of its rows or, as x is (B, S, K), of its B samples. Made
        once a number of rows. Raises ValueError where x has another number of them."""
        count = x.numel() // max(1, x.shape[-1])
        if count != self.rows and (x.dim() != 3 or x.shape[0] != self.rows):
            raise ValueError(f"a linear has {count} rows {tuple(x.shape)}; the jobs were set for {self.rows}")
        return self.in_all(count, x.device)

    def in_all(self, count: int, device: torch.device) -> JobRows:
        """The same on the device, with as many rows in the place of each as make `count`."""
        times = count // self.rows if self.rows else 0
        key = times, device
        if key not in self._of_input:
            self._of_input[key] = JobRows([(job, own * times) for job, own in self.runs], device)
        return self._of_input[key]

    def job_of_row(self) -> torch.Tensor:
        """(M,) int32 on the device, made once; the host does not wait for it."""
        if self._job_of_row is None:
            jobs, counts = zip(*self.runs, strict=True) if self.runs else ((), ())
            job, count = (table(own, torch.int32, self.device) for own in (jobs, counts))
            self._job_of_row = torch.repeat_interleave(job, count, output_size=self.rows)
        return self._job_of_row

    def of(self, job: int) -> torch.Tensor:
        """The numbers of a job's rows, int64 on the host."""
        if job not in self._of:
            own = [torch.arange(first, end) for first, end, other, _ in self._segments if other == job]
            self._of[job] = torch.cat(own) if own else torch.empty(0, dtype=torch.int64)
        return self._of[job]
