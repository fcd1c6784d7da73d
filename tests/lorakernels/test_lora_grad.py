"""dS with dB, and dA, against float32: ranks, members, strides, ragged tails, a norm's output made again."""

import pytest
import torch
from kernel_checks import assert_close, poisoned, strided
from lorakernels.lora_grad import (
    A_TILES,
    TAIL_TILES,
    Source,
    a_gradient,
    a_gradient_reference,
    tail_and_b,
    tail_and_b_reference,
    tails_that_fit,
)
from lorakernels.rms_norm import forward_into
from lorakernels.runtime import tensor_cores


def on_triton(tensor):
    """These kernels have no torch path of their own: `Projection` takes library calls there."""
    if not tensor_cores(tensor):
        pytest.skip("runs in Triton only, on a GPU in 16 bits: see test_interpreter.py and -m gpu")


@pytest.mark.parametrize(
    "widths, rank", [([70], 3), ([1], 1), ([128, 64, 64], 16), ([512, 256, 256], 16), ([192, 192], 5), ([130], 64)]
)
@pytest.mark.parametrize("m", [1, 37, 300])
@pytest.mark.parametrize("tile", TAIL_TILES)
def test_tail_and_b(widths, rank, m, tile, device, dtype):
    n, p = sum(widths), rank * len(widths) + 2
    d = poisoned(m, n + p, dtype=dtype, device=device)
    d[:, :n] = torch.randn(m, n, device=device).to(dtype)
    on_triton(d)
    sb, s = torch.zeros(n, p, device=device, dtype=dtype), strided(torch.randn(m, p, device=device).to(dtype))
    s[:, rank * len(widths) :] = 0
    rows = [sum(widths[:i]) for i in range(len(widths) + 1)]
    for i in range(len(widths)):  # block-diagonal, as the operand has it
        sb[rows[i] : rows[i + 1], i * rank : (i + 1) * rank] = torch.randn(widths[i], rank, device=device).to(dtype)
    if tile not in tails_that_fit(d, widths, [rank] * len(widths)):
        assert len(widths) > 1 and TAIL_TILES[tile][1] > 64
        pytest.skip("members that end inside a tile")
    db = tail_and_b(d[:, :n], d[:, n:], sb, s, widths, rank, tile)
    wanted_ds, wanted_db = tail_and_b_reference(d[:, :n], sb, s)
    assert_close(d[:, n:], wanted_ds, dtype, 2)
    for i in range(len(widths)):
        part = slice(rows[i], rows[i + 1])
        assert_close(db[part], wanted_db[part, i * rank : (i + 1) * rank], torch.float32, 10)


@pytest.mark.parametrize("m, n, p", [(1, 1, 1), (37, 70, 3), (300, 130, 16), (129, 257, 100)])
@pytest.mark.parametrize("tile", A_TILES)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_a_gradient(m, n, p, tile, offset, device, dtype):
    h, ds = (strided(torch.randn(m, k, device=device).to(dtype)) for k in (n, p))
    on_triton(h)
    weight, rstd = torch.randn(n, device=device).to(dtype), torch.rand(m, device=device) + 0.1
    norm = (None, None, 0.0) if offset is None else (rstd, weight, offset)
    got = a_gradient(ds, h, *norm, tile)
    # In low precision X is rounded before the product, as the norm rounds its output.
    assert_close(got, a_gradient_reference(ds, h, *norm), dtype if offset is not None else torch.float32, 10)


def test_what_does_not_fit():
    d = torch.zeros(4, 40)
    assert not tails_that_fit(d, [20, 20], [3, 3])  # members that end inside a block
    assert not tails_that_fit(d, [64, 64], [3, 4])
    assert not tails_that_fit(d, [64], [0]) and not tails_that_fit(d, [64], [65])
    assert not tails_that_fit(torch.zeros(0, 64), [64], [4])


def test_source_makes_the_norm_again():
    h, weight, y = torch.randn(5, 8), torch.randn(8), torch.empty(5, 8)
    norm = type("Norm", (), {"eps": 1e-6, "offset": 1.0})
    rstd = forward_into(h, None, weight, norm.eps, norm.offset, y)
    source = Source(h, torch.float32, norm, rstd, weight)
    assert torch.equal(source.tensor(), y) and source.tensor() is source.tensor()
    assert torch.equal(Source(h, torch.float32).tensor(), h)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        tail_and_b(torch.zeros(4, 9), torch.zeros(4, 2), torch.zeros(8, 2), torch.zeros(4, 2), [8], 2)
    with pytest.raises(ValueError, match="rows"):
        a_gradient(torch.zeros(4, 2), torch.zeros(5, 8))
