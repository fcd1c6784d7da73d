"""q, k, v in the output of the attention's projections: where they lie, how they are rotated, and back.

Run: python -m pytest tests/lorakernels/test_projection_node.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops.rope import HeadTensors, Rotary, rotate_into


@dataclass(frozen=True)
class Heads:
    """How the projections' output (M, N) splits into q, k, v, and what happens to q and k. n_q, n_k: heads of q, and of
    k and v; size: D of each; norm_eps: of Qwen3's head norms, whose weights travel as tensors, or None."""

    n_q: int
    n_k: int
    size: int
    rotate: bool = True
    norm_eps: float | None = None

    @property
    def widths(self) -> list[int]:
        """Columns of q, k and v."""
        return [self.n_q * self.size, self.n_k * self.size, self.n_k * self.size]

    def split(self, y: torch.Tensor, lead: torch.Size) -> list[torch.Tensor]:
        """Views (B, S, H, D) of q, k, v in y (B·S, ≥ N); lead: (B, S)."""
        parts = self.n_q, self.n_k, self.n_k
        heads = y[:, : sum(parts) * self.size].unflatten(1, (sum(parts), self.size))
        return list(heads.unflatten(0, lead).split(parts, 2))


@dataclass(slots=True)
class Rotation:
    """What happens to q and k: the heads' layout, cos and sin (B or 1, S, ≤ D) of RoPE (None without it), the weights
    (D,) of the head norms of q and k, or None."""

    heads: Heads
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def _rotary(self) -> Rotary:
        eps, q_norm, k_norm = self.heads.norm_eps, self.q_norm, self.k_norm
        assert self.cos is not None and self.sin is not None, "heads that rotate need cos and sin"
        if eps is None or q_norm is None or k_norm is None:
            return Rotary(self.cos, self.sin, None, 0.0)
        return Rotary(self.cos, self.sin, (q_norm, k_norm), eps)

    def forward(self, y: torch.Tensor, lead: torch.Size) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """(q, k, v) (B, S, H, D), rotated in place in y (M, N); and y where backward needs it: with head norms q and k
        get a place of their own. lead: (B, S)."""
        q, k, v = self.heads.split(y, lead)
        normed = self.heads.norm_eps is not None
        if self.heads.rotate:
            rotary = self._rotary
            out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device) if normed else q
            out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device) if normed else k
            rotate_into(HeadTensors(q, k), HeadTensors(out_q, out_k), rotary)
            q, k = out_q, out_k
        return (q, k, v), y if normed else None

    def backward(
        self, d_outs: Sequence[torch.Tensor | None], wide: torch.Tensor, raw: torch.Tensor | None, lead: torch.Size
    ) -> None:
        """The gradients (B, S, H, D) of q, k, v into the first columns of wide (M, at least N); raw: what `forward`
        gave for it; lead: (B, S)."""
        into = self.heads.split(wide, lead)
        dq, dk, dv = (torch.zeros_like(t) if d is None else d for d, t in zip(d_outs, into, strict=True))
        if not self.heads.rotate:
            for d, t in zip((dq, dk, dv), into, strict=True):
                t.copy_(d)
            return
        raw_q_k = None
        if raw is not None:
            raw_q, raw_k, _ = self.heads.split(raw, lead)
            raw_q_k = raw_q, raw_k
        rotate_into(HeadTensors(dq, dk, dv), HeadTensors(*into), self._rotary, raw=raw_q_k, backward=True)
