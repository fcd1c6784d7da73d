"""LoRA as one GEMM over concatenated operands, against the formula in float64: every gradient, any rank, any mix.

In float64 a node takes torch's path; `test_the_whole_node` and those behind it have it run on Triton.
"""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, exhaustive_in_interpreter
from lorakernels import tune
from lorakernels.nodes.member import Member
from lorakernels.nodes.output_grad import SavedForward, output_gradient
from lorakernels.nodes.products import concat_product
from lorakernels.nodes.projection import Projection
from lorakernels.nodes.projection_node import project
from nodes import fix_seeds, leaves, masks_of, member, plain
from torch import nn


def compare(members, groups, x, dtype=torch.float64, times=1.0, seeds=None, **kw):
    ours, wide = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    got = project(ours, groups, **kw)
    wanted = plain(members, wide, None if seeds is None else masks_of(members, x, seeds))
    grad = torch.randn(got.shape, dtype=torch.float64).to(x.device)
    params = leaves(members)
    got_grads = torch.autograd.grad(got, [ours, *params], grad.to(got.dtype))
    wanted_grads = torch.autograd.grad(wanted, [wide, *params], grad)
    assert_close(got, wanted, dtype, times)
    for a, b, p in zip(got_grads, wanted_grads, [ours, *params], strict=True):
        assert a.dtype == p.dtype
        assert_close(a, b, dtype, times)


