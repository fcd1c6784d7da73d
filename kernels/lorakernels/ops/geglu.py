"""GEGLU: h = gelu(gate) * up, the exact gelu (erf) or its tanh form. gate, up, h: (..., I), bf16, fp16 or fp32.

The two differ by up to 4.7e-4 and models mean one of them (Gemma the tanh form, `gelu_pytorch_tanh`), so the choice is
an argument and each is held to its own reference. Shazeer, "GLU Variants Improve Transformer" (2020). The Triton kernel
is `glu.py`, which SwiGLU shares. Run: python -m pytest tests/lorakernels/test_geglu.py
"""

from __future__ import annotations

import torch

from . import glu

_NAMES = {"none": "gelu", "tanh": "gelu_tanh"}


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The same in float32; gate, up, h: (…, I)."""
    return glu.reference(gate, up, _NAMES[approximate])


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) * up of gate, up (…, I); approximate is "none" (erf) or "tanh", as in torch.nn.functional.gelu. Raises
    ValueError at another one, and where gate and up differ in shape or dtype."""
    if approximate not in _NAMES:
        raise ValueError(f'approximate must be "none" or "tanh", not {approximate!r}')
    return glu.gated(gate, up, _NAMES[approximate])
