"""SwiGLU: h = silu(gate) * up with silu(x) = x · sigmoid(x). gate, up, h: (..., I), one dtype of bf16, fp16, fp32.

Shazeer, "GLU Variants Improve Transformer" (2020). The Triton kernel is `glu.py`, which GEGLU shares.
Run: python -m pytest tests/lorakernels/test_swiglu.py
"""

from __future__ import annotations

import torch

from . import glu


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same in float32; gate, up, h: (…, I)."""
    return glu.reference(gate, up, "silu")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate, up (…, I), of any strides. Saves gate and up only; nothing is overwritten. Raises
    ValueError where they differ in shape or dtype."""
    return glu.gated(gate, up, "silu")
