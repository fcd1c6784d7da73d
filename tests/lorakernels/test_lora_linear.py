"""LoRA linears that stand in no part that is known: fused by `apply` wherever they are, PEFT's own as soon as anything
is otherwise than at `apply`, and PEFT's own bits after `remove`.
"""

from __future__ import annotations

from copy import deepcopy

import lorakernels
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Odd(nn.Module):
    """A class of somebody's own, which has linears of the shapes of a gated MLP and is none."""

    def __init__(self, shared=False):
        super().__init__()
        self.first, self.last = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)
        self.again = nn.Linear(24, 40, bias=False)
        if shared:
            self.again.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + self.again(x))


def model(dtype=torch.float32, targets=("first", "last", "again"), shared=False, **lora):
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False, **lora)
    return get_peft_model(Odd(shared).to(dtype), config, autocast_adapter_dtype=False).to(dtype).train()


def step(made, dtype=torch.float32, rows=5):
    x = torch.randn(2, rows, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    made.zero_grad()
    y = made(x)
    y.float().square().sum().backward()
    return y.detach(), {"x": x.grad, **{n: p.grad for n, p in made.named_parameters() if p.grad is not None}}


def same(ours, plain, **kwargs):
    (y, grads), (wanted, wanted_grads) = step(ours, **kwargs), step(plain, **kwargs)
    assert y.dtype == wanted.dtype and grads.keys() == wanted_grads.keys()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    for name, grad in wanted_grads.items():
        largest = grad.abs().max().item() if grad.numel() else 0.0
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize(
    "lora", [{}, {"use_rslora": True}, {"rank_pattern": {"last": 7}}, {"bias": "lora_only"}], ids=str
)
def test_linears_of_any_model_are_fused(lora):
    plain = model(**lora)
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    assert report.counts == {"linear": 3} and [e.part for e in report.left] == ["mlp"]
    same(ours, plain)
    assert report.forwards.fused == {"linear": 3} and not report.forwards.left


def test_a_switch_leaves_them():
    report = lorakernels.apply(model(), linear=False)
    assert report.total == 0


def test_one_that_cannot_be_fused_does_not_hold_the_others_back():
    plain = model(targets=["first", "last"], shared=True)
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    (left,) = (e for e in report.left if e.part == "linear")
    assert left.name.endswith("first") and "another layer's" in left.reason and report.counts == {"linear": 1}
    same(ours, plain)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_output_has_the_dtype_of_peft_s(autocast):
    plain = model(torch.float32 if autocast else torch.bfloat16)
    ours = deepcopy(plain)
    lorakernels.apply(ours)
    x = torch.randn(2, 5, 24).to(plain.base_model.model.first.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, wanted = ours(x), plain(x)
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=0.03, atol=0.03)


def disabled(made):
    made.base_model.disable_adapter_layers()


def merged(made):
    made.merge_adapter()


def hooked_base(made):
    made.base_model.model.first.base_layer.register_forward_hook(lambda module, args, out: out * 2)


def hooked_adapter(made):
    made.base_model.model.last.lora_A["default"].register_forward_hook(lambda module, args, out: out * 2)


def hooked_itself(made):
    made.base_model.model.last.register_forward_hook(lambda module, args, out: out * 2)


def switched(made):
    torch.manual_seed(7)
    made.add_adapter("b", LoraConfig(r=3, target_modules=["first", "last"], init_lora_weights=False))
    made.set_adapter("b")


@pytest.mark.parametrize("change", [disabled, merged, hooked_base, hooked_adapter, switched], ids=lambda f: f.__name__)
def test_a_change_after_apply_is_peft_s(change):
    plain = model()
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    before, _ = step(plain)
    for made in (ours, plain):
        change(made)
    with pytest.warns(UserWarning, match="leaves forwards"):
        y, _ = step(ours)
    wanted, _ = step(plain)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert change is merged or not torch.allclose(wanted, before)
    assert report.forwards.left


def test_a_hook_on_the_linear_itself_runs_around_ours():
    plain = model()
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    for made in (ours, plain):
        hooked_itself(made)
    same(ours, plain)
    assert not report.forwards.left


def test_rows_of_different_adapters_are_peft_s():
    plain = model()
    plain.add_adapter("b", LoraConfig(r=3, target_modules=["first"], init_lora_weights=False))
    ours = deepcopy(plain)
    report = lorakernels.apply(ours)
    for made in (ours, plain):
        made.eval()
    x = torch.randn(2, 5, 24)
    with torch.no_grad(), pytest.warns(UserWarning, match="leaves forwards"):
        torch.testing.assert_close(ours(x, adapter_names=["b", "default"]), plain(x, adapter_names=["b", "default"]))
    assert report.forwards.left


def test_no_rows_at_all():
    plain = model()
    ours = deepcopy(plain)
    lorakernels.apply(ours)
    same(ours, plain, rows=0)


def test_remove_gives_peft_s_own_bits_back():
    plain = model()
    ours = deepcopy(plain)
    lorakernels.apply(ours)
    step(ours)
    lorakernels.remove(ours)
    (y, grads), (wanted, wanted_grads) = step(ours), step(plain)
    assert torch.equal(y, wanted) and all(torch.equal(grads[n], g) for n, g in wanted_grads.items())
    assert all(p.is_contiguous() for p in ours.parameters())
