"""Float16 with float32 adapters: the gradients of young adapters, whose s·B float16 can hardly hold."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels import tune
from tiny_models import batch, build, gradients, share_masks

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def young(std, **lora):
    """A model in float16 with float32 adapters whose B has this standard deviation."""
    model = build("llama", torch.float16, autocast_adapter_dtype=True, sizes=SIZES, **lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * std)
    return model


def gradients_of(model, device, autocast=False, loss_scale=1.0):
    model.zero_grad(set_to_none=True)
    data = {n: t.to(device) for n, t in batch(4, 16).items()}
    with torch.autocast(device, torch.float16, enabled=autocast):
        loss = model(**data).loss
    (loss * loss_scale).backward()
    return {n: g.double() / loss_scale for n, g in gradients(model).items()}


def worst(got, gold, part):
    """Largest relative error (Frobenius norm) of a gradient of this part."""
    return max(((got[n] - gold[n]).norm() / gold[n].norm()).item() for n in gold if part in n)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "std", [n if n in (1e-2, 1e-5, 1e-7) else pytest.param(n, marks=pytest.mark.exhaustive) for n in
            (1e-2, 1e-4, 1e-5, 1e-6, 1e-7)],
)  # fmt: skip
@pytest.mark.parametrize("form", ["one", "apart"])
def test_gradients_of_young_adapters(std, form, device):
    """Against float64. Without a loss scale dY itself has few bits, which is PEFT's error as well as ours."""
    plain = young(std).to(device)
    ours, gold = deepcopy(plain), gradients_of(deepcopy(plain).double(), device)
    lorakernels.apply(ours)
    for autocast, loss_scale in ((False, 1.0), (True, 1024.0)):
        with tune.forced(form):
            got = gradients_of(ours, device, autocast, loss_scale)
        wanted = gradients_of(plain, device, autocast, loss_scale)
        for part in ("lora_A", "lora_B"):
            assert worst(got, gold, part) < 1.5 * worst(wanted, gold, part), (part, autocast)


@pytest.mark.parametrize("merge", [True, False])
def test_young_adapters_with_dropout_and_other_ranks(merge, monkeypatch):
    plain = young(1e-6, lora_dropout=0.2, rank_pattern={"q_proj": 7, "up_proj": 2})
    gold_model, ours = deepcopy(plain).double(), deepcopy(plain)
    for model in (plain, gold_model):
        share_masks(model, monkeypatch)
    lorakernels.apply(ours, merge_projections=merge)
    gold, got, wanted = (gradients_of(m, "cpu") for m in (gold_model, ours, plain))
    # The dropped input is rounded to float16 here, not in PEFT.
    assert worst(got, gold, "lora_A") < 3 * worst(wanted, gold, "lora_A")


def test_a_grown_adapter_is_left_as_it_is():
    """Columns of a norm above 1 are not raised, so a loss scale overflows where it did."""
    model = young(0.5)
    lorakernels.apply(model)
    attention = model.base_model.model.model.layers[0]._lorakernels.attention
    raised = attention.qkv.groups[0].raised_b(torch.float16)
    assert raised is not None and (raised.back[: attention.qkv.groups[0].rank] == 1).all()
    assert attention.qkv.groups[0].raised_b(torch.bfloat16) is None
