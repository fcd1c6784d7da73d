"""Rows of several adapters in one batch: LoRA's own products, of all adapters in one launch each.

    S = scale · dropout(X) · Aᵀ    dS = scale · dY · B          (`down`)
    Y += S · Bᵀ                    dX += dropout(dS · A)        (`up`)
    dA = dSᵀ · dropout(X)          dB = dYᵀ · S                 (`gradients`)

where each row of X (M, K) and Y (M, N) has an adapter of its own, A (r, K) and B (N, r) of any rank from 1, with scale
and dropout of its own. S, dS: (M, R), R the largest rank; or wider, where adapters have columns of their own there
(`Adapter.column`), as in nodes/operand.py. The frozen weight's product is one library GEMM for all rows
(nodes/multi_linear.py). Nothing loops over adapters on the host, and no row is padded: a program reads from a table on
the device which rows it has, all of one adapter, and finds that adapter's matrices by their addresses. What it loads of
other rows is masked, and no sum goes over rows of two adapters: an adapter that has become NaN leaves the others'
results bitwise as they were. An adapter without rows has no gradient: None, because zeros would make Adam move it.

The dropout mask depends on the row's number among its adapter's rows, so it is the same in any company. dA and dB grow
in float32 by atomic adds, as in lora_grad.py. Run: python -m pytest tests/lorakernels/test_multi_lora.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import (
    capturing,
    cdiv,
    check,
    deterministic,
    kernel,
    rank_tile,
    stages_of,
    tensor_cores,
    tl,
    working_dtype,
)
from ..runtime import table as in_table
from .adapter import TL, UNIT, in_units, matrix_at
from .dropout import keep_reference, keep_tile, threshold_and_scale
from .job_rows import JobRows

MAX_COLUMNS = 64  # of S in one launch: above it the accumulators leave the registers, and there are several
# (rows, columns, warps, stages) of a program, and of `gradients` the blocks of rows that it walks down
DOWN, UP, GRADIENT = (64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3, 8)
# Of an adapter's row in the table: addresses of A and B, rank, p · 2¹⁶, where its dA and dB begin, its first column of
# S, and how far apart the rows of A and of B are.
FIELDS = 9
MOST_TABLES = 64  # of a linear: its adapters, by which jobs have rows


class Adapter(NamedTuple):
    """A (r, K), B (N, r), scale = alpha / r, the probability of a zero, and the adapter's first column of S and dS."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    dropout: float = 0.0
    column: int = 0


Adapters = Sequence[Adapter | None]  # None: a job that has no adapter on this linear


