"""LoRA-aware FLOPs of a decoder and of its linears, counted from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from lorabench.contract.batch import Sample
from lorabench.contract.model import Lora, ModelSpec
from lorabench.contract.work import Recomputed
from lorabench.plan import architecture


class Shape(BaseModel):
    """The sizes that FLOPs are counted from. Parameter counts, not bytes."""

    attention: int  # layers x heads x head_dim
    frozen: int  # weights of the linears of all layers that one token meets: of a mixture's experts the chosen ones
    head: int  # vocabulary x hidden
    adapter: int  # r x (in + out) over the adapted linears of all layers


def decoder(spec: ModelSpec, lora: Lora) -> Shape:
    """The shape of a decoder, counted on its modules. An adapter of a mixture's fused experts, which PEFT puts on a
    parameter and not on a module, is not counted: at rank 16 it is some percent of the experts themselves."""
    model = architecture.skeleton(spec)
    config, layers = model.config, architecture.decoder_layers(model)
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    inside = {id(module) for module in layers.modules()}
    adapted = [module for module in architecture.adapted(model, lora.target_modules) if id(module) in inside]
    return Shape(
        attention=len(layers) * heads * head_dim,
        frozen=sum(_met(name, weight, config) for name, weight in layers.named_parameters() if weight.dim() >= 2),
        head=config.vocab_size * config.hidden_size,
        adapter=sum(lora.r * sum(module.weight.shape) for module in adapted),
    )


def _met(name: str, weight: Any, config: Any) -> int:
    """How many of a tensor's weights one token is multiplied with."""
    chosen = getattr(config, "num_experts_per_tok", None)
    if chosen and weight.dim() == 3 and "experts" in name:  # (experts, in, out)
        return weight.numel() * min(chosen, len(weight)) // len(weight)
    return weight.numel()


def forward_tflop(shape: Shape, lengths: Sequence[int]) -> float:
    """Useful TFLOP of one forward over samples of these lengths: real tokens only, causal attention.

    2 per frozen weight and token (head included), 2 per adapter weight, 2 S² x width for causal QKᵀ and PV.
    """
    frozen = shape.frozen + shape.head
    return (2.0 * sum(lengths) * (frozen + shape.adapter) + _attention(shape, lengths)) / 1e12


def backward_tflop(shape: Shape, lengths: Sequence[int]) -> float:
    """Useful TFLOP of one backward: frozen weights get dX but no dW.

    2 per frozen weight (dX), 4 per adapter weight (dX, dA, dB), 2.5 x attention's forward (dQ, dK, dV, dP, and the
    scores again, which every memory-efficient attention recomputes; Dao, FlashAttention-2, section 3.1).
    """
    frozen = shape.frozen + shape.head
    return (2.0 * sum(lengths) * (frozen + 2 * shape.adapter) + 2.5 * _attention(shape, lengths)) / 1e12


def recomputed_tflop(shape: Shape, lengths: Sequence[int], again: Recomputed) -> float:
    """TFLOP of what backward computes again of the layers' forward. The head is in no layer."""
    linears = 2.0 * sum(lengths) * (shape.frozen + shape.adapter)
    return (again.linears * linears + again.attention * _attention(shape, lengths)) / 1e12


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    return [len(s.tokens) for s in samples]


def _attention(shape: Shape, lengths: Sequence[int]) -> float:
    return 2.0 * sum(n * n for n in lengths) * shape.attention
