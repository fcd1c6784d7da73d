"""LoRA-aware FLOPs of a decoder and of its linears, counted from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from lorabench.contract.batch import Sample
from lorabench.contract.model import Lora


class Shape(BaseModel):
    """The sizes that FLOPs are counted from. Parameter counts, not bytes."""

    layers: int
    hidden: int
    attention_width: int  # heads x head_dim
    frozen_per_layer: int  # weights of the linear layers of one decoder layer
    head: int  # vocabulary x hidden
    adapter_per_layer: int  # r x (in + out) over the adapted linears of one layer


def decoder(config: Any, lora: Lora) -> Shape:
    """The shape of a decoder by transformers' configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears = {
        "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    adapted = linears if isinstance(lora.target_modules, str) else set(lora.target_modules) & set(linears)
    return Shape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        attention_width=q,
        frozen_per_layer=sum(i * o for i, o in linears.values()),
        head=config.vocab_size * hidden,
        adapter_per_layer=sum(lora.r * (linears[name][0] + linears[name][1]) for name in adapted),
    )


def forward_tflop(shape: Shape, lengths: Sequence[int]) -> float:
    """Useful TFLOP of one forward over samples of these lengths: real tokens only, causal attention.

    2 per frozen weight and token (head included), 2 per adapter weight, 2 S² x width for causal QKᵀ and PV.
    """
    frozen, adapters = _weights(shape)
    return (2.0 * sum(lengths) * (frozen + adapters) + _attention(shape, lengths)) / 1e12


def backward_tflop(shape: Shape, lengths: Sequence[int]) -> float:
    """Useful TFLOP of one backward: frozen weights get dX but no dW.

    2 per frozen weight (dX), 4 per adapter weight (dX, dA, dB), 2.5 x attention's forward (dQ, dK, dV, dP, and the
    scores again, which every memory-efficient attention recomputes; Dao, FlashAttention-2, section 3.1).
    """
    frozen, adapters = _weights(shape)
    return (2.0 * sum(lengths) * (frozen + 2 * adapters) + 2.5 * _attention(shape, lengths)) / 1e12


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    return [len(s.tokens) for s in samples]


def _weights(shape: Shape) -> tuple[int, int]:
    return shape.layers * shape.frozen_per_layer + shape.head, shape.layers * shape.adapter_per_layer


def _attention(shape: Shape, lengths: Sequence[int]) -> float:
    return shape.layers * 2.0 * sum(n * n for n in lengths) * shape.attention_width
