"""FP8 GEMMs of a frozen weight: against the emulation, and the error against the exact product."""

from copy import deepcopy
from types import SimpleNamespace

import lorakernels
import pytest
import torch
from kernel_checks import assert_close, strided
from lorakernels import tune
from lorakernels.nodes import fp8
from lorakernels.nodes.member import Member
from lorakernels.nodes.mlp_node import gated_mlp
from lorakernels.nodes.projection import Projection
from lorakernels.ops import quantized_glu
from lorakernels.ops.quantize_rows import quantize_rows_reference
from lorakernels.ops.rms_norm import Norm, rms_norm_reference
from nodes import fix_seeds, member
from tiny_models import batch, build, step, worst


def relative(actual, wanted):
    return ((actual.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("m, n, k", [(64, 48, 32), (16, 16, 128)])
def test_error_of_both_directions(m, n, k, device):
    weight = torch.randn(n, k, device=device).bfloat16()
    if device == "cuda" and fp8.supported(weight.device):
        pytest.skip(fp8.supported(weight.device))
    frozen = fp8.FrozenFp8()
    x, dy = torch.randn(m, k, device=device).bfloat16(), torch.randn(m, n, device=device).bfloat16()
    assert 0.005 < relative(frozen.forward(x, weight), x.double() @ weight.double().t()) < 0.05
    assert 0.005 < relative(frozen.backward(dy, weight), dy.double() @ weight.double()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_directions_are_those_of_the_emulated_product(dtype, device):
    """To the accumulation's error, which a tolerance for e4m3 would hide, at a K as long as an 8B's; the weight is a
    view into a wider buffer, its rows are of sizes a thousand times apart."""
    if device == "cuda" and (reason := fp8.supported(torch.device(device))):
        pytest.skip(reason)
    m, n, k = (32, 48, 14336) if device == "cuda" else (8, 16, 1024)
    sizes = torch.logspace(-3, 0, n, device=device)[:, None]
    weight = strided((torch.randn(n, k, device=device) * sizes).to(dtype), 16)
    x, dy = torch.randn(m, k, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)

    def back(x):
        q, scale = quantize_rows_reference(x)
        return q.double() * scale.double()

    frozen, wq = fp8.FrozenFp8(), back(weight)
    out = torch.zeros(m, n, device=device, dtype=dtype)
    got = frozen.forward(x, weight, bias, out)
    assert got is out and relative(got, back(x) @ wq.t() + bias.double()) < 0.01
    apart = strided(out.clone(), 8)
    assert torch.equal(frozen.forward(x, weight, bias, apart), got) and apart.stride(0) != n
    # A scale of W's row is a factor of dY's column there, and dY is rounded behind it.
    scale = quantize_rows_reference(weight).scale
    gold = back(dy.float() * scale[:, 0]) @ (wq / scale.double())
    assert relative(frozen.backward(dy, weight), gold) < 0.01
    assert relative(frozen.backward(dy, weight), dy.double() @ weight.double()) < 0.05


def test_a_quantized_base_is_left_as_it_is_with_the_reason():
    state = SimpleNamespace(shape=(4, 8), dtype=torch.bfloat16)
    member = Member("q_proj", torch.nn.Parameter(torch.zeros(16, 1), requires_grad=False), quantized=state)
    assert fp8.why_not([member]) == "its base is quantized already"
    assert Projection([member], fp8=True).fp8 is None
    dense = Member("q_proj", torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False))
    assert fp8.why_not([dense]) is None
    assert Projection([dense], fp8=True).fp8 is not None


class Emulated(torch.autograd.Function):
    """A frozen linear as `FrozenFp8` computes it, in plain torch. x: (…, K), w: (N, K), bias: (N,) or None."""

    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.w = w
        (xq, sx), (wq, sw) = quantize_rows_reference(x), quantize_rows_reference(w)
        y = (xq.float() * sx) @ (wq.float() * sw).t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        wq, sw = quantize_rows_reference(ctx.w)
        q, scale = quantize_rows_reference(dy * sw[:, 0])
        return (q.float() * scale) @ wq.float(), None, None


@pytest.mark.parametrize("merged, alike", [(True, True), (True, False), (False, False)])
def test_an_mlp_is_that_of_the_emulated_products(merged, alike):
    """Output and every gradient, with a residual; what is merged has one scale a row of dY. alike: all ranks, and there
    are no biases, so that dY is quantized on the way."""
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*s, requires_grad=True) for s in ((2, 5, 32), (2, 5, 32), (32,)))
    first = [member(n, 48, 32, 3, torch.float32, bias=not alike) for n in "gu"]
    down = member("d", 32, 48, 3 if alike else 4, torch.float32)
    parts = [first] if merged else [[m] for m in first]
    groups = [Projection(part, fp8=True) for part in parts]
    last = Projection([down], fp8=True)
    got = gated_mlp(
        x, groups, last, "silu", norm=Norm(1e-6), norm_weight=weight, residual=residual, add=True
    )  # fmt: skip

    def linear(members, x):
        w = torch.cat([m.weight for m in members])
        bias = None if members[0].bias is None else torch.cat([m.bias for m in members])
        adapters = [m.scale * (x @ m.a.t() @ m.b.t()) for m in members]
        return Emulated.apply(x, w, bias) + torch.cat(adapters, -1)

    normed, h = rms_norm_reference(x, weight, residual=residual)
    gate, up = torch.cat([linear(part, normed) for part in parts], -1).chunk(2, -1)
    wanted = linear([down], torch.nn.functional.silu(gate) * up) + h
    inputs = [x, residual, weight, *(t for m in (*first, down) for t in (m.a, m.b))]
    grad = torch.randn_like(wanted)
    results = [(y, *torch.autograd.grad(y, inputs, grad)) for y in (got, wanted)]
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 0.01


