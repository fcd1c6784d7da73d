"""The logits that a training forward gives back are a Tensor to everybody, and are made when somebody looks."""

import copy
import io

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import concatenate, convert_to_fp32, pad_across_processes, recursively_apply
from lorakernels.model.lazy_logits import LazyLogits, lazy_logits
from pairs import assert_like_peft, pair
from tiny_models import batch
from torch.nn import functional as F
from torch.utils._pytree import tree_map


def logits_of(softcap=None, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight, b = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((2, 3, 4), (7, 4), (7,)))
    leaves = [hidden, weight, *([b] if bias else [])]
    z = F.linear(hidden, weight, b if bias else None)
    wanted = z if softcap is None else softcap * torch.tanh(z / softcap)
    return lazy_logits(hidden, weight, b if bias else None, softcap), wanted, leaves


@pytest.fixture
def made(monkeypatch):
    """How often logits were made."""
    calls, own = [], LazyLogits.materialize
    monkeypatch.setattr(LazyLogits, "materialize", lambda self: (calls.append(1), own(self))[1])
    return calls


def test_outputs_that_are_gathered_and_mapped(made):
    ours, plain = pair()
    got, wanted = (dict(m(**batch(), use_cache=False)) for m in (ours, plain))
    assert isinstance(got["logits"], torch.Tensor)
    for use in (
        lambda out: tree_map(lambda t: t.detach(), out),
        lambda out: recursively_apply(lambda t: t.detach(), out, error_on_other_type=True),
        lambda out: tree_map(lambda t: t.to(torch.bfloat16), out),
        lambda out: convert_to_fp32(out),
    ):
        mapped, like = use(got)["logits"], use(wanted)["logits"]
        assert (mapped.shape, mapped.dtype) == (like.shape, like.dtype) and not made
        torch.testing.assert_close(mapped + 0, like, rtol=1e-2, atol=1e-2)
        made.clear()
    accelerator = Accelerator(cpu=True)
    logits = [out["logits"].detach() for out in (got, wanted)]
    for use in (accelerator.gather_for_metrics, pad_across_processes, lambda t: concatenate([t, t])):
        torch.testing.assert_close(use(logits[0]) + 0, use(logits[1]))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients(softcap, bias):
    got, wanted, leaves = logits_of(softcap, bias)
    weight = torch.randn(got.shape, dtype=got.dtype)
    ours = torch.autograd.grad((got.log_softmax(-1) * weight).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad((wanted.log_softmax(-1) * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_gradients_through_somebody_s_own_function():
    """An autograd.Function of a loss on logits (Liger's, say) sees Tensors only."""
    assert_like_peft(*pair(), lambda model: Square.apply(model(**batch()).logits).mean())


def test_values_however_they_are_asked_for():
    got, wanted, _ = logits_of()
    torch.testing.assert_close(torch.from_numpy(got.detach().numpy()), wanted)
    assert got.tolist() == wanted.tolist() and got[0, 0, 0].item() == wanted[0, 0, 0].item()
    with pytest.raises(RuntimeError, match="detach"):
        got.numpy()
    assert "LazyLogits" in repr(got)
    torch.testing.assert_close(copy.deepcopy(got), wanted.detach())
    stored = io.BytesIO()
    torch.save(got.detach(), stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored), wanted.detach())
    torch.testing.assert_close(torch.cat([got, got]), torch.cat([wanted, wanted]))
    assert [row.shape for row in got] == [row.shape for row in wanted]


def test_what_is_written_in_place():
    got, wanted, _ = logits_of()
    with torch.no_grad():
        for t in (got, wanted):
            t.div_(2)
            t[..., 0] = 1
            t += 1
    assert isinstance(got, LazyLogits)
    torch.testing.assert_close(got + 0, wanted + 0)


def test_in_another_dtype_they_are_rounded_once(made):
    got, wanted, leaves = logits_of(dtype=torch.float16)
    wide = got.float()
    assert wide.dtype == torch.float32 and not made
    assert torch.equal(wide + 0, wanted.float())
    assert torch.autograd.grad(wide.sum(), leaves[0])[0].dtype == torch.float16


@pytest.mark.parametrize("num_items", [None, 7])
def test_the_loss_has_a_gradient_by_the_logits(made, num_items):
    """As plain PEFT's does; and whoever trains neither makes them nor feels that edge."""
    ours, plain = pair()
    inputs = batch() | ({} if num_items is None else {"num_items_in_batch": num_items})
    got, wanted = (m(**inputs, use_cache=False) for m in (ours, plain))
    torch.testing.assert_close(
        torch.autograd.grad(got.loss, got.logits, retain_graph=True)[0],
        torch.autograd.grad(wanted.loss, wanted.logits, retain_graph=True)[0],
    )  # fmt: skip
    made.clear()
    got.loss.backward()
    wanted.loss.backward()
    like = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    for n, p in ours.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, like[n], rtol=1e-4, atol=1e-6)
    assert not made

    again = ours(**inputs, use_cache=False)
    trained = [p for p in ours.parameters() if p.requires_grad]
    for found, p in zip(torch.autograd.grad(again.loss, trained, retain_graph=True), trained, strict=True):
        torch.testing.assert_close(found, p.grad)
    (d_logits,) = torch.autograd.grad(again.loss, again.logits, retain_graph=True)
    for found, p in zip(torch.autograd.grad(again.logits, trained, d_logits), trained, strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-6)


def test_behind_the_loss_own_backward_the_values_are_there_and_the_graph_is_not():
    """As of any graph that is not retained; the hidden states would stay as long as the loss does."""
    ours, plain = pair()
    got, wanted = (m(**batch(), use_cache=False) for m in (ours, plain))
    got.loss.backward()
    torch.testing.assert_close(got.logits.detach() + 0, wanted.logits.detach(), rtol=1e-4, atol=1e-5)
    for of in (got.loss, got.logits.sum()):
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            torch.autograd.grad(
                of, got.logits if of is got.loss else next(p for p in ours.parameters() if p.requires_grad)
            )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_are_made_in_chunks_that_divide_nothing(softcap, dtype, monkeypatch):
    """Of 6 rows 4 at a time; nothing but the result is as large as all of them."""
    whole, _, leaves = logits_of(softcap)
    wanted = whole.detach().to(dtype) + 0
    monkeypatch.setattr("lorakernels.model.lazy_logits.CHUNK", 4 * 7 + 3)
    sizes, own = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *a: (sizes.append(a[0].shape[0]), own(*a))[1])
    got = lazy_logits(*leaves, softcap).detach().to(dtype) + 0
    assert sizes == [4, 2] and got.shape == (2, 3, 7) and got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
