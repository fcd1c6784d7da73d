"""Single LoRA linears: PEFT's numbers, everything that PEFT must do itself left to it, and the way back."""

from copy import deepcopy

import pytest
import torch
from kernel_checks import assert_close
from lorakernels.model.linear import apply_linears, apply_normed, remove_linears
from peft import LoraConfig, get_peft_model
from tiny_models import share_masks
from torch import nn

K, N = 24, 40


class Two(nn.Module):
    """Two linears in a module that `lorakernels.apply` has never heard of."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def model(targets=("up", "down"), **kwargs):
    torch.manual_seed(0)
    made = get_peft_model(Two().double(), LoraConfig(r=3, target_modules=list(targets), **kwargs))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    return made.double()


def results(made, x):
    x = x.clone().requires_grad_()
    y = made(x)
    y.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    return {"y": y.detach(), "x": x.grad, **grads}


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture
def x():
    return torch.randn(2, 5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("one_gemm", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"bias": "lora_only"}, {"lora_bias": True}, {"use_rslora": True}])
def test_outputs_and_all_gradients_are_peft_s(x, one_gemm, kwargs):
    made = model(**kwargs)
    wanted = results(made, x)
    report = apply_linears(made, one_gemm=one_gemm)
    assert report.counts == {"linear": 2} and not report.left
    same(results(made, x), wanted)


@pytest.mark.parametrize("ranks, dropout", [({"up": 256, "down": 1}, 0.0), ({"up": 17}, 0.3)])
def test_on_its_device_in_its_dtype(x, ranks, dropout, device, dtype, monkeypatch):
    made = model(rank_pattern=ranks, lora_dropout=dropout).to(device, dtype)
    wide, x = deepcopy(made).double(), x.to(device, dtype)
    share_masks(wide, monkeypatch)
    wanted = results(wide, x.double())
    assert apply_linears(made).total == 2
    got = results(made, x)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_close(got[name], wanted[name], dtype, 4)


def test_one_gemm_keeps_of_a_young_adapter_what_bfloat16_swallows_behind_a_rounded_base():
    """The share of an adapter's own product that reaches the output, B as it is after AdamW's first update."""
    torch.manual_seed(0)
    made = get_peft_model(Two().bfloat16(), LoraConfig(r=3, target_modules=["up"]))
    linear = made.base_model.model.up
    x = torch.randn(512, K, dtype=torch.bfloat16)
    a, b = (getattr(linear, name)["default"].weight for name in ("lora_A", "lora_B"))

    def share():
        with torch.no_grad():
            b.zero_()
            base = linear(x)
            b.copy_(2e-4 * torch.randn(b.shape, generator=torch.Generator().manual_seed(1)).sign())
            added, exact = (
                (linear(x) - base).double(),
                linear.scaling["default"] * (x.double() @ a.double().t() @ b.double().t()),
            )
        return float((added * exact).sum() / exact.square().sum())

    plain = share()
    shares = {}
    for one_gemm in (True, False):
        apply_linears(made, one_gemm=one_gemm)
        shares[one_gemm] = share()
        remove_linears(made)
    assert plain < 0.7 and shares[False] < 0.7, "rounded, then added to, and rounded again"
    assert shares[True] == pytest.approx(1, abs=0.1)


def test_remove_gives_back_what_there_was(x):
    made = model()
    wanted, state = results(made, x), {n: t.clone() for n, t in made.state_dict().items()}
    apply_linears(made)
    remove_linears(made)
    linears = [m for m in made.modules() if hasattr(m, "lora_A")]
    assert all("forward" not in m.__dict__ and m.base_layer.weight.is_contiguous() for m in linears)
    assert made.state_dict().keys() == state.keys()
    same(results(made, x), wanted)
    assert apply_linears(made).total == 2  # and once more


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(K, 1e-6), nn.Linear(K, N, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize("one_gemm", [True, False])
def test_a_linear_behind_its_norm_is_one_node_and_can_be_undone(x, one_gemm):
    torch.manual_seed(0)
    made = get_peft_model(Normed().double(), LoraConfig(r=3, target_modules=["linear"])).double()
    nn.init.normal_(made.get_parameter("base_model.model.linear.lora_B.default.weight"), 0, 0.3)
    wanted, base = results(made, x), made.get_base_model()
    assert apply_normed(base, one_gemm=one_gemm).counts == {"linear": 1, "rms_norm": 1}
    same(results(made, x), wanted)
    assert base(x).grad_fn.name() == "ProjectBackward"
    with made.disable_adapter():
        torch.testing.assert_close(base(x), base.linear.base_layer(base.norm(x)))
    remove_linears(made)
    assert base(x).grad_fn.name() != "ProjectBackward" and base.linear.base_layer.weight.is_contiguous()
    same(results(made, x), wanted)


def test_what_is_switched_off_or_merged_afterwards_is_peft_s(x):
    made = model()
    apply_linears(made)
    with made.disable_adapter(), torch.no_grad():
        bare = made(x)
    wide = Two().double()
    wide.load_state_dict({n.replace(".base_layer", ""): t for n, t in made.base_model.model.state_dict().items()
                          if "lora" not in n})  # fmt: skip
    torch.testing.assert_close(bare, wide(x).detach())
    with torch.no_grad():
        before = made(x)
        made.merge_adapter()
        torch.testing.assert_close(made(x), before)
        assert not torch.allclose(before, bare)


def test_what_is_not_known_is_left_with_the_reason(x):
    made = model(use_dora=True)
    report = apply_linears(made)
    assert report.total == 0
    assert [(entry.name.rpartition(".")[2], entry.part) for entry in report.left] == [
        ("up", "linear"),
        ("down", "linear"),
    ]
    assert "Dora" in report.left[0].reason
    twice = model(targets=["up"])
    assert apply_linears(twice).total == 1
    again = apply_linears(twice)
    assert again.total == 0 and "replaced forward" in again.left[0].reason


def test_dropout_draws_anew_in_training_and_not_in_evaluation(x):
    made = model(lora_dropout=0.5)
    apply_linears(made)
    with torch.no_grad():
        assert not torch.equal(made(x), made(x))
        made.eval()
        assert torch.equal(made(x), made(x))
