"""Rows in e4m3: the kernel's bits are the torch path's, and both keep what `quantize_rows.py` says of odd rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, exhaustive_in_interpreter, strided
from lorakernels.ops.quantize_rows import FP8, quantize_rows, quantize_rows_into, quantize_rows_reference

EVERY_NUMBER = torch.arange(256, dtype=torch.uint8).view(FP8).float()


def same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(*(t.cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)))


def odd_rows(m, k, device, dtype):
    """Of sizes far apart, with elements far apart in each."""
    sizes = torch.exp2(torch.randint(-12, 12, (m, 1), device=device).float())
    return (torch.randn(m, k, device=device) * torch.randn(m, k, device=device).exp() * sizes).to(dtype)


@pytest.mark.parametrize(
    "shape",
    [(5, 32), (2, 3, 130), (1, 1), (0, 16), (3, 4096), exhaustive_in_interpreter((2, 28672)), (2, 33000)],
    ids=str,
)
@pytest.mark.parametrize("with_factor", [False, True])
def test_the_kernel_has_the_bits_of_the_torch_path(shape, with_factor, device, dtype):
    x = strided(odd_rows(max(1, torch.Size(shape[:-1]).numel()), shape[-1], device, dtype))
    x = x[: torch.Size(shape[:-1]).numel()].view(shape) if len(shape) == 2 else x.reshape(shape)
    factor = torch.rand(shape[-1], device=device) if with_factor else None
    same_bits(quantize_rows(x, factor), quantize_rows_reference(x, factor))


@pytest.mark.parametrize("n, k", [(48, 32), (33, 300)])
def test_a_transposed_output(n, k, device, dtype):
    x = strided(odd_rows(n, k, device, dtype))
    q, scale = torch.zeros(k, n + 2, device=device).to(FP8), torch.empty(n, 1, device=device)
    quantize_rows_into(x, q.t()[:n], scale)
    wanted = quantize_rows_reference(x)
    same_bits((q.t()[:n].contiguous(), scale), wanted)
    assert not q.float()[:, n:].any(), "it wrote beside its rows"


def test_every_number_and_every_tie(device):
    """Behind a row's largest, 448, the scale is 1: numbers stay what they are, the middle of two goes to the even."""
    numbers = EVERY_NUMBER[EVERY_NUMBER.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([middles.nextafter(torch.tensor(s)) for s in (-1e9, 1e9)])
    x = torch.cat([torch.tensor([448.0]), numbers, middles, near])[None].to(device)
    got = quantize_rows(x)
    assert got.scale.item() == 1
    assert torch.equal(got.q.float()[0, 1 : 1 + len(numbers)].cpu(), numbers)
    same_bits(got, (x.to(FP8), torch.ones(1, 1)))


@given(
    m=st.integers(1, 5),
    k=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    extra=st.integers(0, 5),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_any_shape(m, k, dtype, extra, seed):
    torch.manual_seed(seed)
    x = strided(odd_rows(m, k, "cpu", dtype), extra)
    got = quantize_rows(x)
    same_bits(got, quantize_rows_reference(x))
    back, wide = got.q.float() * got.scale, x.float()
    largest = wide.abs().amax(1, keepdim=True)
    assert ((back - wide).abs() <= wide.abs() * 2**-4 + largest * 2**-18).all()
    assert torch.equal(got.q.float().abs().amax(1), torch.full((m,), 448.0)), "a row does not use the whole range"


def test_rows_do_not_mix(device):
    """A zero, a NaN, an infinity, a row a million times larger and one of 1e-30 leave the others as they are."""
    x = torch.randn(8, 64, device=device)
    alone = quantize_rows(x)
    x[0] = 0
    x[1, 5], x[2, 60], x[3, 0] = float("nan"), float("inf"), -float("inf")
    x[4] *= 1e6
    x[5] *= 1e-30
    q, scale = quantize_rows(x)
    assert q.float()[0].abs().max() == 0 and scale[0].isfinite()
    weight = torch.randn(64, 16, device=device)
    product = (q.float() @ weight) * scale
    assert product[1:4].isnan().all(), "what is not finite has to be seen in each product"
    assert product[0].abs().max() == 0 and product[[4, 5, 6, 7]].isfinite().all()
    same_bits((q[6:], scale[6:]), (alone.q[6:], alone.scale[6:]))
    for row, size in ((4, 1e6), (5, 1e-30)):
        wanted = x[row].double()
        assert (q[row].double() * scale[row].double() - wanted).norm() < 0.04 * wanted.norm(), f"row of {size:g}"


def test_rows_near_the_ends_of_float32(device):
    x = torch.tensor([[1e-45, 0.0], [1e-38, -1e-38], [3e38, -1e30]], device=device)
    q, scale = quantize_rows(x)
    same_bits((q, scale), quantize_rows_reference(x))
    assert scale.isfinite().all() and (scale > 0).all() and not q.float()[:2].any()
    assert (q.double() * scale.double())[2, 0].item() == pytest.approx(3e38, rel=1e-6)


def test_what_does_not_fit():
    x, q, scale = torch.zeros(2, 8), torch.zeros(2, 8).to(FP8), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"q and scale do not fit x \(x: \(2, 8\)"):
        quantize_rows_into(x, q[:, :4], scale)
    with pytest.raises(ValueError, match="one entry a column"):
        quantize_rows_into(x, q, scale, torch.zeros(7))
