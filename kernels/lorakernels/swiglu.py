"""SwiGLU: h = silu(gate) * up with silu(x) = x · sigmoid(x). gate, up, h: (..., I), one dtype of bf16, fp16, fp32.

Shazeer, "GLU Variants Improve Transformer" (2020). The Triton kernel is `glu.py`, which GEGLU shares.
Run: python -m pytest tests/lorakernels/test_swiglu.py
"""

from __future__ import annotations

import torch

from . import glu


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same in float32."""
    return glu.reference(gate, up, "silu")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. Saves gate and up only; any strides; nothing is overwritten."""
    return glu.gated(gate, up, "silu")
