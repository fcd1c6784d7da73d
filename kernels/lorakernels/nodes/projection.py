"""LoRA projections that share an input, as one library GEMM:

    Y = [X | S] · [W | sB]ᵀ        S = X · Aᵀ                 forward     (products.py)
    dX = [dY | dS] · [W ; A]       dS = dY · sB               backward    (output_grad.py)
    dA = dSᵀ · X,  dB = dYᵀ · sS                                          (adapter_grad.py)

X: (M, K), W: (N, K), A: (p, K), sB: (N, p), Y: (M, N). The operand is `operand.py`'s; here is what else a forward asks
of the members as a whole: their bias, their dropout's seeds, the room for sS.

Why: `Y += S · (sB)ᵀ` as a GEMM of its own reads and writes Y once more. Where the plain form is measured to be faster
it is taken (`tune`). Hu et al., "LoRA" (2021). Run: python -m pytest tests/lorakernels/test_projection.py
"""

from __future__ import annotations

import torch

from ..ops.adapter import RaisedB, raised_b
from ..ops.concat_operand import ScaledS
from ..ops.dropout import draw_seed
from ..runtime import capturing
from .member import Member
from .operand import OperandBuffer


class Projection(OperandBuffer):
    """Members that share an input of K columns, and their operand buffer.

    one_gemm: [X | S]·[W | sB]ᵀ where it is measured to be faster; fp8: the frozen products in FP8, which have no such
    operand. Raises ValueError where the members' inputs differ in width.
    """

    def __init__(self, members: list[Member], one_gemm: bool = True, fp8: bool = False):
        super().__init__(members, fp8)
        self.one_gemm = one_gemm and self.fp8 is None
        self._scales: tuple[tuple, torch.Tensor] | None = None  # of `new_scaled_s`, behind what they were made for

    def total_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Bias (N,) of all members in dtype, with scale · lora_B.bias added, or None."""
        if all(m.bias is None and m.lora_bias is None for m in self.members):
            return None
        first = self.members[0]
        if len(self.members) == 1 and first.lora_bias is None and first.bias is not None:
            return first.bias.to(dtype)
        parts = []
        for m in self.members:
            part = torch.zeros(m.shape[0], dtype=torch.float32, device=m.weight.device)
            part = part if m.bias is None else part + m.bias
            parts.append(part if m.lora_bias is None else part + m.scale * m.lora_bias)
        return torch.cat(parts).to(dtype)

    def new_scaled_s(self, m: int, dtype: torch.dtype, device: torch.device) -> ScaledS:
        """Room for sS (m, p) in dtype: S with each member's columns multiplied by its scale, as dB = dYᵀ · sS needs
        it."""
        exact = torch.promote_types(dtype, torch.float32)
        key = (tuple(x.scale for x in self.members), exact, device)
        if self._scales is not None and self._scales[0] == key:
            scales = self._scales[1]
        else:
            sizes = [*zip(self.ranks, key[0], strict=True), (self.p - self.rank, 0.0)]
            scales = torch.cat([torch.full((n,), scale, dtype=exact, device=device) for n, scale in sizes])
            if not capturing(scales):  # what a capture makes has no values before the first replay
                self._scales = key, scales
        return ScaledS(torch.empty(m, self.p, dtype=dtype, device=device), scales)

    def raised_b(self, dtype: torch.dtype) -> RaisedB | None:
        """s·B for the backward of products in dtype, where that is float16 and the adapters are kept in more; else
        None. (Adapters in float16 have no smaller numbers than the operand.)"""
        if dtype != torch.float16:
            return None
        adapters = [t for m in self.members for t in (m.a, m.b) if t is not None]
        if not adapters or any(t.dtype == torch.float16 for t in adapters):
            return None
        parts = [(m.b, m.shape[0], m.scale) for m in self.members]
        return raised_b(parts, self.p, dtype, adapters[0].device)

    @property
    def dropped(self) -> bool:
        """Whether any member with an adapter drops out its input today."""
        return any(m.dropout > 0 and m.rank for m in self.members)

    def seeds(self, device: torch.device) -> torch.Tensor | None:
        """A seed a member, (members,) int64, or None without dropout: PEFT draws one mask for each projection, so these
        do too."""
        return draw_seed(device, len(self.members)) if self.dropped else None