class AdapterTable:
    """The adapters of one linear, by job, checked once, and as kernels find them on the device. rank: the largest; k,
    n: widths of X and Y. Raises ValueError where they do not fit together, or none is there."""

    def __init__(self, adapters: Adapters) -> None:
        there = [a for a in adapters if a is not None]
        if not there:
            raise ValueError("no job has an adapter on this linear; expected one at least")
        self.adapters = list(adapters)
        self.rank = max(adapter.a.shape[0] for adapter in there)
        self.k, self.n = there[0].a.shape[1], there[0].b.shape[0]
        for a, b, *_ in there:
            fits = a.dim() == b.dim() == 2 and (a.shape[1], b.shape[0]) == (self.k, self.n) and len(a) == b.shape[1]
            check(fits, f"an adapter does not fit a linear of {self.k} inputs and {self.n} outputs", a=a, b=b)
        both = [t for a, b, *_ in there for t in (a, b)]
        # The kernels take matrices of one dtype whose rows lie in one piece each.
        self.alike = len({t.dtype for t in both}) == 1 and all(t.shape[1] == 1 or t.stride(1) == 1 for t in both)
        self.sample, self.drops = there[0].a, any(a.dropout > 0 for a in there)
        self.compact = not any(a.column for a in there)
        numbers = (n for a in there for n in (len(a.a), a.column, a.a.stride(0), a.b.stride(0)))
        self.aligned = in_units(numbers, both) and self.alike and self.sample.element_size() * UNIT == 16
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def takes(self, wide: torch.Tensor) -> bool:
        """Whether the kernels take X or Y (M, …) with these adapters."""
        return self.alike and tensor_cores(wide, self.sample)

    def aligned_with(self, tensor: torch.Tensor) -> bool:
        """Whether the matrices can be found from the address of a tensor of any shape, for loads of UNIT elements."""
        return self.aligned and tensor.dtype == self.sample.dtype and tensor.data_ptr() % 16 == 0

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers (jobs, FIELDS) int64, factors (jobs, 2) float32: scale and 1 / (1 - p)), made once."""
        if self._on_device is None:
            numbers, factors, da, db = [], [], 0, 0
            for adapter in self.adapters:
                if adapter is None:
                    numbers.append([0] * FIELDS)
                    factors.append((0.0, 1.0))
                    continue
                threshold, kept = threshold_and_scale(adapter.dropout)
                a, b = adapter.a, adapter.b
                places = a.data_ptr(), b.data_ptr(), a.shape[0], threshold, da, db, adapter.column
                numbers.append([*places, a.stride(0), b.stride(0)])
                factors.append((adapter.scale, kept))
                da, db = da + a.numel(), db + b.numel()
            device = self.sample.device
            self._on_device = (
                in_table(numbers, torch.int64, device),
                in_table(factors, torch.float32, device),
            )
        return self._on_device


class AdapterTables:
    """The tables of one linear. A tensor, a scale or a dropout that is another one makes another table; batches of one
    set of jobs after another come back to each. What a CUDA graph reads on every replay outlives a change."""

    def __init__(self) -> None:
        self._known: dict[tuple, AdapterTable] = {}
        self._captured: list[AdapterTable] = []

    def of(self, adapters: Adapters) -> AdapterTable:
        """Asked on every forward. Raises ValueError as `AdapterTable` does."""
        key = tuple(
            a and (a.a.data_ptr(), a.b.data_ptr(), *a[2:], a.a.shape[0], a.a.stride(0), a.b.stride(0)) for a in adapters
        )
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_TABLES:
                self._known.clear()
            found = self._known[key] = AdapterTable(adapters)
        if capturing(found.sample):
            self._captured.append(found)
        return found


@kernel
def _down_kernel(
    x_ptr, program_ptr, number_ptr, factor_ptr, seed_ptr, s_ptr, n, columns, skip, x_row, s_row,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr, DROP: tl.constexpr, OWN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """BM rows of one adapter; the columns of S from `skip` on, of an OWN adapter's up to its rank."""
    program = program_ptr + 4 * tl.program_id(0)
    first, end, adapter = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    place = (tl.load(program + 3) + tl.arange(0, BM)).to(tl.int64)
    row = (first + tl.arange(0, BM)).to(tl.int64)
    entry = number_ptr + 9 * adapter
    matrix = matrix_at(tl.load(entry + OF_B), x_ptr, TYPE, ALIGNED)
    rank, column, apart = tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7 + OF_B)
    if ALIGNED:
        rank, column, apart = tl.multiple_of(rank, 8), tl.multiple_of(column, 8), tl.multiple_of(apart, 8)
    r = skip + tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        x = tl.load(
            x_ptr + row[:, None] * x_row + col[None, :], mask=(row[:, None] < end) & (col[None, :] < n), other=0.0
        )
        if DROP:
            x = tl.where(keep_tile(tl.load(seed_ptr + adapter), place, start, n, tl.load(entry + 3), BM, BN), x, 0.0)
        spot = col[:, None] * apart + r[None, :] if OF_B else r[None, :] * apart + col[:, None]
        m = tl.load(matrix + spot, mask=(col[:, None] < n) & (r[None, :] < rank), other=0.0)
        acc = tl.dot(x.to(x_ptr.dtype.element_ty), m.to(x_ptr.dtype.element_ty), acc, input_precision="ieee")
    factor = tl.load(factor_ptr + 2 * adapter)
    if DROP:
        factor *= tl.load(factor_ptr + 2 * adapter + 1)
    inside = (row[:, None] < end) & (r[None, :] < (rank if OWN else columns))
    spot = s_ptr + row[:, None] * s_row + column + r[None, :]
    tl.store(spot, (acc * factor).to(s_ptr.dtype.element_ty), mask=inside)


