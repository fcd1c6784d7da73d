"""Rows of several adapters, each product against float32: any runs, any ranks, jobs without rows or without an adapter,
dropout, and what another job's NaN does (nothing)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, exhaustive, strided
from lorakernels.ops import multi_lora
from lorakernels.ops.dropout import dropped
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import (
    GRADIENT,
    Adapter,
    AdapterTable,
    AdapterTables,
    down,
    gradients,
    mask_of,
    multi_lora_reference,
    up,
)
from lorakernels.runtime import INTERPRET

RUNS = [(1, 70), (0, 3), (3, 1), (1, 130)]  # job 2 has no rows, job 1 two runs
K, N = 72, 41


@pytest.fixture(autouse=True, scope="module")
def short_walks():
    """In the interpreter a program of `gradients` walks down two blocks of rows and not eight: its steps below the last
    row cost as much as the others, and 130 rows are of two programs."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRET:
            patch.setattr(multi_lora, "GRADIENT", (*GRADIENT[:-1], 2))
        yield


def adapters_of(ranks, dtype=torch.float32, device="cpu", dropout=0.0, k=K, n=N):
    """Of None no adapter; scales and dropouts of their own."""
    made = []
    for job, rank in enumerate(ranks):
        if rank is None:
            made.append(None)
            continue
        a, b = torch.randn(rank, k) * k**-0.5, torch.randn(n, rank)
        made.append(Adapter(a.to(device, dtype), b.to(device, dtype), 0.5 + job, dropout * job))
    return made


def draw(rows, width, dtype, device):
    return strided(torch.randn(rows, width).to(device, dtype))


def masked(x, rows, adapters, seeds):
    """dropout(X) by the mask that one adapter has, row for row: the kernel's, or the torch path's where that is taken
    (float32 on a GPU)."""
    out, takes = x.float().clone(), AdapterTable(adapters).takes(x)
    for job in rows.present:
        if adapters[job] is not None and seeds is not None:
            where = rows.of(job).to(x.device)
            own = x[where].contiguous().float()
            if takes:
                out[where] = dropped(own, seeds[job], adapters[job].dropout)
            else:
                out[where] = own * mask_of(rows, job, x.shape[1], adapters[job], seeds, x.device, torch.float32)
    return out


