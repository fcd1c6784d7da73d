"""Each row's own columns of S and dS, sS beside them, dB and dA, and the activation's forms with them: any runs, ranks
and linears, against float32."""

import itertools

import pytest
import torch
from kernel_checks import DTYPES, assert_close, exhaustive, strided
from lorakernels.ops.concat_operand import LoraColumns, ScaledS
from lorakernels.ops.glu import (
    WHOLE_TILES,
    GluBackward,
    OwnOfMLP,
    activation,
    activation_slope,
    backward_whole_into,
    forward_lora_into,
    own_whole_fits,
)
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.lora_grad import DS_DB_TILES, AdapterColumns, ds_and_db, fitting_tiles
from lorakernels.ops.own_columns import A_TILES, TILES, LinearColumns, Own, OwnColumns, own_a_gradients, own_s, takes
from lorakernels.ops.rms_norm import Norm, NormFactors
from lorakernels.runtime import TILES as FORWARD_TILES

RUNS = [(1, 70), (0, 3), (3, 1), (1, 30)]  # job 2 has no rows, job 1 two runs
K, WIDTHS, SPARE = 72, (128, 64), 4  # of two linears over one X; the second has spare columns behind it
PAD = 3  # of X, dY and A behind each row, and of S on either side
# As a model has them: whole units of eight throughout, and several tiles in each direction.
LARGE = {"RUNS": [(1, 700), (0, 3), (3, 1), (1, 130)], "K": 1024, "WIDTHS": (512, 256), "SPARE": 8, "PAD": 16}
RANKS = (3, 16, 8, 1)
RANKED = [RANKS, (8, 16, 8, 24), exhaustive((2, 70, 5, 130)), (0, 8, 3, 0)]


def places(ranks, device, widths=None):
    """Linears whose jobs lie side by side; a rank of 0: no adapter."""
    linears, column, widths = [], 0, widths or WIDTHS
    for i in range(len(widths)):
        jobs, first = [], column
        for rank in ranks:
            jobs.append((column, rank))
            column += rank
        linears.append(LinearColumns(slice(first, column + SPARE * (i == len(widths) - 1)), jobs))
    return Own(OwnColumns(linears, torch.device(device)), JobRows(RUNS, device)), column + SPARE


def with_rows(own, widths=None):
    """Each linear with its rows of sB, which are its columns of Y."""
    widths = widths or WIDTHS
    ends = list(itertools.accumulate(widths))
    return [(one, slice(end - width, end)) for one, width, end in zip(own.columns.linears, widths, ends, strict=True)]


def keep(p, own, device):
    """(M, p): which columns are a row's own."""
    mask = torch.zeros(own.rows.rows, p, dtype=torch.bool)
    for linear, job in itertools.product(own.columns.linears, own.rows.present):
        column, rank = linear.jobs[job]
        mask[own.rows.of(job), column : column + rank] = True
    return mask.to(device)


def inputs(ranks, dtype, device):
    own, p = places(ranks, device)
    shapes = (own.rows.rows, K), (own.rows.rows, sum(WIDTHS)), (p, K), (sum(WIDTHS), p)
    x, dy, a, sb = (strided(torch.randn(*shape).to(device, dtype), PAD) for shape in shapes)
    if not takes(a, x):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")
    for linear, at in with_rows(own):  # block-diagonal, as the operand has it
        others = torch.ones(len(sb), dtype=torch.bool)
        others[at] = False
        sb[others, linear.columns] = 0
    return own, p, [x, dy, a, sb]


def poisoned(m, p, dtype, device):
    """S behind X, and sS, each full of what must not stay."""
    s = torch.full((m, PAD + p + PAD), float("nan"), dtype=dtype, device=device)[:, PAD : PAD + p]
    return s, ScaledS(torch.full((m, p), float("nan"), dtype=dtype, device=device), torch.rand(p, device=device) + 0.5)


@pytest.mark.parametrize("tiles", zip(TILES, A_TILES, strict=True), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKED, ids=str)
def test_each_row_makes_its_own_columns(device, ranks, dtype, tiles):
    torch.manual_seed(1)
    own, p, (x, _, a, _) = inputs(ranks, dtype, device)
    mine = keep(p, own, device)
    s, scaled_s = poisoned(len(x), p, dtype, device)
    own_s(x, a, own, s, scaled_s, tiles[0])
    wanted = (x.float() @ a.float().t()).masked_fill(~mine, 0)
    for made, expected in ((s, wanted), (scaled_s.out, wanted * scaled_s.scales)):
        assert_close(made, expected, dtype, 3)
        assert not made[~mine].any()
    ds = torch.randn(len(x), p).to(device, dtype).masked_fill(~mine, 0)
    da = torch.full((p, K), 0.5, device=device)
    own_a_gradients(x, ds, own, da, tiles[1])
    assert_close(da - 0.5, ds.float().t() @ x.float(), dtype, 4)


