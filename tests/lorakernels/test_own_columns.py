"""Each row's own columns of S and dS, sS beside them, dB and dA: any runs, ranks and linears, against float32."""

import pytest
import torch
from kernel_checks import DTYPES, assert_close, exhaustive, strided
from lorakernels.ops import own_columns
from lorakernels.ops.concat_operand import ScaledS
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.own_columns import (
    A_TILES,
    TILES,
    LinearColumns,
    OwnColumns,
    own_a_gradients,
    own_ds_and_db,
    own_s,
)
from lorakernels.ops.rms_norm import Norm, NormFactors
from lorakernels.runtime import INTERPRET

RUNS = [(1, 70), (0, 3), (3, 1), (1, 30)]  # job 2 has no rows, job 1 two runs
K, WIDTHS, SPARE = 72, (40, 24), 4  # of two linears over one X; the second has spare columns behind it
RANKS = (3, 16, 8, 1)
RANKED = [RANKS, (8, 16, 8, 24), exhaustive((2, 70, 5, 130)), (0, 8, 3, 0)]


def places(ranks, device):
    """Two linears, whose jobs lie side by side; a rank of 0: no adapter."""
    linears, column, row = [], 0, 0
    for i, width in enumerate(WIDTHS):
        jobs, first = [], column
        for rank in ranks:
            jobs.append((column, rank))
            column += rank
        linears.append(LinearColumns(slice(first, column + SPARE * i), slice(row, row + width), jobs))
        row += width
    return OwnColumns(linears, torch.device(device)), column + SPARE


def keep(p, own, rows, device):
    """(M, p): which columns are a row's own."""
    mask = torch.zeros(rows.rows, p, dtype=torch.bool)
    for _, where, columns in own.each(rows):
        mask[where, columns] = True
    return mask.to(device)


def inputs(ranks, dtype, device):
    (own, p), rows = places(ranks, device), JobRows(RUNS, device)
    shapes = (rows.rows, K), (rows.rows, sum(WIDTHS)), (p, K), (sum(WIDTHS), p)
    return own, rows, p, [strided(torch.randn(*shape).to(device, dtype)) for shape in shapes]


def poisoned(m, p, dtype, device):
    """S behind X, and sS, each full of what must not stay."""
    s = torch.full((m, 5 + p + 2), float("nan"), dtype=dtype, device=device)[:, 5 : 5 + p]
    return s, ScaledS(torch.full((m, p), float("nan"), dtype=dtype, device=device), torch.rand(p, device=device) + 0.5)


