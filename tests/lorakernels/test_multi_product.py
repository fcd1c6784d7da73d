"""The frozen product with each row's own adapter in it, against float32: any runs, any ranks, several linears in one
weight, dropout, and what another job's NaN does (nothing)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, poisoned, strided
from lorakernels.ops import multi_product as module
from lorakernels.ops.dropout import dropped
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.multi_lora import Adapter, AdapterTable
from lorakernels.ops.multi_product import TILES, multi_product, multi_product_reference, takes
from lorakernels.runtime import INTERPRET

RUNS = [(1, 70), (0, 3), (3, 1), (1, 66)]  # job 2 has no rows, job 1 two runs; 140 rows are five tiles of 32
RANKS = (2, 64, 5, 17), (None, 16, 8, 1)  # of two linears
WHOLE = (8, 64, 16, 24), (None, 16, 8, 8)  # all at multiples of 16 bytes
K, WIDTHS = 72, (40, 24)


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """In the interpreter a tile is small, so that small shapes have several in each direction."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRET:
            patch.setattr(module, "TILES", {"tail": (32, 32, 32, 4, 1), "tail_small": (32, 16, 16, 4, 1)})
            patch.setattr(module, "DROPPED", (32, 16, 32, 4, 1))
            patch.setattr(module, "GROUP", 2)
        yield


class Case:
    """A weight of several linears, their adapters with S and dS side by side, and rows; aligned as TMA wants them."""

    def __init__(self, runs, ranks, dtype, device="cpu", dropout=0.0, k=K, widths=WIDTHS):
        def new(*shape):
            return strided((torch.randn(*shape) * shape[-1] ** -0.5).to(device, dtype), 8)

        self.rows, self.dtype, self.device, self.k, self.n = JobRows(runs, device), dtype, device, k, sum(widths)
        self.tables, column = [], 8 if ranks == WHOLE else 1
        for own, n in zip(ranks, widths, strict=True):
            adapters: list[Adapter | None] = []
            for job, rank in enumerate(own):
                both = rank and Adapter(new(rank, k), new(n, rank), 0.5 + job, dropout * (job % 3), column)
                adapters.append(both or None)
                column += rank or 0
            self.tables.append(AdapterTable(adapters))
        m = self.rows.rows
        self.x, self.dy, self.w, self.s = new(m, k), new(m, self.n), new(self.n, k), new(m, column + 2)
        self.seeds = torch.arange(7, 7 + sum(map(len, ranks)), device=device) if dropout else None

    def run(self, of_b=True, tile="tail", **more):
        seeds = None if of_b else self.seeds
        wide = self.x if of_b else self.dy
        tile = tile if self.takes(wide) else None
        return multi_product(wide, self.w, self.s, self.tables, self.rows, tile, of_b=of_b, seeds=seeds, **more)

    def takes(self, wide):
        return takes(wide, self.w, max(table.rank for table in self.tables), [table.n for table in self.tables])

    def wanted(self, of_b=True):
        if of_b or self.seeds is None or not self.takes(self.dy):
            seeds = None if of_b else self.seeds
            wide = self.x if of_b else self.dy
            return multi_product_reference(wide, self.w, self.s, self.tables, self.rows, of_b=of_b, seeds=seeds)
        dx = self.dy.float() @ self.w.float()  # by the kernels' masks
        for table, own in zip(self.tables, self.seeds.view(len(self.tables), -1), strict=True):
            for job in self.rows.present:
                if (adapter := table.adapters[job]) is not None:
                    where = self.rows.of(job).to(self.device)
                    narrow = self.s[where, adapter.column : adapter.column + len(adapter.a)].float()
                    dx[where] += dropped(narrow @ adapter.a.float(), own[job], adapter.dropout)
        return dx


def check(runs, ranks, dtype, device, dropout=0.0, tile="tail", **shapes):
    case = Case(runs, ranks, dtype, device, dropout, **shapes)
    assert_close(case.run(tile=tile), case.wanted(), dtype, 2)
    assert_close(case.run(False, tile), case.wanted(False), dtype, 2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("tile", TILES)
def test_both_products(tile, dropout, dtype, device):
    check(RUNS, RANKS, dtype, device, dropout, tile)


@pytest.mark.parametrize("tile", list(TILES))
def test_matrices_at_multiples_of_what_is_loaded_at_once(tile, device):
    case = Case(RUNS, WHOLE, torch.float16, device)
    assert all(table.aligned_with(case.s) for table in case.tables)
    assert not any(table.aligned_with(case.s[:, 1:]) or table.aligned_with(case.s.float()) for table in case.tables)
    check(RUNS, WHOLE, torch.float16, device, tile=tile)


def test_the_interpreter_runs_the_kernel():
    case = Case(RUNS, RANKS, torch.float16)
    assert case.takes(case.x) == INTERPRET


def test_one_job_of_one_linear(dtype, device):
    check([(0, 65)], ((5,),), dtype, device, k=40, widths=(16,))


@given(
    runs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=6),
    ranks=st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=4, max_size=4),
    k=st.integers(1, 9), n=st.integers(1, 9), dropout=st.sampled_from([0.0, 0.2]),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=6 if INTERPRET else 12, deadline=None)
