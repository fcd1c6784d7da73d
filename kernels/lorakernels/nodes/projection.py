"""LoRA projections that share an input, as one library GEMM:

    Y = [X | S] · [W | sB]ᵀ        S = X · Aᵀ                 forward     (products.py)
    dX = [dY | dS] · [W ; A]       dS = dY · sB               backward    (output_grad.py)
    dA = dSᵀ · X,  dB = dYᵀ · sS                                          (adapter_grad.py)

X: (M, K), W: (N, K), A: (p, K), sB: (N, p), Y: (M, N). The operand is `operand.py`'s; here is what else a forward asks
of the members as a whole: their bias, their dropout's seeds, the room for sS.

Why: `Y += S · (sB)ᵀ` as a GEMM of its own reads and writes Y once more. Where the plain form is measured to be faster
it is taken (`tune`). Hu et al., "LoRA" (2021). Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..ops.adapter import RaisedB, raised_b, raised_b_reference
from ..ops.concat_operand import ScaledS
from ..ops.dropout import draw_seed
from ..ops.job_columns import SPARE, keep_own_columns
from ..ops.job_rows import JobRows
from ..ops.multi_lora import Adapter, AdapterTable, AdapterTables
from ..ops.own_columns import LinearColumns, Own, OwnColumns
from ..runtime import capturing, table
from .member import Member
from .operand import Holder, Operand, OperandBuffer


class LinearSlots(NamedTuple):
    """The slots of one linear, for the products of multi_lora.py and multi_product.py: its adapters by job, of scale 1,
    each with its place in the projection's S; the jobs of the rows; a seed a job, or None without dropout; of each
    member of the linear its place in the projection, by job."""

    table: AdapterTable
    jobs: JobRows
    seeds: torch.Tensor | None
    members: dict[int, int]


class Projection(OperandBuffer):
    """Members that share an input of K columns, and their operand buffer.

    one_gemm: [X | S]·[W | sB]ᵀ where it is measured to be faster; fp8: the frozen products in FP8, which have no such
    operand; holder: of the buffer, where it is not our own. Raises ValueError where the members' inputs differ in
    width.
    """

    def __init__(
        self, members: list[Member], one_gemm: bool = True, fp8: bool = False, holder: Holder | None = None
    ):  # fmt: skip
        super().__init__(members, fp8, holder)
        self.one_gemm = one_gemm and self.fp8 is None
        self._scales: tuple[tuple, torch.Tensor] | None = None  # of `new_scaled_s`, behind what they were made for
        self.slot = next((m for m in members if m.job is not None), None)  # which knows the jobs of the rows
        self._last_job = max((m.job for m in members if m.job is not None), default=-1)
        self._job_of_column: torch.Tensor | None = None
        self._tables: dict[int, AdapterTables] = {}  # of `slots`, by linear
        self._own_columns: list[OwnColumns] = []  # the last one counts; a CUDA graph may read those before it

    def total_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Bias (N,) of all members in dtype, with scale · lora_B.bias added, or None."""
        if all(m.bias is None and m.lora_bias is None for m in self.members):
            return None
        first = self.members[0]
        if len(self.linears) == 1 and first.lora_bias is None and first.bias is not None:
            return first.bias.to(dtype)
        parts = []
        for m in self.linears:
            part = torch.zeros(m.shape[0], dtype=torch.float32, device=m.weight.device)
            part = part if m.bias is None else part + m.bias
            parts.append(part if m.lora_bias is None else part + m.scale * m.lora_bias)
        return torch.cat(parts).to(dtype)

    def new_scaled_s(self, m: int, dtype: torch.dtype, device: torch.device) -> ScaledS:
        """Room for sS (m, p) in dtype: S with each member's columns multiplied by its scale, as dB = dYᵀ · sS needs
        it."""
        exact = torch.promote_types(dtype, torch.float32)
        key = (tuple(x.scale for x in self.members), exact, device)
        if self._scales is not None and self._scales[0] == key:
            scales = self._scales[1]
        else:
            sizes = [(c.stop - c.start, scale) for c, scale in zip(self.columns, key[0], strict=True)]
            sizes.append((self.p - self.rank, 0.0))
            scales = torch.cat([torch.full((n,), scale, dtype=exact, device=device) for n, scale in sizes])
            if not capturing(scales):  # what a capture makes has no values before the first replay
                self._scales = key, scales
        return ScaledS(torch.empty(m, self.p, dtype=dtype, device=device), scales)

    def raised_b(self, dtype: torch.dtype) -> RaisedB | None:
        """s·B for the backward of products in dtype, where that is float16 and the adapters are kept in more; else
        None. (Adapters in float16 have no smaller numbers than the operand.)"""
        if dtype != torch.float16:
            return None
        adapters = [t for m in self.members for t in (m.a, m.b) if t is not None]
        if not adapters or any(t.dtype == torch.float16 for t in adapters):
            return None
        device = adapters[0].device
        if self.slot is None:
            return raised_b([(m.b, m.shape[0], m.scale) for m in self.members], self.p, dtype, device)
        sb = torch.zeros(self.n, self.p, dtype=dtype, device=device)
        back = torch.zeros(self.p, dtype=torch.float32, device=device)
        for m, rows, columns in zip(self.members, self.rows, self.columns, strict=True):
            if m.b is not None:
                of_member, back[columns] = raised_b_reference(m.b.detach(), m.scale)
                sb[rows, columns] = of_member.to(dtype)
        return RaisedB(sb, back)

    def check_rows(self, x: torch.Tensor) -> None:
        """Raises ValueError where rows of several adapters were announced, and x (…, K) has another number of rows."""
        if self.slot is not None and self.slot.jobs is not None:
            self.slot.jobs.of_input(x)

    def keep_own_columns(
        self, s: torch.Tensor, scaled_s: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Of an S or dS (M, p), and an sS (M, p) where given, each row keeps its own job's columns: nothing to do where
        all rows have one adapter. scales: (p,), with which sS is made of S here."""
        if self.slot is None:
            return
        job_of_row = self._jobs_of(s).job_of_row()
        keep_own_columns(s, job_of_row, self._columns_jobs(s.device), scaled_s, scales)

    def own_columns(self, x: torch.Tensor) -> Own:
        """Whose columns of S are whose, made once, and whose the rows of x (M, …) are. A slot without an adapter has
        its columns, too: those of the operand are zeros then. What `keep_own_columns` reads is made as well: a captured
        backward calls it where it has a side stream, whatever the steps before it did, and can make no table."""
        count, known = self._job_count(), self._own_columns
        if not known or known[-1].jobs < count or known[-1].of_jobs.device != x.device:
            linears = []
            for linear, columns in enumerate(self.linear_columns):
                jobs = [(columns.start, 0)] * count
                for m, j, own in zip(self.members, self.linear_of, self.columns, strict=True):
                    if j == linear and m.job is not None:
                        jobs[m.job] = own.start, own.stop - own.start
                last = linear == len(self.linears) - 1  # whose columns are followed by the spare ones
                linears.append(LinearColumns(slice(columns.start, self.p) if last else columns, jobs))
            known.append(OwnColumns(linears, x.device))
        jobs = self._jobs_of(x)
        self._columns_jobs(x.device)
        jobs.job_of_row()
        return Own(known[-1], jobs)

    def _jobs_of(self, x: torch.Tensor) -> JobRows:
        """The jobs of the rows of x (M, …), on its device."""
        assert self.slot is not None and self.slot.jobs is not None, "slots know the jobs of the rows"
        return self.slot.jobs.in_all(x.shape[0], x.device)

    def _columns_jobs(self, device: torch.device) -> torch.Tensor:
        """(p,) int32, made once."""
        if self._job_of_column is None or self._job_of_column.device != device:
            each = zip(self.members, self.columns, strict=True)
            jobs = [SPARE if m.job is None else m.job for m, c in each for _ in range(c.stop - c.start)]
            self._job_of_column = table(jobs + [SPARE] * (self.p - self.rank), torch.int32, device)
        return self._job_of_column

    @property
    def dropped(self) -> bool:
        """Whether any member with an adapter drops out its input today."""
        return any(m.dropout > 0 and m.rank for m in self.members)

    def seeds(self, device: torch.device) -> torch.Tensor | None:
        """A seed a member, (members,) int64, or None without dropout: PEFT draws one mask for each projection, so these
        do too. With slots a seed a linear and job, (linears · jobs,)."""
        if not self.dropped:
            return None
        return draw_seed(device, len(self.members) if self.slot is None else len(self.linears) * self._job_count())

    def _job_count(self) -> int:
        """Of the jobs that have a slot here or rows in the batch."""
        assert self.slot is not None and self.slot.jobs is not None
        return 1 + max([self._last_job, *self.slot.jobs.present[-1:]])  # asked several times a layer and step

    def release(self) -> None:
        super().release()
        self._tables.clear()  # they hold the buffer

    def slots(self, x: torch.Tensor, op: Operand, seeds: torch.Tensor | None) -> Iterator[LinearSlots]:
        """Of each linear that has an adapter with rows of x (M, …), as it lies in the operand; seeds: of `seeds`."""
        jobs, each = self._jobs_of(x), None if seeds is None else seeds.view(len(self.linears), -1)
        count = self._job_count() if each is None else each.shape[1]
        for linear in range(len(self.linears)):
            of_linear = [i for i, j in enumerate(self.linear_of) if j == linear]
            adapters: list[Adapter | None] = [None] * count
            members: dict[int, int] = {}
            for i in of_linear:
                m = self.members[i]
                if m.a is not None and m.job is not None:
                    adapters[m.job] = Adapter(*op.places[i], 1.0, m.dropout, self.columns[i].start)
                    members[m.job] = i
            if members:
                ours = op.full is not None and op.full is self.buffer
                tables = self._tables.setdefault(linear, AdapterTables()) if ours else None
                of_slots = tables.of(adapters) if tables else AdapterTable(adapters)
                yield LinearSlots(of_slots, jobs, None if each is None else each[linear], members)