def wanted(x, dy, rows, adapters, seeds):
    """S, dS, dX of the adapters and their dA, dB, in float32."""
    rank, dropped_x = AdapterTable(adapters).rank, masked(x, rows, adapters, seeds)
    s, ds = x.new_zeros(len(x), rank, dtype=torch.float32), x.new_zeros(len(x), rank, dtype=torch.float32)
    y, dx = torch.zeros_like(dy, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    mask = masked(torch.ones_like(x), rows, adapters, seeds)
    da, db = [None] * len(adapters), [None] * len(adapters)
    for job in rows.present:
        if adapters[job] is None:
            continue
        where, (a, b, scale, *_) = rows.of(job).to(x.device), adapters[job]
        s[where, : len(a)] = scale * dropped_x[where] @ a.float().t()
        ds[where, : len(a)] = scale * dy[where].float() @ b.float()
        y[where] = s[where, : len(a)] @ b.float().t()
        dx[where] = mask[where] * (ds[where, : len(a)] @ a.float())
        da[job] = ds[where, : len(a)].t() @ dropped_x[where]
        db[job] = dy[where].float().t() @ s[where, : len(a)]
    return s, ds, y, dx, da, db


def check(runs, ranks, dtype, device, dropout=0.0, k=K, n=N):
    adapters, rows = adapters_of(ranks, dtype, device, dropout, k, n), JobRows(runs, device)
    table = AdapterTable(adapters)
    x, dy = draw(rows.rows, k, dtype, device), draw(rows.rows, n, dtype, device)
    whole = all(rank is None or rank % 8 == 0 for rank in ranks) and k % 8 == 0 and x.element_size() == 2
    assert table.aligned_with(x) == whole
    seeds = torch.arange(7, 7 + len(ranks), device=device) if dropout else None
    s, ds, y, dx, da, db = wanted(x, dy, rows, adapters, seeds)
    got_s = down(x, table, rows, seeds=seeds)
    got_ds = down(dy, table, rows, of_b=True)
    assert_close(got_s, s, dtype, 3)
    assert_close(got_ds, ds, dtype, 3)
    start = draw(rows.rows, n, dtype, device), draw(rows.rows, k, dtype, device)
    out = [t.clone() for t in start]
    up(got_s, table, rows, out[0])
    up(got_ds, table, rows, out[1], of_b=False, seeds=seeds)
    assert_close(out[0], start[0].float() + y, dtype, 4)
    assert_close(out[1], start[1].float() + dx, dtype, 4)
    for found, those in (
        (gradients(x, got_ds, table, rows, seeds=seeds), da),
        (gradients(dy, got_s, table, rows, of_b=True), db),
    ):
        assert [g is None for g in found] == [g is None for g in those]
        for grad, expected in zip(found, those, strict=True):
            if grad is not None:
                assert grad.dtype == torch.float32
                assert_close(grad, expected, dtype, 4)


RANKS = ((2, 70, 5, 130), (None, 16, 8, 1), (3, 16, 8, 1), (None, 8, 3, None), (4, 4, 4, 4), (8, 16, None, 24))
GRID = [(ranks, p, dtype) for ranks in RANKS for p in (0.0, 0.2) for dtype in ("float32", "float16", "bfloat16")]
IN_THE_INTERPRETER = (  # each kind of rank, dtype and dropout once
    ((2, 70, 5, 130), 0.0, "float16"), ((2, 70, 5, 130), 0.2, "float32"),
    ((None, 16, 8, 1), 0.0, "float32"), ((None, 16, 8, 1), 0.2, "float16"),
    ((8, 16, None, 24), 0.0, "float16"),  # all at multiples of 16 bytes
)  # fmt: skip
FAST = IN_THE_INTERPRETER if INTERPRET else [case for case in GRID if case[0] != (4, 4, 4, 4)]


@pytest.mark.parametrize(
    ("ranks", "dropout", "dtype"),
    [case if case in FAST else exhaustive(*case) for case in GRID],
    ids=str,
    indirect=["dtype"],
)
def test_every_product(ranks, dropout, dtype, device):
    check(RUNS, ranks, dtype, device, dropout)


def test_adapters_that_lie_in_an_operand_and_have_columns_of_their_own(dtype, device):
    """As nodes/operand.py has them: A and B are parts of wider rows, and S and dS hold all adapters side by side."""
    compact, rows = adapters_of((3, 16, 8, 1), dtype, device, 0.2), JobRows(RUNS, device)
    column, own = 2, []
    for adapter in compact:
        own.append(Adapter(strided(adapter.a), strided(adapter.b), *adapter[2:4], column))
        column += len(adapter.a) + 1
    one, other = AdapterTable(compact), AdapterTable(own)
    x, seeds = draw(rows.rows, K, dtype, device), torch.arange(4, device=device)
    s = down(x, one, rows, seeds=seeds)
    wide = down(x, other, rows, seeds=seeds, out=torch.full((rows.rows, column), 7.0, dtype=dtype, device=device))
    for job, adapter in enumerate(own):
        where, at = rows.of(job).to(device), slice(adapter.column, adapter.column + len(adapter.a))
        assert torch.equal(wide[where, at], s[where, : len(adapter.a)])
        others = torch.ones(len(where), column, dtype=torch.bool)
        others[:, at] = False
        assert (wide[where].cpu()[others] == 7).all()
    ys = [torch.zeros(rows.rows, N, dtype=dtype, device=device) for _ in range(2)]
    up(s, one, rows, ys[0])
    up(wide, other, rows, ys[1])
    assert torch.equal(*ys)
    for mine, theirs in zip(
        gradients(x, wide, other, rows, seeds=seeds), gradients(x, s, one, rows, seeds=seeds), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_close(mine, theirs, torch.float32, 3)
    with pytest.raises(ValueError, match="need an out"):
        down(x, other, rows, seeds=seeds)


def test_one_job_alone(dtype, device):
    check([(0, 65)], (5,), dtype, device, 0.0)


@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), min_size=1, max_size=6),
    ranks=st.lists(st.one_of(st.none(), st.integers(1, 70)), min_size=5, max_size=5),
    k=st.integers(1, 40), n=st.integers(1, 40), dropout=st.sampled_from([0.0, 0.2]),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=6 if INTERPRET else 12, deadline=None)
def test_any_runs_and_ranks(runs, ranks, k, n, dropout, dtype, seed):
    torch.manual_seed(seed)
    if any(ranks):
        check(runs, ranks, dtype, "cpu", dropout, k, n)


def test_the_reference_is_what_the_products_make(device):
    adapters, rows = adapters_of((3, 16, 8, 1), device=device, dropout=0.2), JobRows(RUNS, device)
    x, seeds = draw(rows.rows, K, torch.float32, device), torch.arange(4, device=device)
    y = torch.zeros(rows.rows, N, device=device)
    table = AdapterTable(adapters)
    if table.takes(x):
        pytest.skip("the reference has the torch path's masks")
    up(down(x, table, rows, seeds=seeds), table, rows, y)
    assert_close(y, multi_lora_reference(x, adapters, rows, seeds), torch.float32, 3)


