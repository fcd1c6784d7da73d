"""FP8 GEMMs of a frozen weight: against the emulation, and the error against the exact product."""

import pytest
import torch
from kernel_checks import error
from lorakernels import fp8
from lorakernels.projection import Member


def relative(actual, wanted):
    return ((actual.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("m, n, k", [(64, 48, 32), (16, 16, 128)])
def test_error_of_both_directions(m, n, k, device):
    weight = torch.randn(n, k, device=device).bfloat16()
    if device == "cuda" and fp8.supported(weight.device):
        pytest.skip(fp8.supported(weight.device))
    frozen = fp8.FrozenFp8([Member("w", torch.nn.Parameter(weight, requires_grad=False))])
    x, dy = torch.randn(m, k, device=device).bfloat16(), torch.randn(m, n, device=device).bfloat16()
    assert 0.005 < relative(frozen.forward(x), x.double() @ weight.double().t()) < 0.05
    assert 0.005 < relative(frozen.backward(dy), dy.double() @ weight.double()) < 0.05


def test_scales_do_not_mix_rows(device):
    """A row a million times larger must not drown the others."""
    x = torch.randn(4, 32, device=device)
    x[1] *= 1e6
    q, scale = fp8.quantize_rows(x)
    assert error((q.float() * scale)[[0, 2, 3]], x[[0, 2, 3]]) < 0.07
    assert fp8.quantize_rows(torch.zeros(1, 8, device=device))[0].float().abs().max() == 0
