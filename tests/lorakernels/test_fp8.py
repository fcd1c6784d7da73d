"""FP8 GEMMs of a frozen weight: against the emulation, and the error against the exact product."""

from types import SimpleNamespace

import lorakernels
import pytest
import torch
from kernel_checks import assert_close, error
from lorakernels.nodes import fp8
from lorakernels.nodes.member import Member
from lorakernels.nodes.projection import Projection
from tiny_models import batch, build


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


@pytest.mark.parametrize("write", ["in place", "through data", "another tensor"])
def test_weights_that_change_are_seen(write):
    """PEFT merges through `.data`, which changes neither the version nor, without a check for NaN, the address."""
    member = Member("q_proj", torch.nn.Parameter(torch.randn(16, 32), requires_grad=False))
    frozen, x, dy = fp8.FrozenFp8([member]), torch.randn(4, 32), torch.randn(4, 16)
    y, dx = frozen.forward(x), frozen.backward(dy)
    if write == "in place":
        member.weight.mul_(2)
    elif write == "through data":
        member.weight.data.mul_(2)
    else:
        member.weight.data = 2 * member.weight.data
    torch.testing.assert_close(frozen.forward(x), 2 * y)
    torch.testing.assert_close(frozen.backward(dy), 2 * dx)


def test_a_model_after_its_adapter_was_merged_and_started_anew():
    """As ReLoRA does it, with PEFT's own merge."""
    model = build("llama")
    lorakernels.apply(model, fp8=True)
    with torch.no_grad():
        with model.disable_adapter():
            base = model(**batch()).logits
        before = model(**batch()).logits
        for linear in (m for m in model.modules() if hasattr(m, "merged_adapters")):
            linear.merge()
            linear.merged_adapters.clear()
            linear.lora_B["default"].weight.zero_()
        after = model(**batch()).logits
    assert lorakernels.status(model).fused["layer"] == 4, "neither of the two was left to PEFT"
    assert relative(base, before) > 0.4 > 0.2 > relative(after, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_rounded_once_to_their_own_dtype(dtype, device):
    """torch's own product of FP8 operands, on a CPU too. In bfloat16 first, float32 would have 7 bits of mantissa."""
    if device == "cuda" and (reason := fp8.supported(torch.device(device))):
        pytest.skip(reason)
    x, w = torch.randn(16, 64, device=device), torch.randn(48, 64, device=device)
    operands = *fp8.quantize_rows(x), *fp8.quantize_rows(w)
    got = fp8.scaled_mm(*operands, dtype)
    assert_close(got, fp8.fp8_mm_reference(*operands, torch.float64), torch.bfloat16 if device == "cuda" else dtype)
    assert torch.equal(got, got.bfloat16().to(dtype)) == (dtype == torch.bfloat16)