def test_a_nan_stays_with_its_own_job(device, dtype):
    ranks = (3, 16, 8, 1)

    def run(spoil):
        torch.manual_seed(1)
        adapters, rows = adapters_of(ranks, dtype, device), JobRows(RUNS, device)
        table = AdapterTable(adapters)
        x, dy = draw(rows.rows, K, dtype, device), draw(rows.rows, N, dtype, device)
        if spoil:
            for tensor in (adapters[1].a, adapters[1].b, adapters[2].a, adapters[2].b):
                tensor.fill_(float("nan"))
            for wide in (x, dy):
                wide[rows.of(1).to(device)] = float("nan")
        s, ds = down(x, table, rows), down(dy, table, rows, of_b=True)
        y, dx = (torch.zeros(rows.rows, w, dtype=dtype, device=device) for w in (N, K))
        up(s, table, rows, y)
        up(ds, table, rows, dx, of_b=False)
        found = [*gradients(x, ds, table, rows), *gradients(dy, s, table, rows, of_b=True)]
        others = torch.cat([rows.of(job) for job in (0, 3)]).to(device)
        mine = rows.of(1).to(device)
        assert not spoil or (y[mine].isnan().all() and dx[mine].isnan().all() and found[1].isnan().any())
        return [t[others] for t in (s, ds, y, dx)], [found[job] for job in (0, 3, 4, 7)]

    for usual, spoilt in zip(run(False), run(True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(usual, spoilt, strict=True))


def test_dropout_is_the_same_in_any_company(device, dtype):
    """The mask goes by the row's number among its job's rows: alone, beside others, and in two runs. Of whole numbers,
    whose sums are the same in any order: in which a row is added up may depend on its place in a tile."""
    whole = lambda *shape: torch.randint(-3, 4, shape).to(device, dtype)  # noqa: E731
    adapter = Adapter(whole(4, K), whole(N, 4), 0.5, dropout=0.4)
    x, seeds = whole(60, K), torch.tensor([3, 5], device=device)
    alone = down(x, AdapterTable([adapter]), JobRows([(0, 60)], device), seeds=seeds[:1])
    others = whole(33, K)
    mixed = torch.cat([others[:10], x[:25], others[10:], x[25:]])
    rows = JobRows([(1, 10), (0, 25), (1, 23), (0, 35)], device)
    both = down(mixed, AdapterTable([adapter, adapter]), rows, seeds=seeds)
    assert torch.equal(both[rows.of(0).to(device)], alone)


def test_a_table_is_kept_until_an_adapter_is_another(device):
    adapters, tables = adapters_of((3, None, 2), device=device), AdapterTables()
    table = tables.of(adapters)
    adapters[0].a.mul_(2)  # trained in place: found where it was
    assert tables.of(list(adapters)) is table and table.on_device() is table.on_device()
    other = tables.of([adapters[0]._replace(scale=9.0), None, adapters[2]])
    assert other is not table and float(other.on_device()[1][0, 0]) == 9.0
    assert tables.of([adapters[0]._replace(a=adapters[0].a.clone()), None, adapters[2]]) is not table
    assert tables.of(adapters) is table


def test_rows_by_runs_and_by_row():
    rows = JobRows.each([1, 1, 0, 1, 1, 1])
    assert rows.runs == [(1, 2), (0, 1), (1, 3)] and rows.rows == 6 and rows.present == (0, 1)
    assert rows.of(1).tolist() == [0, 1, 3, 4, 5] and rows.of(7).tolist() == []
    assert rows.programs(2).tolist() == [[0, 2, 1, 0], [2, 3, 0, 0], [3, 6, 1, 2], [5, 6, 1, 4]]
    assert rows.programs(2) is rows.programs(2)
    assert JobRows([(0, 0)]).programs(64).shape == (0, 4)


def test_what_does_not_fit():
    adapters, rows = adapters_of((3, 4)), JobRows([(0, 5)])
    table = AdapterTable(adapters)
    with pytest.raises(ValueError, match="the jobs have 5 rows"):
        down(torch.zeros(6, K), table, rows)
    with pytest.raises(ValueError, match=f"of a width of {K}"):
        down(torch.zeros(5, K + 1), table, rows)
    with pytest.raises(ValueError, match="a row is of job 2; expected one of the 2 from 0"):
        down(torch.zeros(1, K), table, JobRows([(2, 1)]))
    with pytest.raises(ValueError, match="does not fit a linear of 72 inputs and 41 outputs"):
        AdapterTable([adapters[0], adapters[1]._replace(b=torch.zeros(N + 1, 4))])
    with pytest.raises(ValueError, match="below 0"):
        JobRows([(-1, 4)])
    with pytest.raises(ValueError, match="no job has an adapter"):
        AdapterTable([None])
