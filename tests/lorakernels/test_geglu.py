"""GEGLU, erf and tanh, each against its own float32 reference (and against torch's gelu)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, gradients, strided
from lorakernels.ops.geglu import geglu, geglu_reference
from torch.nn import functional as F


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(4, 50), (2, 3, 130), (1, 1), (0, 4)])
def test_geglu(approximate, shape, device, dtype):
    gate, up = (2 * torch.randn(shape, device=device).to(dtype) for _ in range(2))
    out, grads = gradients(lambda g, u: geglu(g, u, approximate), (gate, up))
    wanted, wanted_grads = gradients(lambda g, u: geglu_reference(g, u, approximate), (gate, up))
    assert_close(out, wanted, dtype)
    for got, want in zip(grads, wanted_grads, strict=True):
        assert_close(got, want, dtype, 2)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_each_form_is_exact_to_its_own_reference(approximate, device):
    """The two forms differ by 4.7e-4: a kernel that took the wrong one would fail at a tenth of that."""
    gate = torch.linspace(-4, 4, 999, device=device)[None]
    out = geglu(gate, torch.ones_like(gate), approximate)
    assert (out - F.gelu(gate.double(), approximate=approximate)).abs().max() < 4e-6


@given(
    m=st.integers(0, 6),
    n=st.integers(1, 140),
    extra=st.integers(0, 5),
    approximate=st.sampled_from(["none", "tanh"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(m, n, extra, approximate, dtype, seed):
    torch.manual_seed(seed)
    gate, up, grad = (strided(torch.randn(m, n).to(dtype), extra) for _ in range(3))
    wide = [t.float().requires_grad_() for t in (gate, up)]
    wanted = geglu_reference(*wide, approximate)
    out = geglu(gate.requires_grad_(), up.requires_grad_(), approximate)
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    for got, want in zip(
        torch.autograd.grad(out, (gate, up), grad), torch.autograd.grad(wanted, wide, grad.float()), strict=True
    ):
        assert_close(got, want, dtype, 2)


def test_the_name_is_checked():
    with pytest.raises(ValueError, match="approximate"):
        geglu(torch.zeros(1, 1), torch.zeros(1, 1), "erf")