@pytest.mark.parametrize("tile", DS_DB_TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [RANKS, exhaustive((8, 16, 8, 24)), (0, 8, 3, 0)], ids=str)
def test_ds_and_db_of_each_row_s_own_columns(device, ranks, dtype, tile):
    torch.manual_seed(3)
    own, p, (_, dy, _, sb) = inputs(ranks, dtype, device)
    mine, total = keep(p, own, device), sum(ranks)
    if tile not in fitting_tiles(dy, list(WIDTHS), [own.columns.rank] * 2):
        pytest.skip("members that end inside a tile")
    ds, _ = poisoned(len(dy), p, dtype, device)
    scaled_s = torch.randn(len(dy), p).to(device, dtype).masked_fill(~mine, 0)
    db = ds_and_db(dy, ds, AdapterColumns(sb, scaled_s, list(WIDTHS), total, own), tile)
    assert_close(ds, (dy.float() @ sb.float()).masked_fill(~mine, 0), dtype, 3)
    assert not ds[~mine].any()
    for i, (_, at) in enumerate(with_rows(own)):
        columns = slice(i * total, (i + 1) * total)
        assert_close(db[at], dy[:, at].float().t() @ scaled_s[:, columns].float(), torch.float32, 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [RANKS, exhaustive((8, 16, 8, 24)), (0, 8, 3, 0)], ids=str)
def test_the_activation_with_each_row_s_own_columns(device, ranks, dtype):
    """[h | S] of the down projection forward; backward dA of it, and dS and dB of gate and up."""
    torch.manual_seed(4)
    n, act, total = WIDTHS[0], "silu", sum(ranks)
    (gate_up, p), (down, q) = places(ranks, device, (n, n)), places(ranks, device, (K,))
    m = gate_up.rows.rows
    gate, up, dh = (strided(torch.randn(m, n).to(device, dtype), PAD) for _ in range(3))
    a, sb = torch.randn(q, n).to(device, dtype), torch.zeros(2 * n, p, dtype=dtype, device=device)
    if not own_whole_fits(OwnOfMLP(gate_up, down), gate, [n] * 2, [n] * 2):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")
    g, u, d = gate.float(), up.float(), dh.float()
    h = (activation(g, act) * u).to(dtype)
    for tile in FORWARD_TILES:
        mine, scales = keep(q, down, device), torch.rand(q, device=device) + 0.5
        packed = torch.full((m, n + q), float("nan"), dtype=dtype, device=device)
        scaled_s = ScaledS(torch.full((m, q), float("nan"), dtype=dtype, device=device), scales)
        forward_lora_into(gate, up, packed, LoraColumns(a, total, scaled_s), act, tile, down)
        assert_close(packed[:, :n], h, dtype, 2)
        wanted = (h.float() @ a.float().t()).masked_fill(~mine, 0)
        assert_close(packed[:, n:], wanted, dtype, 4)
        assert_close(scaled_s.out, wanted * scales, dtype, 4)
        assert not packed[:, n:][~mine].any() and not scaled_s.out[~mine].any()
    mine = keep(p, gate_up, device)
    for linear, at in with_rows(gate_up, (n, n)):
        sb[at, linear.columns] = torch.randn(n, linear.columns.stop - linear.columns.start).to(device, dtype)
    scaled_s = torch.randn(m, p).to(device, dtype).masked_fill(~mine, 0)
    ds = torch.randn(m, total).to(device, dtype).masked_fill(~keep(q, down, device)[:, :total], 0)
    parts = [(d * u * activation_slope(g, act)).to(dtype), (d * activation(g, act)).to(dtype)]
    for tile in WHOLE_TILES:
        wide = torch.full((m, 2 * n + p), float("nan"), dtype=dtype, device=device)
        own = OwnOfMLP(gate_up, down)
        da, db = backward_whole_into(GluBackward(gate, up, dh, act), wide, ds, sb, scaled_s, tile, own=own)
        dy = torch.cat(parts, 1)
        assert_close(wide[:, : 2 * n], dy, dtype, 2)
        assert_close(wide[:, 2 * n :], (dy.float() @ sb.float()).masked_fill(~mine, 0), dtype, 4)
        assert_close(da, ds.float().t() @ h.float(), dtype, 4)
        for i, part in enumerate(parts):
            of_linear = scaled_s[:, i * total : (i + 1) * total].float()
            assert_close(db[i * n : (i + 1) * n], part.float().t() @ of_linear, dtype, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(16,) * 8, (8, 16, 8, 24)], ids=str)
