"""Helpers of the kernels' tests: errors in units of the dtype, poisoned outputs, strided copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lorakernels.runtime import INTERPRET

DTYPES = [torch.float32, torch.float16, *([] if INTERPRET else [torch.bfloat16])]  # that a drawn shape may have
EPS = {torch.float64: 1e-9, torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def exhaustive(*values: Any):
    """One case of a grid that only `make test-all` runs: others of the grid show the same kind of situation."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def exhaustive_in_interpreter(*values: Any):
    """The same, where Triton's interpreter runs it: there a case takes a hundred times as long."""
    return exhaustive(*values) if INTERPRET else pytest.param(*values)


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted value; NaN and infinity count as infinite."""
    assert actual.shape == wanted.shape, f"{tuple(actual.shape)} is not {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - wanted.detach().double().to(actual.device)).abs().max().item()
    return difference / max(wanted.abs().max().item(), 1e-6) if difference == difference else float("inf")


def assert_close(actual, wanted, dtype, times: float = 1.0) -> None:
    got = error(actual, wanted)
    assert got <= EPS[dtype] * times, f"relative error {got:.3g} above {EPS[dtype] * times:.3g}"


def poisoned(*shape, dtype, device) -> torch.Tensor:
    """An output buffer in which an unwritten element shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def strided(x: torch.Tensor, extra: int = 3) -> torch.Tensor:
    """x again, as a slice of a wider buffer."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + extra), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def gradients(function, inputs, seed: int = 1):
    """(output, gradients of the inputs) for a fixed random output gradient."""
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in inputs]
    out = function(*leaves)
    torch.manual_seed(seed)
    grad = torch.randn(out.shape, dtype=torch.float32).to(out.device, out.dtype)
    return out, torch.autograd.grad(out, [t for t in leaves if t is not None], grad)


def quantized(n, k, blocksize, nested, device):
    """Random NF4 data in bitsandbytes' layout (only the layout matters here)."""
    count = n * k
    blocks = -(-count // blocksize)
    state = SimpleNamespace(
        shape=torch.Size((n, k)), code=torch.linspace(-1, 1, 16, device=device), blocksize=blocksize,
        dtype=torch.float16,
        absmax=torch.rand(blocks, device=device), offset=None, state2=None, nested=nested,
    )  # fmt: skip
    if nested:
        state.absmax = torch.randint(256, (blocks,), dtype=torch.uint8, device=device)
        state.state2 = SimpleNamespace(
            code=torch.rand(256, device=device), blocksize=4, absmax=torch.rand(-(-blocks // 4), device=device)
        )
        state.offset = torch.tensor(0.25, device=device)
    return torch.randint(256, (-(-count // 2), 1), dtype=torch.uint8, device=device), state