@pytest.mark.parametrize("dropped", ["none", "gate and up", "down"])
def test_both_forms_of_an_mlp_make_the_same_numbers(dropped, monkeypatch, device, dtype):
    """Quantized on the way or afterwards: a GPU takes the faster one."""
    if device == "cuda" and (reason := fp8.supported(torch.device(device))):
        pytest.skip(reason)
    p, q = (0.3 if dropped == name else 0.0 for name in ("gate and up", "down"))
    first = [member(n, 48, 32, 3, dtype, p=p, device=device) for n in "gu"]
    last = member("d", 32, 48, 3, dtype, p=q, device=device)
    fix_seeds(monkeypatch, [*first, last], device)
    x = torch.randn(2, 5, 32, device=device).to(dtype).requires_grad_()
    weight = torch.randn(32, device=device).to(dtype)
    inputs = [x, *(t for m in (*first, last) for t in (m.a, m.b))]
    grad, results, calls = torch.randn(2, 5, 32, device=device).to(dtype), {}, []
    for name in ("forward", "backward"):
        run = getattr(quantized_glu, name)
        monkeypatch.setattr(quantized_glu, name, lambda *a, run=run, name=name: calls.append(name) or run(*a))
    for form in ("fused_small", "whole_short", "plain"):
        groups, down = [Projection(first, fp8=True)], Projection([last], fp8=True)
        with tune.forced(form):
            y = gated_mlp(x, groups, down, "silu", norm=Norm(1e-6), norm_weight=weight, residual=x, add=True)
            results[form] = (y, *torch.autograd.grad(y, inputs, grad))
        before, calls[:] = list(calls), []
        assert form != "plain" or not before, "the plain form is quantized on the way"
        if device == "cpu" and form != "plain" and dropped != "down":
            assert before == ["forward", "backward"], before
    wanted = results.pop("plain")
    for got in results.values():
        for a, b in zip(got, wanted, strict=True):
            # A sum that rounds to another neighbour moves some elements to another number of e4m3, too.
            assert relative(a, b) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("family, attention", [("llama", True), ("qwen2", True), ("llama", False)])