def test_all_of_it_in_a_model_s_shapes(monkeypatch, ranks):
    """Ten times: a race between a copy ahead and a product that still reads its buffer need not show at once."""
    for name, value in LARGE.items():
        monkeypatch.setitem(globals(), name, value)
    own, _ = places(ranks, "cuda")
    assert own.columns.aligned
    for _ in range(10):
        for tiles in zip(TILES, A_TILES, strict=True):
            test_each_row_makes_its_own_columns("cuda", ranks, torch.bfloat16, tiles)
        for tile in DS_DB_TILES:
            test_ds_and_db_of_each_row_s_own_columns("cuda", ranks, torch.bfloat16, tile)
        test_the_activation_with_each_row_s_own_columns("cuda", ranks, torch.bfloat16)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_da_behind_a_norm_is_made_of_what_the_norm_read(device, dtype, offset):
    torch.manual_seed(2)
    own, p, (h, *_) = inputs(RANKS, dtype, device)
    ds, weight = torch.randn(len(h), p).to(device, dtype), torch.randn(K).to(device, dtype)
    ds[~keep(p, own, device)] = 0
    factors = NormFactors(torch.rand(len(h), device=device) + 0.5, weight, Norm(1e-6, offset))
    for tile in A_TILES:
        da = torch.zeros(p, K, device=device)
        own_a_gradients(h, ds, own, da, tile, factors)
        x = h.float() * factors.rstd[:, None] * (weight.float() + offset)
        assert_close(da, ds.float().t() @ x, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_with_its_own_job(device, dtype):
    own, p, (x, dy, a, sb) = inputs(RANKS, dtype, device)
    one = own.rows.of(1).to(device)
    theirs = [slice(jobs[1][0], sum(jobs[1])) for _, jobs in own.columns.linears]
    for columns in theirs:
        a[columns] = float("nan")
        sb[:, columns] = float("nan")
    for wide in (x, dy):
        wide[one] = float("nan")
    (s, scaled_s), (ds, _) = poisoned(len(x), p, dtype, device), poisoned(len(x), p, dtype, device)
    da = torch.zeros(p, K, device=device)
    own_s(x, a, own, s, scaled_s)
    db = ds_and_db(dy, ds, AdapterColumns(sb, scaled_s.out, list(WIDTHS), sum(RANKS), own), "one_read_small")
    own_a_gradients(x, ds, own, da)
    for columns, (linear, at) in zip(theirs, with_rows(own), strict=True):
        for made in (s, scaled_s.out, ds):
            assert made[one, columns].isnan().all()
            made[one, columns] = 0
        assert da[columns].isnan().all()
        da[columns] = 0
        of_b = db[at, columns.start - linear.columns.start : columns.stop - linear.columns.start]
        assert of_b.isnan().all()
        of_b.zero_()
    assert all(made.isfinite().all() for made in (s, scaled_s.out, ds, da, db))


def test_the_input_of_a_norm_may_be_wider_than_ds(device):
    own, p = places(RANKS, device)
    x = strided(torch.randn(own.rows.rows, K).to(device), PAD)
    ds = torch.randn(len(x), p).to(device, torch.float16)
    if not takes(ds, ds):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")
    ds[~keep(p, own, device)] = 0
    da = torch.zeros(p, K, device=device)
    own_a_gradients(x, ds, own, da)
    assert_close(da, ds.float().t() @ x.half().float(), torch.float16, 4)


def test_what_does_not_fit():
    own, p = places(RANKS, "cpu")
    x, dy, a, sb = (torch.zeros(*s) for s in ((104, K), (104, sum(WIDTHS)), (p, K), (sum(WIDTHS), p)))
    (s, scaled_s), db = poisoned(104, p, torch.float32, "cpu"), torch.zeros(sum(WIDTHS), p)
    with pytest.raises(ValueError, match="the jobs have 104 rows"):
        own_s(x[:9], a, own, s, scaled_s)
    with pytest.raises(ValueError, match="X, A and S do not fit"):
        own_s(x[:, :-1], a, own, s, scaled_s)
    with pytest.raises(ValueError, match="S and sS do not fit"):
        own_s(x, a, own, s, ScaledS(scaled_s.out[:, 1:], scaled_s.scales))
    with pytest.raises(ValueError, match=f"S has no {p} columns"):
        own_s(x, a[1:], own, s[:, 1:], ScaledS(scaled_s.out[:, 1:], scaled_s.scales))
    with pytest.raises(ValueError, match="a row is of job 4; expected one of the 4 from 0"):
        own_s(x, a, own._replace(rows=JobRows([(4, 104)])), s, scaled_s)
    with pytest.raises(ValueError, match="the jobs have 104 rows"):
        ds_and_db(dy[:9], s[:9], AdapterColumns(sb, scaled_s.out[:9], list(WIDTHS), sum(RANKS), own))
    with pytest.raises(ValueError, match="dA and X do not fit 56 columns of dS"):
        own_a_gradients(x, s, own, db)
