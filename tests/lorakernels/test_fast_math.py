"""Exponentials that flush subnormals, against float64, where they matter and at the ends."""

import pytest
import torch
from lorakernels.ops.fast_math import exp, sigmoid, tanh
from lorakernels.runtime import jit, tl, use_triton


@jit
def _all_three(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, exp(x), mask=i < n)
    tl.store(y_ptr + n + i, sigmoid(x), mask=i < n)
    tl.store(y_ptr + 2 * n + i, tanh(x), mask=i < n)


def test_against_float64(device):
    ends = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 87.0, -87.0, 1e4, -1e4, float("inf"), float("-inf")])
    x = torch.cat((ends, torch.randn(1000) * 5)).to(device)
    if not use_triton(x):
        pytest.skip("runs in Triton only: see test_interpreter.py and -m gpu")
    got = torch.empty(3, len(x), device=device)
    _all_three[(1,)](x, got, len(x), BLOCK=1024)
    wide = x.double()
    for mine, wanted in zip(got, (torch.exp(wide), torch.sigmoid(wide), torch.tanh(wide)), strict=True):
        finite = wanted < 3e38
        # x · log2 e is rounded once, which is |x| · 2⁻²⁴ of the result
        bound = (1e-6 + 1e-7 * wide.abs().clamp(max=100)) * wanted.abs() + 2e-7
        assert ((mine.double() - wanted).abs() <= bound)[finite].all()
        assert mine[~finite].isinf().all()