@pytest.mark.parametrize("tiles", zip(TILES, A_TILES, strict=True), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKED, ids=str)
def test_each_row_makes_its_own_columns(device, ranks, dtype, tiles):
    torch.manual_seed(1)
    own, rows, p, (x, dy, a, sb) = inputs(ranks, dtype, device)
    mine = keep(p, own, rows, device)
    s, scaled_s = poisoned(rows.rows, p, dtype, device)
    ds, _ = poisoned(rows.rows, p, dtype, device)
    own_s(x, a, own, rows, s, scaled_s, tiles[0])
    wanted = (x.float() @ a.float().t()).masked_fill(~mine, 0)
    for made, expected in ((s, wanted), (scaled_s.out, wanted * scaled_s.scales)):
        assert_close(made, expected, dtype, 3)
        assert not made[~mine].any()
    db = torch.full((sum(WIDTHS), max(len(range(p)[one.columns]) for one in own.linears)), 0.5, device=device)
    own_ds_and_db(dy, sb, own, rows, ds, scaled_s.out, db, tiles[0])
    for linear in own.linears:
        at, part = linear.columns, dy[:, linear.rows].float()
        expected = (part @ sb[linear.rows, at].float()).masked_fill(~mine[:, at], 0)
        assert_close(ds[:, at], expected, dtype, 3)
        assert not ds[:, at][~mine[:, at]].any()
        columns = at.stop - at.start
        assert_close(db[linear.rows, :columns] - 0.5, part.t() @ scaled_s.out[:, at].float(), dtype, 4)
        assert (db[linear.rows, columns:] == 0.5).all()
    da = torch.full((p, K), 0.5, device=device)
    own_a_gradients(x, ds, own, rows, da, tiles[1])
    assert_close(da - 0.5, ds.float().t() @ x.float(), dtype, 4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_da_behind_a_norm_is_made_of_what_the_norm_read(device, dtype, offset):
    torch.manual_seed(2)
    own, rows, p, (h, *_) = inputs(RANKS, dtype, device)
    ds, weight = torch.randn(rows.rows, p).to(device, dtype), torch.randn(K).to(device, dtype)
    ds[~keep(p, own, rows, device)] = 0
    factors = NormFactors(torch.rand(rows.rows, device=device) + 0.5, weight, Norm(1e-6, offset))
    for tile in A_TILES:
        da = torch.zeros(p, K, device=device)
        own_a_gradients(h, ds, own, rows, da, tile, factors)
        x = h.float() * factors.rstd[:, None] * (weight.float() + offset)
        assert_close(da, ds.float().t() @ x, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_with_its_own_job(device, dtype):
    own, rows, p, (x, dy, a, sb) = inputs(RANKS, dtype, device)
    one = rows.of(1).to(device)
    theirs = [slice(jobs[1][0], sum(jobs[1])) for _, _, jobs in own.linears]
    for columns in theirs:
        a[columns] = float("nan")
        sb[:, columns] = float("nan")
    for wide in (x, dy):
        wide[one] = float("nan")
    (s, scaled_s), (ds, _) = poisoned(rows.rows, p, dtype, device), poisoned(rows.rows, p, dtype, device)
    db, da = torch.zeros(sum(WIDTHS), p, device=device), torch.zeros(p, K, device=device)
    own_s(x, a, own, rows, s, scaled_s)
    own_ds_and_db(dy, sb, own, rows, ds, scaled_s.out, db)
    own_a_gradients(x, ds, own, rows, da)
    for columns, linear in zip(theirs, own.linears, strict=True):
        for made in (s, scaled_s.out, ds):
            assert made[one, columns].isnan().all()
            made[one, columns] = 0
        assert da[columns].isnan().all()
        da[columns] = 0
        of_b = db[linear.rows, columns.start - linear.columns.start : columns.stop - linear.columns.start]
        assert of_b.isnan().all()
        of_b.zero_()
    assert all(made.isfinite().all() for made in (s, scaled_s.out, ds, da, db))


def test_the_input_of_a_norm_may_be_wider_than_ds(device):
    own, rows, p, (x, *_) = inputs(RANKS, torch.float32, device)
    ds = torch.randn(rows.rows, p).to(device, torch.float16)
    ds[~keep(p, own, rows, device)] = 0
    da = torch.zeros(p, K, device=device)
    own_a_gradients(x, ds, own, rows, da)
    assert_close(da, ds.float().t() @ x.half().float(), torch.float16, 4)


def test_what_does_not_fit():
    own, rows, p, (x, dy, a, sb) = inputs(RANKS, torch.float32, "cpu")
    (s, scaled_s), db = poisoned(rows.rows, p, torch.float32, "cpu"), torch.zeros(sum(WIDTHS), p)
    with pytest.raises(ValueError, match="the jobs have 104 rows"):
        own_s(x[:9], a, own, rows, s, scaled_s)
    with pytest.raises(ValueError, match="X, A and S do not fit"):
        own_s(x[:, :-1], a, own, rows, s, scaled_s)
    with pytest.raises(ValueError, match="S and sS do not fit"):
        own_s(x, a, own, rows, s, ScaledS(scaled_s.out[:, 1:], scaled_s.scales))
    with pytest.raises(ValueError, match=f"S has no {p} columns"):
        own_s(x, a[1:], own, rows, s[:, 1:], scaled_s)
    with pytest.raises(ValueError, match="a row is of job 4; expected one of the 4 from 0"):
        own_s(x, a, own, JobRows([(4, 104)]), s, scaled_s)
    with pytest.raises(ValueError, match="dY, sB, dS and dB do not fit 64 columns"):
        own_ds_and_db(x, sb, own, rows, s, scaled_s.out, db)
    with pytest.raises(ValueError, match="dB has no room for 28 columns"):
        own_ds_and_db(dy, sb, own, rows, s, scaled_s.out, db[:, :27])
    with pytest.raises(ValueError, match="dA and X do not fit 56 columns of dS"):
        own_a_gradients(x, s, own, rows, db)


@pytest.mark.skipif(not INTERPRET, reason="asks what the kernel takes, which it never does here")
def test_the_kernels_are_what_ran(device, monkeypatch):
    ran = []
    for name in ("_own_columns_kernel", "_own_a_kernel"):
        kernel = getattr(own_columns, name)
        counted = type("Counted", (), {"__getitem__": lambda _, grid, k=kernel, n=name: ran.append(n) or k[grid]})()
        monkeypatch.setattr(own_columns, name, counted)
    test_each_row_makes_its_own_columns(device, RANKS, torch.float16, ("own_small", "own_short"))
    assert ran == ["_own_columns_kernel"] * 2 + ["_own_a_kernel"]
