"""A and scale · B into strided views of the operand buffer, cast on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, poisoned
from lorakernels.adapter import Loader, load_adapter, load_adapter_reference


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


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=3),
    extra=st.integers(0, 5),
    own=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    together=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(sizes, extra, own, dtype, together, seed):
    """One by one and in one launch."""
    torch.manual_seed(seed)
    items, buffers = [], []
    for i, (n, k, r) in enumerate(sizes):
        buffer = poisoned(n + r, k + r + extra, dtype=dtype, device="cpu")
        a, b = torch.randn(r, k).to(own), torch.randn(n, r).to(own)
        items.append((a, b, 0.5 + i, buffer[n:, :k], buffer[:n, k : k + r]))
        buffers.append(buffer)
    if together:
        Loader().load(items)
    else:
        for item in items:
            load_adapter(*item)
    for (a, b, scale, out_a, out_b), buffer, (n, k, r) in zip(items, buffers, sizes, strict=True):
        wanted = load_adapter_reference(a, b, scale)
        assert_close(out_a, wanted[0], dtype)
        assert_close(out_b, wanted[1], dtype)
        beside = buffer[:n, :k], buffer[n:, k:], buffer[:, k + r :]
        assert all(t.isnan().all() for t in beside), "written beside its place"


def test_transposed_parameters(device, dtype):
    a, b = torch.randn(6, 3, device=device).to(dtype).t(), torch.randn(3, 5, device=device).to(dtype).t()
    out_a, out_b = (poisoned(*t.shape, dtype=dtype, device=device) for t in (a, b))
    load_adapter(a, b, 0.5, out_a, out_b)
    assert torch.equal(out_a, a)
    assert_close(out_b, b.float() * 0.5, dtype)


@pytest.mark.parametrize("adapter", ["same", "float32"])
def test_a_loader_loads_all_and_sees_every_change(adapter, device, dtype):
    own = torch.float32 if adapter == "float32" else dtype
    items = []
    for n, k, r, scale in ((5, 7, 3, 1.5), (300, 20, 16, 2.0), (8, 3000, 2, 1.0)):
        a, b = torch.randn(r, k, device=device).to(own), torch.randn(n, r, device=device).to(own)
        buffer = poisoned(n + r, k + r + 2, dtype=dtype, device=device)
        items.append((a, b, scale, buffer[n:, :k], buffer[:n, k : k + r]))

    def check():
        for a, b, scale, out_a, out_b in items:
            wanted = load_adapter_reference(a, b, scale)
            assert_close(out_a, wanted[0], dtype)
            assert_close(out_b, wanted[1], dtype)
            out_a.fill_(float("nan"))
            out_b.fill_(float("nan"))

    loader = Loader()
    for _ in range(2):
        loader.load(items)
        check()
    items[0][0].add_(1.0)  # in place
    items[1] = (torch.randn_like(items[1][0]), *items[1][1:])  # another tensor
    items[2] = (*items[2][:2], 3.0, *items[2][3:])  # another scale
    loader.load(items)
    check()


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        load_adapter(torch.zeros(2, 3), torch.zeros(4, 2), 1.0, torch.zeros(3, 2), torch.zeros(4, 2))
