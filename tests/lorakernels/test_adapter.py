"""A and scale · B into strided views of the operand buffer, cast on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, poisoned
from lorakernels.ops import adapter as of_adapters
from lorakernels.ops.adapter import (
    MAX_RAISED,
    Loader,
    load_adapter,
    load_adapter_reference,
    raised_b,
    raised_b_reference,
)


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


def test_what_is_loaded_in_turns_is_planned_once(monkeypatch):
    planned = []
    monkeypatch.setattr(of_adapters, "_plan", planned.append)  # None: one by one
    made = [(torch.ones(2, 3), torch.ones(4, 2), 1.0, torch.zeros(2, 3), torch.zeros(4, 2)) for _ in range(2)]
    loader = Loader()
    for turn in (0, 1, 0, 1, 1):
        made[turn][3].zero_()
        loader.load(made[turn : turn + 1])
        assert made[turn][3].eq(1).all()
    assert len(planned) == 2
    for n in range(of_adapters.MOST_PLANS):  # another scale each time
        loader.load([(*made[0][:2], 2.0 + n, *made[0][3:])])
    assert len(loader._plans) <= of_adapters.MOST_PLANS


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        load_adapter(torch.zeros(2, 3), torch.zeros(4, 2), 1.0, torch.zeros(3, 2), torch.zeros(4, 2))


@pytest.mark.parametrize("sizes", [[(5, 3)], [(300, 16), (70, 0), (1, 2)], [(9, 70), (2, 1)]])
def test_raised_b(sizes, device):
    """Exactly a power of two for each column, which brings its norm to 1 to 2 and never down."""
    spread = [10.0 ** -torch.arange(r, device=device).remainder(9) for _, r in sizes]
    made = [torch.randn(n, r, device=device) * by for (n, r), by in zip(sizes, spread, strict=True)]
    members = [(b if b.shape[1] else None, b.shape[0], 0.5 + i) for i, b in enumerate(made)]
    rank = sum(r for _, r in sizes)
    sb, back = raised_b(members, rank + 3, torch.float16, torch.device(device))
    assert sb.shape == (sum(n for n, _ in sizes), rank + 3) and not back[rank:].any()
    wanted = torch.zeros(sb.shape, device=device)
    row = column = 0
    for b, n, scale in members:
        r = 0 if b is None else b.shape[1]
        if b is not None:
            here = slice(column, column + r)
            wanted[row : row + n, here], taken_back = raised_b_reference(b, scale)
            assert torch.equal(back[here], taken_back) and taken_back.log2().frac().eq(0).all()
            norms, before = wanted[row : row + n, here].norm(dim=0), (b * scale).norm(dim=0)
            assert ((norms >= 0.999) & (norms < 2.001) | (before > 1)).all() and (taken_back <= 1).all()
        row, column = row + n, column + r
    assert_close(sb, wanted, torch.float16)
    assert torch.equal(sb[wanted == 0], wanted[wanted == 0].half())


def test_raised_b_of_nothing(device):
    b = torch.zeros(4, 2, device=device)
    sb, back = raised_b([(b, 4, 2.0)], 2, torch.float16, torch.device(device))
    assert not sb.any() and (back >= 2.0**-MAX_RAISED).all()
