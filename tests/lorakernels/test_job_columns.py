"""Each row keeps its own job's columns of S: in place, in every layout, and nothing else is touched."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES
from lorakernels.ops.job_columns import BLOCK, SPARE, keep_own_columns, keep_own_columns_reference
from lorakernels.ops.job_rows import JobRows

RANKS = [3, 8, 1]


def tables(m, ranks, spare, device, seed=0):
    torch.manual_seed(seed)
    rows = torch.randint(0, len(ranks), (m,), dtype=torch.int32)
    columns = [job for job, rank in enumerate(ranks) for _ in range(rank)] + [SPARE] * spare
    return rows.to(device), torch.tensor(columns, dtype=torch.int32, device=device)


@given(
    m=st.integers(0, 70),
    ranks=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    spare=st.integers(0, 9),
    both=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_row_keeps_its_own_columns(device, m, ranks, spare, both, dtype):
    rows, columns = tables(m, ranks, spare, device)
    p = len(columns)
    wide = torch.randn(m, 5 + p + 2).to(device, dtype)  # behind X, as the operand has it
    before, scaled = wide.clone(), torch.randn(m, p).to(device, dtype)
    kept = scaled.clone()
    keep_own_columns(wide[:, 5 : 5 + p], rows, columns, scaled if both else None)
    assert torch.equal(wide[:, 5 : 5 + p], keep_own_columns_reference(before[:, 5 : 5 + p], rows, columns))
    assert torch.equal(wide[:, :5], before[:, :5]) and torch.equal(wide[:, 5 + p :], before[:, 5 + p :])
    assert torch.equal(scaled, keep_own_columns_reference(kept, rows, columns) if both else kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_scales_the_scaled_s_is_made_whatever_was_there(device, dtype):
    rows, columns = tables(70, RANKS, 4, device)
    s, scales = torch.randn(70, len(columns)).to(device, dtype), torch.rand(len(columns), device=device) + 0.5
    scaled = torch.full_like(s, float("nan"))
    wanted = keep_own_columns_reference(s, rows, columns)
    keep_own_columns(s, rows, columns, scaled, scales)
    assert torch.equal(s, wanted)
    torch.testing.assert_close(scaled, (wanted * scales).to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("scaled", [False, True])
def test_zeros_are_chosen_and_not_multiplied_with(device, scaled):
    rows, columns = tables(40, RANKS, 4, device)
    s = torch.full((40, len(columns)), float("nan"), device=device)
    more = (torch.empty_like(s), torch.ones(len(columns), device=device)) if scaled else ()
    keep_own_columns(s, rows, columns, *more)
    own = rows[:, None] == columns[None, :]
    for t in (s, *more[:1]):
        assert t[own].isnan().all() and (t[~own] == 0).all() and (t[:, -4:] == 0).all()


def test_more_rows_and_columns_than_a_program_has(device):
    rows, columns = tables(2 * BLOCK // 256 + 1, [100, 200, 9], 3, device)
    s = torch.ones(len(rows), len(columns), device=device)
    keep_own_columns(s, rows, columns)
    assert torch.equal(s, (rows[:, None] == columns[None, :]).float())


def test_the_table_of_rows(device):
    rows = JobRows([(2, 3), (0, 2), (2, 1)])
    x = torch.zeros(6, 4, 8, device=device)
    table = rows.of_input(x).job_of_row()
    assert table.dtype == torch.int32 and table.device == x.device
    assert table.tolist() == [2] * 12 + [0] * 8 + [2] * 4
    assert rows.of_input(x) is rows.of_input(x) and JobRows([]).job_of_row().shape == (0,)


def test_what_does_not_fit():
    rows, columns = tables(4, RANKS, 0, "cpu")
    with pytest.raises(ValueError, match="rows' and columns' jobs do not fit"):
        keep_own_columns(torch.zeros(5, 12), rows, columns)
    with pytest.raises(ValueError, match="S and sS do not fit"):
        keep_own_columns(torch.zeros(4, 12), rows, columns, torch.zeros(4, 11))
