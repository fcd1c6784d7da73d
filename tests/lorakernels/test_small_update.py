"""An adapter that has hardly been trained: what it adds arrives, although it is less than a rounding of the base."""

import lorakernels
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def arrives(model: nn.Module, x: torch.Tensor) -> float:
    """Of what the adapter adds in float32, the share by which the output in bfloat16 moves along it."""
    linear = model.base_model.model[0]
    a, b = linear.lora_A.default.weight, linear.lora_B.default.weight
    with torch.no_grad():
        added = 2 * (x.float() @ a.float().T @ b.float().T)
        moved = model(x).float() - linear.base_layer(x).float()
    return float((moved * added).sum() / (added * added).sum())


def test_a_small_update_arrives_in_bfloat16_where_plain_peft_rounds_it_away(device):
    """PEFT rounds the base's output first, and then its sum with the adapter's; we round their sum, once."""
    base = nn.Sequential(nn.Linear(576, 1536, bias=False)).requires_grad_(False)
    base[0].weight.normal_(0, 2.0 / 24)
    model = get_peft_model(base.bfloat16(), LoraConfig(r=16, lora_alpha=32, target_modules=["0"])).to(device)
    b = model.base_model.model[0].lora_B.default.weight
    with torch.no_grad():
        b.copy_(2e-4 * torch.randn_like(b).sign())  # where AdamW's first step of this learning rate leads to
    x = torch.randn(2048, 576, device=device).bfloat16()
    assert arrives(model, x) < 0.5
    lorakernels.apply(model)
    assert 0.9 < arrives(model, x) < 1.1
