"""dS with dB, and dA, against float32: ranks, members, strides, ragged tails, a norm's output made again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, exhaustive, poisoned, strided
from lorakernels.ops.dropout import dropped
from lorakernels.ops.lora_grad import (
    A_TILES,
    B_TILES,
    DS_DB_TILES,
    AdapterColumns,
    SavedInput,
    a_gradient,
    a_gradient_reference,
    b_gradient,
    ds_and_db,
    ds_and_db_reference,
    fitting_tiles,
)
from lorakernels.ops.rms_norm import Norm, NormFactors, NormInput, forward_into
from lorakernels.runtime import tensor_cores


def on_triton(tensor):
    """These kernels have no torch path of their own: `Projection` takes library calls there."""
    if not tensor_cores(tensor):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")


@pytest.mark.parametrize(
    "widths, rank",
    [
        ([70], 3),
        exhaustive([1], 1),
        ([128, 64, 64], 16),
        exhaustive([512, 256, 256], 16),
        ([192, 192], 5),
        exhaustive([130], 64),
    ],
)
@pytest.mark.parametrize("m", [exhaustive(1), 37, 300])
@pytest.mark.parametrize("tile", DS_DB_TILES)
def test_ds_and_db(widths, rank, m, tile, device, dtype):
    n, p = sum(widths), rank * len(widths) + 2
    d = poisoned(m, n + p, dtype=dtype, device=device)
    d[:, :n] = torch.randn(m, n, device=device).to(dtype)
    on_triton(d)
    sb, s = torch.zeros(n, p, device=device, dtype=dtype), strided(torch.randn(m, p, device=device).to(dtype))
    s[:, rank * len(widths) :] = 0
    rows = [sum(widths[:i]) for i in range(len(widths) + 1)]
    for i in range(len(widths)):  # block-diagonal, as the operand has it
        sb[rows[i] : rows[i + 1], i * rank : (i + 1) * rank] = torch.randn(widths[i], rank, device=device).to(dtype)
    if tile not in fitting_tiles(d, widths, [rank] * len(widths)):
        assert len(widths) > 1 and DS_DB_TILES[tile][1] > 64
        pytest.skip("members that end inside a tile")
    db = ds_and_db(d[:, :n], d[:, n:], AdapterColumns(sb, s, widths, rank), tile)
    wanted_ds, wanted_db = ds_and_db_reference(d[:, :n], sb, s)
    assert_close(d[:, n:], wanted_ds, dtype, 2)
    for i in range(len(widths)):
        part = slice(rows[i], rows[i + 1])
        assert_close(db[part], wanted_db[part, i * rank : (i + 1) * rank], torch.float32, 10)


@pytest.mark.parametrize(
    "widths, rank", [([70], 3), exhaustive([1], 1), ([128, 64, 64], 16), ([192, 192], 5), exhaustive([130], 64)]
)
@pytest.mark.parametrize("m", [exhaustive(1), 37, 300])
@pytest.mark.parametrize("tile", B_TILES)
def test_b_gradient(widths, rank, m, tile, device, dtype):
    n, p = sum(widths), rank * len(widths) + 2
    dy, s = (strided(torch.randn(m, k, device=device).to(dtype)) for k in (n, p))
    on_triton(dy)
    assert fitting_tiles(dy, widths, [rank] * len(widths), B_TILES) == [tile]
    db = b_gradient(dy, s, widths, rank, tile)
    _, wanted = ds_and_db_reference(dy, torch.zeros(n, p, device=device), s)
    start = 0
    for i, width in enumerate(widths):
        part = slice(start, start + width)
        assert_close(db[part], wanted[part, i * rank : (i + 1) * rank], torch.float32, 10)
        start += width


@pytest.mark.parametrize("m, n, p", [exhaustive(1, 1, 1), (37, 70, 3), (300, 130, 16), exhaustive(129, 257, 100)])
@pytest.mark.parametrize("tile", A_TILES)
@pytest.mark.parametrize("offset", [None, exhaustive(0.0), 1.0])
def test_a_gradient(m, n, p, tile, offset, device, dtype):
    h, ds = (strided(torch.randn(m, k, device=device).to(dtype)) for k in (n, p))
    on_triton(h)
    weight, rstd = torch.randn(n, device=device).to(dtype), torch.rand(m, device=device) + 0.1
    factors = None if offset is None else NormFactors(rstd, weight, Norm(1e-6, offset))
    got = a_gradient(ds, h, factors, tile)
    # In low precision X is rounded before the product, as the norm rounds its output.
    assert_close(got, a_gradient_reference(ds, h, factors), dtype if offset is not None else torch.float32, 10)


@given(
    m=st.integers(1, 70),
    widths=st.one_of(
        st.lists(st.integers(1, 140), min_size=1, max_size=1),
        st.lists(st.sampled_from([64, 128, 256]), min_size=2, max_size=3),
    ),
    rank=st.integers(1, 64),
    extra=st.integers(0, 5),
    tile=st.sampled_from([*DS_DB_TILES]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_any_shape_of_ds_and_db(m, widths, rank, extra, tile, dtype, seed):
    torch.manual_seed(seed)
    n, p = sum(widths), rank * len(widths)
    d = poisoned(m, n + p + extra, dtype=dtype, device="cpu")
    on_triton(d)
    tile = tile if tile in fitting_tiles(d, widths, [rank] * len(widths)) else "one_read"
    dy, ds = d[:, :n].copy_(torch.randn(m, n)), d[:, n : n + p]
    sb, s = torch.zeros(n, p, dtype=dtype), strided(torch.randn(m, p).to(dtype), extra)
    ends = [sum(widths[:i]) for i in range(len(widths) + 1)]
    parts = [(slice(*ends[i : i + 2]), slice(i * rank, (i + 1) * rank)) for i in range(len(widths))]
    for rows, columns in parts:
        sb[rows, columns] = torch.randn(rows.stop - rows.start, rank)
    db = ds_and_db(dy, ds, AdapterColumns(sb, s, widths, rank), tile)
    wanted_ds, wanted_db = ds_and_db_reference(dy, sb, s)
    assert_close(ds, wanted_ds, dtype, 2)
    for rows, columns in parts:
        assert_close(db[rows], wanted_db[rows, columns], torch.float32, 10)
    assert d[:, n + p :].isnan().all()


@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    rank=st.integers(1, 128),
    extra=st.integers(0, 5),
    tile=st.sampled_from([*A_TILES]),
    offset=st.sampled_from([None, 0.0, 1.0]),
    p=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
@settings(max_examples=15, deadline=None)
def test_any_shape_of_a(m, n, rank, extra, tile, offset, p, dtype, seed):
    """X itself or behind a norm, with and without dropout."""
    torch.manual_seed(seed)
    h, ds = (strided(torch.randn(m, columns).to(dtype), extra) for columns in (n, rank))
    on_triton(h)
    factors = None
    if offset is not None:
        factors = NormFactors(torch.rand(m) + 0.1, torch.randn(n).to(dtype), Norm(1e-6, offset))
    drawn = torch.tensor([seed])
    mask = (dropped(torch.ones(m, n), drawn, p) != 0) / (1 - p)
    got = a_gradient(ds, h, factors, tile, drawn if p else None, p)
    wanted = a_gradient_reference(ds, h.float() * mask, factors)
    assert_close(got, wanted, dtype if offset is not None else torch.float32, 10)


def test_what_does_not_fit():
    d = torch.zeros(4, 40)
    assert not fitting_tiles(d, [20, 20], [3, 3])  # members that end inside a block
    assert not fitting_tiles(d, [64, 64], [3, 4])
    assert not fitting_tiles(d, [64], [0]) and not fitting_tiles(d, [64], [65])
    assert not fitting_tiles(torch.zeros(0, 64), [64], [4])


def test_a_saved_input_makes_the_norm_again():
    h, weight, y = torch.randn(5, 8), torch.randn(8), torch.empty(5, 8)
    norm = Norm(1e-6, 1.0)
    rstd = forward_into(NormInput(h, weight, norm), y)
    source = SavedInput(h, torch.float32, NormFactors(rstd, weight, norm))
    assert torch.equal(source.tensor(), y) and source.tensor() is source.tensor()
    assert torch.equal(SavedInput(h, torch.float32).tensor(), h)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="do not fit"):
        b_gradient(torch.zeros(4, 9), torch.zeros(4, 2), [8], 2)
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        ds_and_db(torch.zeros(4, 9), torch.zeros(4, 2), AdapterColumns(torch.zeros(8, 2), torch.zeros(4, 2), [8], 2))
    with pytest.raises(ValueError, match="rows"):
        a_gradient(torch.zeros(4, 2), torch.zeros(5, 8))