def test_any_runs_and_ranks(runs, ranks, k, n, dropout, dtype, seed):
    torch.manual_seed(seed)
    if any(ranks):
        check(runs, (ranks,), dtype, "cpu", dropout, k=8 * k, widths=(8 * n,))


@pytest.mark.parametrize("place", ["new", "out", "in place"])
def test_bias_and_residual(place, dtype, device):
    case = Case(RUNS, RANKS, dtype, device)
    bias = torch.randn(case.n).to(device, dtype)
    residual = strided(torch.randn(case.rows.rows, case.n).to(device, dtype), 8)
    wanted = case.wanted() + bias.float() + residual.float()
    out = {"new": None, "out": poisoned(*residual.shape, dtype=dtype, device=device), "in place": residual}[place]
    y = case.run(bias=bias, residual=residual, out=out)
    assert out is None or y is out
    assert_close(y, wanted, dtype, 2)


def test_a_nan_stays_with_its_own_job(dtype, device):
    def run(spoil):
        torch.manual_seed(1)
        case = Case(RUNS, RANKS, dtype, device)
        mine = case.rows.of(1).to(device)
        if spoil:
            for table in case.tables:
                for job in (1, 2):
                    table.adapters[job].a.fill_(float("nan"))
                    table.adapters[job].b.fill_(float("nan"))
            for wide in (case.x, case.dy, case.s):
                wide[mine] = float("nan")
        y, dx = case.run(), case.run(False)
        others = torch.cat([case.rows.of(job) for job in (0, 3)]).to(device)
        assert not spoil or (y[mine].isnan().all() and dx[mine].isnan().all())
        return y[others], dx[others]

    for usual, spoilt in zip(run(False), run(True), strict=True):
        assert torch.equal(usual, spoilt)


def test_an_adapter_that_is_nan_alone_leaves_the_others(dtype, device):
    """Also where its rows are the first of a tile that others share."""
    case = Case([(0, 5), (1, 40), (0, 7)], ((4, 4),), dtype, device, widths=(16,))
    usual, others = case.run(), case.rows.of(1)
    case.tables[0].adapters[0].b.fill_(float("nan"))
    assert torch.equal(case.run()[others.to(device)], usual[others.to(device)])


def test_pieces_cover_each_row_once():
    rows = JobRows([(1, 5), (0, 1), (1, 6)])
    pieces, ends = rows.pieces(4)
    assert pieces.tolist() == [[0, 4, 1, 0], [4, 5, 1, 4], [5, 6, 0, 0], [6, 8, 1, 5], [8, 12, 1, 7]]
    assert ends.tolist() == [0, 1, 4, 5] and rows.pieces(4)[0] is pieces
    assert JobRows([]).pieces(4)[1].tolist() == [0]


def test_what_it_does_not_take():
    case = Case(RUNS, RANKS, torch.float16)
    wide = Case(RUNS, ((65, 1, 1, 1),), torch.float16, widths=(40,))
    odd = Case(RUNS, ((2, 1, 1, 1),), torch.float16, widths=(33,))
    askew = Case(RUNS, RANKS, torch.float16)
    askew.w = strided(askew.w.clone(), 3)
    for other in (wide, odd, askew):
        assert not other.takes(other.x) and other.run().isfinite().all()
    assert not takes(case.x, case.w, 16, [40, 24], case.x.float())


def test_what_does_not_fit():
    case = Case(RUNS, RANKS, torch.float32)
    with pytest.raises(ValueError, match="the jobs' 140 rows, the weight and the adapters do not fit"):
        multi_product(case.x[1:], case.w, case.s, case.tables, case.rows)
    with pytest.raises(ValueError, match="the adapters do not fit"):
        multi_product(case.x, case.w, case.s, case.tables[:1], case.rows)
    with pytest.raises(ValueError, match="no output of 64 columns"):
        case.run(out=torch.zeros(140, 63))
