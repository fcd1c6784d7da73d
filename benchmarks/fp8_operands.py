"""Which operand of an FP8 base makes a gradient wrong: each of them alone is rounded to e4m3 in a deep Llama, forward
and backward apart, and every adapter's gradient is compared with the one without rounding. It runs on a CPU.

    python benchmarks/fp8_operands.py                    # 32 layers of 256 columns, transformers' random weights
    python benchmarks/fp8_operands.py 32 256 outliers    # some channels of the norms are 20 times as large

Everything else is float32, so a difference is that operand's. The first line has no e4m3: what bfloat16 does to plain
PEFT. A row: the relative error of the gradients' worst and median tensor, and of the worst tensor of each kind.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from lorakernels.ops.quantize_rows import quantize_rows_reference
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP = KINDS[4:]
OPERANDS = ("x", "w", "dy", "w of dX")
TOKENS = 256


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x (…, K) through e4m3 with a scale a row."""
    q, scale = quantize_rows_reference(x)
    return q.float() * scale


class Product(torch.autograd.Function):
    """x · Wᵀ, whose operands named in `which` go through e4m3. x: (…, K), w: (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, which: frozenset[str]) -> torch.Tensor:
        ctx.w, ctx.which = w, which
        return F.linear(rounded(x) if "x" in which else x, rounded(w) if "w" in which else w)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        w = rounded(ctx.w) if "w of dX" in ctx.which else ctx.w
        return (rounded(dy) if "dy" in ctx.which else dy) @ w, None, None


@contextmanager
def rounding(model: nn.Module, which: frozenset[str], kinds: tuple[str, ...] = KINDS) -> Iterator[None]:
    """Inside, the frozen linears of these kinds round these operands."""
    linears = [m.base_layer for n, m in model.named_modules() if n.endswith(kinds) and hasattr(m, "base_layer")]

    def with_weight(linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: Product.apply(x, linear.weight, which)

    for linear in linears:
        linear.forward = with_weight(linear)
    yield
    for linear in linears:
        del linear.forward


def build(layers: int, width: int, outliers: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=max(1, width // 128), max_position_embeddings=TOKENS,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    if outliers:
        for name, weight in base.named_parameters():
            if name.endswith("layernorm.weight"):
                weight.data[torch.randperm(width)[: width // 64]] *= 20
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules=list(KINDS)))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(1024, (1, TOKENS))
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}


def row(what: str, got: dict[str, torch.Tensor], gold: dict[str, torch.Tensor]) -> str:
    errors = {n: float((g - gold[n]).norm() / gold[n].norm()) for n, g in got.items()}
    worst = max(errors, key=lambda n: errors[n])
    layer = worst.split("layers.")[1].split(".")[0]
    kinds = [max(e for n, e in errors.items() if kind in n) for kind in KINDS]
    cells = [what, f"{errors[worst]:.3f}", f"{statistics.median(errors.values()):.3f}", layer]
    return " | ".join([*cells, *(f"{e:.3f}" for e in kinds)])


def main(layers: int = 32, width: int = 256, weights: str = "plain") -> None:
    model = build(layers, width, weights == "outliers")
    gold = gradients(model)
    print(" | ".join(["rounded", "worst", "median", "its layer", *KINDS]), flush=True)
    print(row("nothing, in bfloat16", gradients(model.bfloat16()), gold), flush=True)
    model = build(layers, width, weights == "outliers")

    def show(what: str, which: set[str], kinds: tuple[str, ...] = KINDS) -> None:
        with rounding(model, frozenset(which), kinds):
            print(row(what, gradients(model), gold), flush=True)

    show("all", set(OPERANDS))
    show("forward", {"x", "w"})
    show("backward", {"dy", "w of dX"})
    for operand in OPERANDS:
        show(operand, {operand})
    for kind in KINDS:
        show(f"forward of {kind}", {"x", "w"}, (kind,))
    for kind in KINDS:
        show(f"backward of {kind}", {"dy", "w of dX"}, (kind,))
    show("all of the MLP", set(OPERANDS), MLP)
    show("forward of the MLP", {"x", "w"}, MLP)
    show("all but v's and o's", set(OPERANDS), (*KINDS[:2], *MLP))
    show("all but o's", set(OPERANDS), (*KINDS[:3], *MLP))
    # What is left where the rounded weights count as the model's own, as those of NF4 do.
    for what, kinds in (("all", KINDS), ("all of the MLP", MLP), ("all but v's and o's", (*KINDS[:2], *MLP))):
        with rounding(model, frozenset({"w", "w of dX"}), kinds):
            gold = gradients(model)
        show(f"{what}, beside the same rounded weights", set(OPERANDS), kinds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