@pytest.mark.parametrize("form", ["one", "addmm", "apart"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("ranks", [(4, 4, 4), (1, 0, 7), (0, 0, 0), (3, 17, 256), (0, 5, 0)])
def test_every_gradient(form, merged, ranks):
    with tune.forced(form):
        members = [member(f"m{i}", n, 24, r, bias=i == 1, lora_bias=r == 7, scale=1.0 + i) for i, (n, r) in
                   enumerate(zip((8, 5, 12), ranks, strict=True))]  # fmt: skip
        groups = [Projection(members)] if merged else [Projection([m]) for m in members]
        compare(members, groups, torch.randn(2, 3, 24, dtype=torch.float64))
        assert all(g.owns_weights() for g in groups)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("adapters", ["same", "float32"])
def test_low_precision(name, adapters):
    dtype = getattr(torch, name)
    members = [
        member("a", 16, 40, 8, dtype, torch.float32 if adapters == "float32" else dtype, bias=True) for _ in "ab"
    ]
    compare(members, [Projection(members)], torch.randn(9, 40).to(dtype), dtype, 3)


def test_one_gemm_and_merge_are_toggles():
    members = [member("a", 6, 10, 2), member("b", 4, 10, 3)]
    compare(members, [Projection(members, one_gemm=False)], torch.randn(5, 10, dtype=torch.float64))
    compare(members, [Projection([m], one_gemm=False) for m in members], torch.randn(5, 10, dtype=torch.float64))


@pytest.mark.parametrize("merged", [True, False])
def test_dropout_with_a_mask_for_each_projection(merged, monkeypatch):
    members = [member("a", 6, 10, 2, p=0.3), member("b", 4, 10, 3, p=0.0), member("c", 5, 10, 3, p=0.6)]
    groups = [Projection(members)] if merged else [Projection([m]) for m in members]
    seeds = fix_seeds(monkeypatch, members)
    compare(members, groups, torch.randn(7, 10, dtype=torch.float64), seeds=seeds)


def compare_on(device, dtype, form, ranks, m, merged, p, monkeypatch):
    """The widths let one read of dY give dS and dB."""
    members = [
        member("a", 64, 40, ranks[0], dtype, bias=True, device=device, p=p),
        member("b", 128, 40, ranks[1], dtype, scale=0.5, lora_bias=True, device=device, p=p * 2),
    ]
    groups = [Projection(members)] if merged else [Projection([x]) for x in members]
    seeds = fix_seeds(monkeypatch, members, device) if p else None
    with tune.forced(form):
        compare(members, groups, torch.randn(m, 40, device=device).to(dtype), dtype, 4, seeds)


@pytest.mark.parametrize("form", ["one", "addmm", "apart", "plain"])
@pytest.mark.parametrize(
    "ranks, m, merged", [((17, 17), 37, True), ((1, 7), 37, True), ((256, 3), 37, False), ((17, 17), 1, False)]
)
def test_the_whole_node(form, ranks, m, merged, device, dtype, monkeypatch):
    """Where Triton runs; "plain" stands for library calls instead of the kernels with a dot."""
    compare_on(device, dtype, form, ranks, m, merged, 0.0, monkeypatch)


@pytest.mark.parametrize(
    "form, ranks, m, merged",
    [
        ("one", (17, 17), 37, True),
        exhaustive_in_interpreter("addmm", (1, 7), 1, False),
        ("apart", (256, 3), 37, True),
        exhaustive_in_interpreter("plain", (7, 17), 9, False),
    ],
)
def test_the_whole_node_with_dropout(form, ranks, m, merged, device, dtype, monkeypatch):
    """A few of them only: the interpreter spends a second or two on the masks of one."""
    compare_on(device, dtype, form, ranks, m, merged, 0.3, monkeypatch)


def test_every_member_draws_a_mask_of_its_own(device):
    """Through the result, with the seeds that the node draws itself: no frozen weight, A and B one, ones as input."""
    members = [member(name, 16, 16, 16, torch.float32, scale=1.0, p=0.5, device=device) for name in "qkv"]
    with torch.no_grad():
        for m in members:
            m.weight.zero_()
            m.a.copy_(torch.eye(16))
            m.b.copy_(torch.eye(16))
    x = torch.ones(37, 16, device=device)
    seeds = Projection(members).seeds(x.device)
    assert len(seeds.unique()) == 3
    for groups in ([Projection(members)], [Projection([m]) for m in members]):
        first, second = ((project(x, groups) != 0).split(16, -1) for _ in range(2))
        masks = [*first, *second]
        assert all(0.3 < mask.float().mean() < 0.7 for mask in masks)
        assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_only_what_the_one_gemm_needs_is_copied(monkeypatch):
    """X and dY from elsewhere stay where they are if no GEMM reads them beside S and dS."""
    group, dy = Projection([member("a", 6, 10, 2)]), torch.randn(5, 6, dtype=torch.float64)
    saved = SavedForward(group.operand(torch.float64), torch.randn(5, group.p, dtype=torch.float64))
    assert output_gradient(group, dy, saved).both is not None
    dropped = replace(saved, seeds=torch.tensor([1]))
    for apart in (output_gradient(group, dy, dropped), output_gradient(group, dy, saved, with_dx=False)):
        assert apart.both is None and apart.dy.data_ptr() == dy.data_ptr()
        assert_close(apart.ds, dy @ saved.op.sb, torch.float64)
    monkeypatch.setattr(tune, "pick", lambda name, key, forms, device: list(forms)[-1])
    assert output_gradient(group, dy, saved).both is None


def test_dropout_is_off_in_evaluation_and_random_in_training():
    members = [member("a", 6, 30, 4, p=0.0)]
    groups, x = [Projection(members)], torch.randn(7, 30, dtype=torch.float64)
    assert_close(project(x, groups), plain(members, x), torch.float64)
    members[0].dropout = 0.5  # the model's linear reads it anew on each forward
    assert not torch.equal(project(x, groups), project(x, groups))


def test_weights_are_stored_once_and_given_back():
    members = [member("a", 6, 10, 2), member("b", 4, 10, 3)]
    before, objects = [m.weight.detach().clone() for m in members], [m.weight for m in members]
    group = Projection(members)
    group.adopt()
    assert group.owns_weights()
    assert members[0].weight.untyped_storage().data_ptr() == members[1].weight.untyped_storage().data_ptr()
    assert all(torch.equal(m.weight, b) for m, b in zip(members, before, strict=True))
    group.release()
    assert all(m.weight.is_contiguous() and m.weight is o for m, o in zip(members, objects, strict=True))
    assert all(torch.equal(m.weight, b) for m, b in zip(members, before, strict=True))
    assert group.buffer is None


def test_nothing_keeps_the_buffer_once_it_is_given_back():
    group = Projection([member("a", 6, 5, 2), member("b", 4, 5, 3)])
    group.adopt()
    project(torch.randn(3, 5, dtype=torch.float64), [group])
    place = group.buffer.untyped_storage().data_ptr()
    group.release()
    kinds = torch.Tensor, torch.nn.Parameter  # fake tensors that torch.compile left in this process have no storage
    tensors = [t for t in gc.get_objects() if type(t) in kinds]
    assert not [t for t in tensors if t.untyped_storage().data_ptr() == place]


def test_replaced_weights_and_stepped_adapters_are_seen():
    members = [member("a", 6, 10, 2), member("b", 4, 10, 3)]
    group, x = Projection(members), torch.randn(5, 10, dtype=torch.float64)
    project(x, [group])
    members[0].weight.data = torch.randn(6, 10, dtype=torch.float64)  # what a safe merge does
    members[0].b.data.add_(1.0)  # no version counter moves
    assert_close(project(x, [group]), plain(members, x), torch.float64)


def test_backward_uses_what_forward_used():
    """Another adapter's forward between a forward and its backward must not change the gradient."""
    first, x = member("a", 6, 10, 2), torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    group = Projection([first])
    y = project(x, [group])
    (wanted,) = torch.autograd.grad(plain([first], x).sum(), x)
    (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_close(got, wanted, torch.float64)
    assert torch.equal(got, torch.autograd.grad(y.sum(), x)[0])
    y = project(x, [group])
    with torch.no_grad():
        first.a.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_casts_the_weights():
    members = [member("a", 16, 24, 4, torch.float32)]
    x = torch.randn(6, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = project(x, [Projection(members)])
    assert y.dtype == torch.bfloat16
    assert_close(y, plain(members, x.double()), torch.bfloat16, 2)


@given(
    m=st.integers(0, 6),
    k=st.integers(1, 20),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=3),
    seed=st.integers(0, 50),
)
@settings(max_examples=15, deadline=None)
def test_any_shape(m, k, sizes, seed):
    torch.manual_seed(seed)
    members = [member(str(i), n, k, r) for i, (n, r) in enumerate(sizes)]
    compare(members, [Projection(members)], torch.randn(m, k, dtype=torch.float64))


def test_measuring_the_forms_adds_to_the_result_once(monkeypatch):
    """The result may be the very tensor that is added to; measuring runs every form, on a copy of it."""
    group, x = Projection([member("a", 6, 20, 4)]), torch.randn(5, 20, dtype=torch.float64)
    op, total = group.operand(torch.float64), torch.randn(5, 6, dtype=torch.float64)
    xs = torch.cat((x, x @ op.a.t()), 1)
    wanted = total + plain(group.members, x)

    def measured(name, key, forms, device, spare):
        given = spare()
        for run in forms.values():
            run(*given)
        return "addmm"

    monkeypatch.setattr(tune, "pick", measured)
    assert concat_product(group, xs, op, out=total, residual=total) is total
    assert_close(total, wanted, torch.float64)


def test_one_adapter_has_64_spare_columns_where_the_input_is_wide():
    def group(k):
        return Projection([member("a", 4, k, 16)])

    assert (group(2048).p, group(14336).p, group(1536).p) == (64, 64, 16)


def test_gradcheck():
    members = [member("a", 4, 5, 2, lora_bias=True), member("b", 3, 5, 0)]
    group, x = Projection(members), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: project(x, [group]), (x, *leaves(members)))


def test_wrong_shapes():
    with pytest.raises(ValueError, match="share an input"):
        Projection([member("a", 4, 5, 2), member("b", 4, 6, 2)])
    with pytest.raises(ValueError, match=r"\(2, 7\)"):
        project(torch.zeros(2, 7), [Projection([member("a", 4, 5, 2)])])
    with pytest.raises(ValueError, match="lora_A"):
        Member("a", nn.Parameter(torch.zeros(4, 5)), a=torch.zeros(2, 6), b=torch.zeros(4, 2))
