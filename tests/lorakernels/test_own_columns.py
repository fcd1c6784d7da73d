"""Each row's own columns of S and dS, sS beside them, dB and dA: any runs, ranks and places, against float32."""

import pytest
import torch
from kernel_checks import DTYPES, assert_close, exhaustive, strided
from lorakernels.ops.concat_operand import ScaledS
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, AdapterTable, add_a_gradients
from lorakernels.ops.own_columns import TILES, own_ds_and_db, own_s
from lorakernels.runtime import INTERPRET

RUNS = [(1, 70), (0, 3), (3, 1), (1, 30)]  # job 2 has no rows, job 1 two runs
K, N, FIRST, SPARE = 72, 40, 5, 4
RANKS = (3, 16, 8, 1)
RANKED = [RANKS, exhaustive((2, 70, 5, 130)), (None, 8, 3, None)]


def slots(ranks, dtype, device):
    """Adapters side by side from column FIRST on, as they lie in an operand, and their columns with the spare ones."""
    adapters, column = [], FIRST
    for job, rank in enumerate(ranks):
        if rank is None:
            adapters.append(None)
            continue
        a, b = (strided(torch.randn(*shape).to(device, dtype)) for shape in ((rank, K), (N, rank)))
        adapters.append(Adapter(a, b, 1.0 + job, 0.0, column))
        column += rank
    return adapters, slice(FIRST, column + SPARE)


def wanted(wide, adapters, rows, p, of_b):
    """scale · wide · (Aᵀ or B) in each row's own columns, zero in the others."""
    s = torch.zeros(len(wide), p, device=wide.device)
    for job in rows.present:
        if (own := adapters[job]) is not None:
            where, matrix = rows.of(job).to(wide.device), own.b if of_b else own.a.t()
            s[where, own.column : own.column + len(own.a)] = own.scale * wide[where].float() @ matrix.float()
    return s


@pytest.mark.parametrize("tile", list(TILES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKED, ids=str)
def test_each_row_makes_its_own_columns(device, ranks, dtype, tile):
    torch.manual_seed(1)
    (adapters, columns), rows = slots(ranks, dtype, device), JobRows(RUNS, device)
    table, p, nan = AdapterTable(adapters), columns.stop + 3, float("nan")
    x, dy = (strided(torch.randn(rows.rows, width).to(device, dtype)) for width in (K, N))
    scales = torch.rand(p, device=device) + 0.5
    s, ds = (torch.full((rows.rows, p + 7), nan, dtype=dtype, device=device)[:, :p] for _ in range(2))
    scaled_s = ScaledS(torch.full((rows.rows, p), nan, dtype=dtype, device=device), scales)
    own_s(x, table, rows, s, scaled_s, columns, tile)
    found, theirs = wanted(x, adapters, rows, p, False), torch.arange(p, device=device)
    inside = (theirs >= columns.start) & (theirs < columns.stop)
    for made, expected in ((s, found), (scaled_s.out, found * scales)):
        assert_close(made[:, inside], expected[:, inside], dtype, 3)
        assert made[:, ~inside].isnan().all()  # the columns of other linears
        assert ((made != 0) == (expected != 0))[:, inside].float().mean() > 0.99
        assert not made[:, inside][expected[:, inside] == 0].any()
    db = torch.full((N, columns.stop - columns.start), 0.5, device=device)
    own_ds_and_db(dy, table, rows, ds, scaled_s.out, db, columns, tile)
    expected = wanted(dy, adapters, rows, p, True)
    assert_close(ds[:, inside], expected[:, inside], dtype, 3)
    assert ds[:, ~inside].isnan().all() and not ds[:, inside][expected[:, inside] == 0].any()
    assert_close(db - 0.5, dy.float().t() @ scaled_s.out[:, inside].float(), dtype, 4)
    da, narrow = torch.full((p, K), 0.5, device=device), torch.where(inside, ds, 0)
    add_a_gradients(x, narrow, table, rows, da)
    assert_close(da - 0.5, narrow.float().t() @ x.float(), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row_s_own_columns(device, dtype):
    (adapters, columns), rows = slots(RANKS, dtype, device), JobRows(RUNS, device)
    adapters[1].a.fill_(float("nan"))
    adapters[1].b.fill_(float("nan"))
    table, scales = AdapterTable(adapters), torch.ones(columns.stop, device=device)
    x, dy = torch.randn(rows.rows, K).to(device, dtype), torch.randn(rows.rows, N).to(device, dtype)
    s, ds = (torch.empty(rows.rows, columns.stop, dtype=dtype, device=device) for _ in range(2))
    scaled_s, db = ScaledS(torch.empty_like(s), scales), torch.zeros(N, columns.stop - FIRST, device=device)
    own_s(x, table, rows, s, scaled_s, columns)
    own_ds_and_db(dy, table, rows, ds, scaled_s.out, db, columns)
    one, mine = rows.of(1).to(device), slice(adapters[1].column, adapters[2].column)
    for made in (s, ds):
        assert made[one, mine].isnan().all()
        made[one, mine] = 0
        assert made[:, FIRST:].isfinite().all()
    db[:, mine.start - FIRST : mine.stop - FIRST] = 0
    assert db.isfinite().all()


def test_what_does_not_fit():
    (adapters, columns), rows = slots(RANKS, torch.float32, "cpu"), JobRows([(0, 5)])
    table, s = AdapterTable(adapters), torch.zeros(5, columns.stop)
    scaled_s = ScaledS(torch.zeros_like(s), torch.ones(columns.stop))
    x, dy, db = torch.zeros(5, K), torch.zeros(5, N), torch.zeros(N, columns.stop)
    with pytest.raises(ValueError, match="an adapter does not lie in the columns 6 to"):
        own_s(x, table, rows, s, scaled_s, slice(6, columns.stop))
    with pytest.raises(ValueError, match="S and sS do not fit"):
        own_s(x, table, rows, s[:4], scaled_s, columns)
    with pytest.raises(ValueError, match="the jobs have 5 rows"):
        own_s(torch.zeros(6, K), table, rows, s, scaled_s, columns)
    with pytest.raises(ValueError, match=f"of a width of {N}"):
        own_ds_and_db(x, table, rows, s, scaled_s.out, db, columns)
    with pytest.raises(ValueError, match="dB does not fit"):
        own_ds_and_db(dy, table, rows, s, scaled_s.out, db[:, :3], columns)
    with pytest.raises(ValueError, match="dA and dS do not fit"):
        add_a_gradients(x, s, table, rows, db)


@pytest.mark.skipif(not INTERPRET, reason="asks what the kernel takes, which it never does here")
def test_the_kernel_is_what_ran(device, monkeypatch):
    from lorakernels.ops import own_columns

    calls, launch = [], own_columns._launch
    monkeypatch.setattr(own_columns, "_launch", lambda *given: (calls.append(given[-1]), launch(*given)))
    test_each_row_makes_its_own_columns(device, RANKS, torch.float16, "own_small")
    assert calls == ["own_small"] * 2
