"""FP8 GEMMs of a frozen weight: against the emulation, and the error against the exact product."""

from types import SimpleNamespace

import pytest
import torch
from kernel_checks import error
from lorakernels import fp8
from lorakernels.member import Member
from lorakernels.projection import Projection


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


def test_a_quantized_base_is_left_as_it_is_with_the_reason():
    state = SimpleNamespace(shape=(4, 8), dtype=torch.bfloat16)
    member = Member("q_proj", torch.nn.Parameter(torch.zeros(16, 1), requires_grad=False), quantized=state)
    assert fp8.why_not([member]) == "its base is quantized already"
    assert Projection([member], fp8=True).fp8 is None
    dense = Member("q_proj", torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False))
    assert fp8.why_not([dense]) is None
    assert Projection([dense], fp8=True).fp8 is not None


def test_weights_that_change_are_quantized_again():
    member = Member("q_proj", torch.nn.Parameter(torch.randn(16, 16), requires_grad=False))
    frozen = fp8.FrozenFp8([member])
    first = frozen.forward_weight[1].clone()
    frozen.refresh()
    assert torch.equal(frozen.forward_weight[1], first)
    member.weight.mul_(2)
    frozen.refresh()
    torch.testing.assert_close(frozen.forward_weight[1], 2 * first)