def test_a_whole_model_is_that_of_the_emulated_products(family, attention):
    """Loss and every gradient to 1 %: a tolerance for e4m3 would hide a wrong column or a lost residual. Nothing is
    merged, so that each row of dY has a scale for each linear."""
    ours = build(family)
    plain = deepcopy(ours)
    loras = [m for n, m in plain.named_modules() if hasattr(m, "base_layer") and (attention or "mlp" in n)]
    for linear in (m.base_layer for m in loras):
        linear.forward = lambda x, m=linear: Emulated.apply(x, m.weight, m.bias)
    loss, gradients = step(plain, batch())
    lorakernels.apply(ours, fp8=True, fp8_attention=attention, merge_projections=False)
    got_loss, got = step(ours, batch())
    assert lorakernels.status(ours).fused["layer"] == 2
    assert float(got_loss) == pytest.approx(float(loss), rel=1e-3)
    assert worst(got, gradients) < 0.01


@pytest.mark.parametrize("merged, off", [(True, 0.05), (False, 0.01)])
def test_linears_that_are_excepted_stay_in_the_compute_dtype(merged, off):
    """v beside q and k in FP8, and up beside gate: what is merged has one form, and one scale a row of dY."""
    kept = ("v_proj", "o_proj", "up_proj")
    ours = build("llama")
    with pytest.raises(ValueError, match=r"fp8_except has names that no module of the model has: \['v'\]"):
        lorakernels.apply(ours, fp8=True, fp8_except="v")
    plain = deepcopy(ours)
    loras = [m for n, m in plain.named_modules() if hasattr(m, "base_layer") and not n.endswith(kept)]
    for linear in (m.base_layer for m in loras):
        linear.forward = lambda x, m=linear: Emulated.apply(x, m.weight, m.bias)
    lorakernels.apply(ours, fp8=True, fp8_except=kept, merge_projections=merged)
    layers = [m._lorakernels for m in ours.modules() if hasattr(m.__dict__.get("_lorakernels"), "groups")]
    forms = {m.name.rpartition(".")[2]: g.fp8 is not None for p in layers for g in p.groups for m in g.members}
    assert forms == {n: n not in kept for n in forms} and len(forms) == 7
    loss, gradients = step(plain, batch())
    got_loss, got = step(ours, batch())
    assert lorakernels.status(ours).fused["layer"] == 2
    assert float(got_loss) == pytest.approx(float(loss), rel=1e-3) and worst(got, gradients) < off


@pytest.mark.parametrize("write", ["in place", "through data", "another tensor"])
def test_weights_that_change_are_seen(write):
    """PEFT merges through `.data`, which changes neither the version nor, without a check for NaN, the address."""
    member = Member("q_proj", torch.nn.Parameter(torch.randn(16, 32), requires_grad=False))
    frozen, x, dy = Projection([member], fp8=True), torch.randn(4, 32), torch.randn(4, 16)

    def products():
        op = frozen.operand(torch.float32)
        return frozen.fp8.forward(x, op.w), frozen.fp8.backward(dy, op.w)

    y, dx = products()
    if write == "in place":
        member.weight.mul_(2)
    elif write == "through data":
        member.weight.data.mul_(2)
    else:
        member.weight.data = 2 * member.weight.data
    twice = products()
    torch.testing.assert_close(twice, (2 * y, 2 * dx))


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
    operands = fp8.quantize_rows(x), fp8.quantize_rows(w)
    try:
        got = fp8.scaled_mm(*operands, dtype)
    except RuntimeError as error:
        if "per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("this torch has no product with scales of rows on a CPU")
    assert_close(got, fp8.fp8_mm_reference(*operands, torch.float64), torch.bfloat16 if device == "cuda" else dtype)
    assert torch.equal(got, got.bfloat16().to(dtype)) == (dtype == torch.bfloat16)