@kernel
def _up_kernel(
    s_ptr, program_ptr, number_ptr, factor_ptr, seed_ptr, y_ptr, n, skip, s_row, y_row,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, OF_B: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    program = program_ptr + 4 * tl.program_id(0)
    first, end, adapter = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    place = (tl.load(program + 3) + tl.arange(0, BM)).to(tl.int64)
    row = (first + tl.arange(0, BM)).to(tl.int64)
    entry = number_ptr + 9 * adapter
    matrix = matrix_at(tl.load(entry + OF_B), s_ptr, TYPE, ALIGNED)
    rank, column, apart = tl.load(entry + 2), tl.load(entry + 6), tl.load(entry + 7 + OF_B)
    if ALIGNED:
        rank, column, apart = tl.multiple_of(rank, 8), tl.multiple_of(column, 8), tl.multiple_of(apart, 8)
    r = skip + tl.arange(0, R)
    start = tl.program_id(1) * BN
    col = start + tl.arange(0, BN)
    spot = s_ptr + row[:, None] * s_row + column + r[None, :]
    s = tl.load(spot, mask=(row[:, None] < end) & (r[None, :] < rank), other=0.0)
    spot = col[None, :] * apart + r[:, None] if OF_B else r[:, None] * apart + col[None, :]
    m = tl.load(matrix + spot, mask=(r[:, None] < rank) & (col[None, :] < n), other=0.0)
    new = tl.dot(s, m.to(s_ptr.dtype.element_ty), input_precision="ieee")
    if DROP:
        keep = keep_tile(tl.load(seed_ptr + adapter), place, start, n, tl.load(entry + 3), BM, BN)
        new = tl.where(keep, new * tl.load(factor_ptr + 2 * adapter + 1), 0.0)
    inside = (row[:, None] < end) & (col[None, :] < n)
    spot = y_ptr + row[:, None] * y_row + col[None, :]
    y = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(spot, (y + new).to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _gradient_kernel(
    x_ptr, s_ptr, program_ptr, number_ptr, factor_ptr, seed_ptr, grad_ptr, n, skip, x_row, s_row,
    ALIGNED: tl.constexpr, OF_B: tl.constexpr, DROP: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """STEPS · BM rows of one adapter, BN columns of the wide tensor."""
    program = program_ptr + 4 * tl.program_id(0)
    first, end, adapter = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    offset = tl.load(program + 3)
    entry = number_ptr + 9 * adapter
    rank, column = tl.load(entry + 2), tl.load(entry + 6)
    if ALIGNED:
        rank, column = tl.multiple_of(rank, 8), tl.multiple_of(column, 8)
    r = skip + tl.arange(0, R)
    start = tl.program_id(1) * BN
    col = start + tl.arange(0, BN)
    acc = tl.zeros((R, BN), tl.float32)
    for i in range(STEPS):
        row = (first + i * BM + tl.arange(0, BM)).to(tl.int64)
        known = row[:, None] < end
        x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=known & (col[None, :] < n), other=0.0)
        if DROP:
            place = (offset + i * BM + tl.arange(0, BM)).to(tl.int64)
            x = tl.where(keep_tile(tl.load(seed_ptr + adapter), place, start, n, tl.load(entry + 3), BM, BN), x, 0.0)
        spot = s_ptr + row[:, None] * s_row + column + r[None, :]
        s = tl.load(spot, mask=known & (r[None, :] < rank), other=0.0)
        acc = tl.dot(tl.trans(s), x.to(s_ptr.dtype.element_ty), acc, input_precision="ieee")
    if DROP:
        acc *= tl.load(factor_ptr + 2 * adapter + 1)
    spot = col[None, :] * rank + r[:, None] if OF_B else r[:, None] * n + col[None, :]
    inside = (r[:, None] < rank) & (col[None, :] < n)
    tl.atomic_add(grad_ptr + tl.load(entry + 4 + OF_B) + spot, acc, mask=inside, sem="relaxed")


def down(
    x: torch.Tensor, table: AdapterTable, rows: JobRows, *, of_b: bool = False, seeds: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """S (M, R) of X (M, K); of_b: dS (M, R) of dY (M, N). seeds: of each adapter one int64 where there is dropout.
    Behind an adapter's own rank there is zero, or NaN in a row that is NaN. out: (M, ≥ R), of which each row's own
    columns alone are written. Raises ValueError where the shapes do not fit."""
    _check(x, table, rows, of_b)
    check(out is not None or table.compact, "adapters with columns of their own need an out", x=x)
    if not table.takes(x):
        return _down(x, table, rows, of_b, seeds, out)
    s = torch.empty(x.shape[0], table.rank, dtype=x.dtype, device=x.device) if out is None else out
    bm, bn, warps, stages = DOWN
    programs, (numbers, factors) = rows.programs(bm), table.on_device()
    for skip in range(0, table.rank, MAX_COLUMNS):
        _down_kernel[(programs.shape[0],)](
            x, programs, numbers, factors, numbers if seeds is None else seeds, s,
            x.shape[1], table.rank, skip, x.stride(0), s.stride(0),
            TYPE=_type(table), ALIGNED=table.aligned_with(x), OF_B=int(of_b), DROP=seeds is not None,
            OWN=out is not None, BM=bm, BN=bn,
            R=_columns(table, skip), num_warps=warps, num_stages=stages_of(x, stages),
        )  # fmt: skip
    return s


def up(
    s: torch.Tensor, table: AdapterTable, rows: JobRows, y: torch.Tensor, *, of_b: bool = True,
    seeds: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Y (M, N) += S · Bᵀ of S (M, R); not of_b: dX (M, K) += dropout(dS · A), with the mask of X where seeds are given.
    Raises ValueError where the shapes do not fit."""
    _check(y, table, rows, of_b)
    if not table.takes(y):
        return _up(s, table, rows, y, of_b, seeds)
    bm, bn, warps, stages = UP
    programs, (numbers, factors) = rows.programs(bm), table.on_device()
    for skip in range(0, table.rank, MAX_COLUMNS):
        _up_kernel[(programs.shape[0], cdiv(y.shape[1], bn))](
            s, programs, numbers, factors, numbers if seeds is None else seeds, y,
            y.shape[1], skip, s.stride(0), y.stride(0),
            TYPE=_type(table), ALIGNED=table.aligned_with(s), OF_B=int(of_b), DROP=seeds is not None,
            BM=bm, BN=bn, R=_columns(table, skip),
            num_warps=warps, num_stages=stages_of(y, stages),
        )  # fmt: skip


def gradients(
    x: torch.Tensor, s: torch.Tensor, table: AdapterTable, rows: JobRows, *, of_b: bool = False,
    seeds: torch.Tensor | None = None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Of each adapter dA (r, K) of X (M, K) and dS (M, R); of_b: dB (N, r) of dY (M, N) and S (M, R); float32 (float64
    for float64), None of one that has no rows. Raises ValueError where the shapes do not fit."""
    _check(x, table, rows, of_b)
    if deterministic() or not table.takes(x):
        return _gradients(x, s, table, rows, of_b, seeds)
    bm, bn, warps, stages, steps = GRADIENT
    programs, (numbers, factors) = rows.programs(bm * steps), table.on_device()
    shapes = [None if a is None else (a.b if of_b else a.a).shape for a in table.adapters]
    sizes = [shape.numel() for shape in shapes if shape]
    into = torch.zeros(sum(sizes), dtype=torch.float32, device=x.device)
    for skip in range(0, table.rank, MAX_COLUMNS):
        _gradient_kernel[(programs.shape[0], cdiv(x.shape[1], bn))](
            x, s, programs, numbers, factors, numbers if seeds is None else seeds, into,
            x.shape[1], skip, x.stride(0), s.stride(0),
            ALIGNED=table.aligned, OF_B=int(of_b), DROP=seeds is not None,
            STEPS=steps, BM=bm, BN=bn, R=_columns(table, skip),
            num_warps=warps, num_stages=stages_of(x, stages),
        )  # fmt: skip
    each = iter(into.split(sizes))
    found = [None if shape is None else next(each).view(shape) for shape in shapes]
    return [grad if job in rows.counts else None for job, grad in enumerate(found)]


def multi_lora_reference(
    x: torch.Tensor, adapters: Adapters, rows: JobRows, seeds: torch.Tensor | None = None
) -> torch.Tensor:
    """What the adapters add to Y, (M, N), of x (M, K), in float32 (float64 for float64): plain products that autograd
    follows."""
    dtype = working_dtype(x)
    y = x.new_zeros(x.shape[0], AdapterTable(adapters).n, dtype=dtype)
    for job in rows.present:
        if (adapter := adapters[job]) is None:
            continue
        where = rows.of(job).to(x.device)
        own = x[where].to(dtype) * mask_of(rows, job, x.shape[1], adapter, seeds, x.device, dtype)
        y = y.index_add(0, where, adapter.scale * own @ adapter.a.to(dtype).t() @ adapter.b.to(dtype).t())
    return y


def mask_of(
    rows: JobRows, job: int, width: int, adapter: Adapter, seeds: torch.Tensor | None, device: Any, dtype: torch.dtype
) -> torch.Tensor:
    """What the torch path multiplies a job's rows (m, width) of X by: keep / (1 - p), ones (1, 1) without dropout."""
    if seeds is None or adapter.dropout == 0:
        return torch.ones(1, 1, dtype=dtype, device=device)
    _, kept = threshold_and_scale(adapter.dropout)
    shape = (rows.counts[job], width)
    return keep_reference(shape, seeds[job], adapter.dropout).to(device, dtype) * kept


def _check(wide: torch.Tensor, table: AdapterTable, rows: JobRows, of_b: bool) -> None:
    check(wide.shape[0] == rows.rows, f"the jobs have {rows.rows} rows", tensor=wide)
    width = table.n if of_b else table.k
    check(wide.shape[1] == width, f"the adapters are of a width of {width}", tensor=wide)
    if rows.present and rows.present[-1] >= len(table.adapters):
        raise ValueError(f"a row is of job {rows.present[-1]}; expected one of the {len(table.adapters)} from 0")


def _type(table: AdapterTable) -> Any:
    return getattr(tl, TL[table.sample.dtype])


def _columns(table: AdapterTable, skip: int) -> int:
    return rank_tile(min(table.rank - skip, MAX_COLUMNS))


# ---- the torch path: adapter after adapter ---------------------------------------------------------------------------
def _each(table: AdapterTable, rows: JobRows, device: torch.device) -> list[tuple[int, Adapter, torch.Tensor]]:
    found = [(job, table.adapters[job]) for job in rows.present]
    return [(job, adapter, rows.of(job).to(device)) for job, adapter in found if adapter is not None]


def _columns_of(adapter: Adapter) -> slice:
    return slice(adapter.column, adapter.column + adapter.a.shape[0])


def _dropped(
    x: torch.Tensor, job: int, adapter: Adapter, rows: JobRows, where: torch.Tensor, seeds: torch.Tensor | None
) -> torch.Tensor:
    """A job's own rows of x (M, K), in the working dtype, after dropout."""
    dtype = working_dtype(x)
    mask = mask_of(rows, job, x.shape[1], adapter, seeds, x.device, dtype)
    return torch.where(mask == 0, 0, x[where].to(dtype) * mask)


def _down(
    x: torch.Tensor, table: AdapterTable, rows: JobRows, of_b: bool, seeds: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    s = torch.zeros(x.shape[0], table.rank, dtype=x.dtype, device=x.device) if out is None else out
    for job, adapter, where in _each(table, rows, x.device):
        own = _dropped(x, job, adapter, rows, where, seeds)
        matrix = adapter.b.t() if of_b else adapter.a
        s[where, _columns_of(adapter)] = (adapter.scale * own @ matrix.detach().to(own.dtype).t()).to(s.dtype)
    return s


def _up(
    s: torch.Tensor, table: AdapterTable, rows: JobRows, y: torch.Tensor, of_b: bool, seeds: torch.Tensor | None
) -> None:
    dtype = working_dtype(y)
    for job, adapter, where in _each(table, rows, y.device):
        matrix = (adapter.b.t() if of_b else adapter.a).detach().to(dtype)
        new = s[where, _columns_of(adapter)].to(dtype) @ matrix
        mask = mask_of(rows, job, y.shape[1], adapter, seeds, y.device, dtype)
        y[where] = (y[where].to(dtype) + torch.where(mask == 0, 0, new * mask)).to(y.dtype)


def _gradients(
    x: torch.Tensor, s: torch.Tensor, table: AdapterTable, rows: JobRows, of_b: bool, seeds: torch.Tensor | None
) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = [None] * len(table.adapters)
    for job, adapter, where in _each(table, rows, x.device):
        own = _dropped(x, job, adapter, rows, where, seeds)
        narrow = s[where, _columns_of(adapter)].to(own.dtype)
        found[job] = own.t() @ narrow if of_b else narrow.t() @ own
    return found
