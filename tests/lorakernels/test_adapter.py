"""A and scale · B into strided views of the operand buffer, cast on the way."""

import pytest
import torch
from kernel_checks import assert_close, poisoned
from lorakernels.adapter import load_adapter, load_adapter_reference


@pytest.mark.parametrize("n, k, r", [(5, 7, 3), (1, 1, 1), (300, 20, 16), (8, 3000, 2)])
@pytest.mark.parametrize("adapter", ["same", "float32"])
def test_load_adapter(n, k, r, adapter, device, dtype):
    own = torch.float32 if adapter == "float32" else dtype
    a, b = torch.randn(r, k, device=device).to(own), torch.randn(n, r, device=device).to(own)
    buffer = poisoned(n + r, k + r + 2, dtype=dtype, device=device)
    load_adapter(a, b, 1.7, buffer[n:, :k], buffer[:n, k : k + r])
    wanted = load_adapter_reference(a, b, 1.7)
    assert_close(buffer[n:, :k], wanted[0], dtype)
    assert_close(buffer[:n, k : k + r], wanted[1], dtype)
    assert buffer[:n, :k].isnan().all() and buffer[:, k + r :].isnan().all(), "written beside its place"


def test_transposed_parameters(device, dtype):
    a, b = torch.randn(6, 3, device=device).to(dtype).t(), torch.randn(3, 5, device=device).to(dtype).t()
    out_a, out_b = (poisoned(*t.shape, dtype=dtype, device=device) for t in (a, b))
    load_adapter(a, b, 0.5, out_a, out_b)
    assert torch.equal(out_a, a)
    assert_close(out_b, b.float() * 0.5, dtype)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        load_adapter(torch.zeros(2, 3), torch.zeros(4, 2), 1.0, torch.zeros(3, 2), torch.zeros(4, 2))
