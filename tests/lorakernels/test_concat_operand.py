"""[x | x · Aᵀ] in one launch, against float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, exhaustive, poisoned, strided
from lorakernels.ops.concat_operand import (
    LoraColumns,
    ScaledS,
    concat_operand_into,
    concat_operand_reference,
    s_into,
    spare_columns,
    with_spare_columns,
)
from lorakernels.runtime import TILES, tensor_cores

# On a CPU torch computes whatever the tile; make test-all takes each of them to the interpreter and to a GPU.
EACH_TILE = pytest.mark.parametrize("tile", [*map(exhaustive, TILES), None])


@pytest.mark.parametrize("m, n, p", [(1, 1, 1), (37, 70, 5), (33, 64, 16), (5, 30, 130), (4, 8, 0)])
@EACH_TILE
def test_concat_operand(m, n, p, tile, device, dtype):
    x, a = strided(torch.randn(m, n, device=device).to(dtype)), torch.randn(p, n, device=device).to(dtype)
    for view in (a, a.t().contiguous().t()):
        out = poisoned(m, n + p, dtype=dtype, device=device)
        concat_operand_into(x, LoraColumns(view), out, tile)
        wanted = concat_operand_reference(x, a)
        assert torch.equal(out[:, :n], x)
        if p:
            assert_close(out[:, n:], wanted[:, n:], dtype, 2)


@pytest.mark.parametrize("rank, p", [(1, 64), (16, 64), (40, 48)])
def test_rows_beyond_the_rank_are_not_read(rank, p, device, dtype):
    x, a = torch.randn(37, 70, device=device).to(dtype), torch.zeros(p, 70, device=device, dtype=dtype)
    a[:rank] = torch.randn(rank, 70, device=device)
    wanted = concat_operand_reference(x, a)
    if tensor_cores(x, a):
        a[rank:] = float("nan")
    out = poisoned(37, 70 + p, dtype=dtype, device=device)
    concat_operand_into(x, LoraColumns(a, rank), out)
    assert_close(out[:, 70:], wanted[:, 70:], dtype, 2)
    assert not out[:, 70 + rank :].any()


@pytest.mark.parametrize("rank, p", [(1, 1), (3, 20), (16, 64), (40, 48)])
@EACH_TILE
def test_scaled_s_comes_along(rank, p, tile, device, dtype):
    x, a = torch.randn(37, 70, device=device).to(dtype), torch.zeros(p, 70, device=device, dtype=dtype)
    a[:rank] = torch.randn(rank, 70, device=device)
    scaled_s = ScaledS(poisoned(37, p, dtype=dtype, device=device), torch.randn(p, device=device))
    out = poisoned(37, 70 + p, dtype=dtype, device=device)
    concat_operand_into(x, LoraColumns(a, rank, scaled_s), out, tile)
    wanted = concat_operand_reference(x, a)
    assert_close(out[:, 70:], wanted[:, 70:], dtype, 2)
    assert_close(scaled_s.out, wanted[:, 70:] * scaled_s.scales, dtype, 3)


@pytest.mark.parametrize("rank, p", [(1, 1), (3, 20), (16, 64), (40, 48)])
@EACH_TILE
@pytest.mark.parametrize("behind", [True, False])
def test_s_of_an_x_that_stays_where_it_is(rank, p, tile, behind, device, dtype):
    a = torch.zeros(p, 70, device=device, dtype=dtype)
    a[:rank] = torch.randn(rank, 70, device=device)
    buffer = poisoned(37, 70 + p, dtype=dtype, device=device)
    x = buffer[:, :70] if behind else strided(torch.empty(37, 70, device=device, dtype=dtype))
    x.copy_(torch.randn(37, 70, device=device))
    before, out = x.clone(), buffer[:, 70:]
    scaled_s = ScaledS(poisoned(37, p, dtype=dtype, device=device), torch.randn(p, device=device))
    s_into(x, LoraColumns(a, rank, scaled_s), out, tile)
    wanted = concat_operand_reference(x, a)[:, 70:]
    assert torch.equal(x, before) and (behind or buffer[:, :70].isnan().all())
    assert_close(out, wanted, dtype, 2)
    assert_close(scaled_s.out, wanted * scaled_s.scales, dtype, 3)
    assert not out[:, rank:].any() and not scaled_s.out[:, rank:].any()


@given(m=st.integers(0, 6), n=st.integers(1, 40), p=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_any_shape(m, n, p):
    x, a, out = torch.randn(m, n), torch.randn(p, n), torch.empty(m, n + p)
    concat_operand_into(x, LoraColumns(a), out)
    assert_close(out, concat_operand_reference(x, a), torch.float32, 2)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        concat_operand_into(torch.zeros(2, 3), LoraColumns(torch.zeros(1, 4)), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        s_into(torch.zeros(2, 3), LoraColumns(torch.zeros(1, 3)), torch.zeros(2, 2))


def test_spare_columns_are_only_taken_where_they_are_ours():
    like = torch.zeros(1)
    ours = with_spare_columns(torch.Size((2, 3, 8)), 4, like)
    assert spare_columns(ours, 12, torch.float32).shape == (6, 12)
    assert spare_columns(ours, 10, torch.float32).data_ptr() == ours.data_ptr()
    assert spare_columns(ours, 13, torch.float32) is None  # no room
    assert spare_columns(ours, 12, torch.float16) is None
    theirs = torch.zeros(6, 12)[:, :8]  # the same strides, somebody else's columns
    assert spare_columns(theirs, 12, torch.float32) is None
    assert spare_columns(ours[1:], 12, torch.float32) is None
