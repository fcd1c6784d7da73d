"""Rotary position embedding of q and k in one launch, optionally with Qwen3's RMSNorm over each head before it.

For each token and head, with the two halves x1, x2 of the first `cos.shape[-1]` entries: y1 = x1·cos1 - x2·sin1, y2 =
x2·cos2 + x1·sin2; entries beyond (Phi-3's partial rotation) pass through. q: (B, S, Hq, D), k: (B, S, Hk, D), any
strides with D contiguous; cos, sin: (B or 1, S, ≤ D). Backward is the same rotation with the opposite sign, so nothing
is saved but cos and sin (and the heads before the norm). It writes dq, dk and dv side by side into the operand of the
next GEMM, which is where they are read.

Su et al., "RoFormer" (2021). Run: python -m pytest tests/lorakernels/test_rope.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime import check, jit, kernel, next_power_of_2, tl, use_triton, working_dtype


class HeadTensors(NamedTuple):
    """q (B, S, Hq, D) and k (B, S, Hk, D), or their gradients; v (B, S, Hk, D) where it is to be copied with them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None = None


class Rotary(NamedTuple):
    """cos, sin: (B or 1, S, ≤ D); norms: the weights (D,) of the head norms of q and of k, or None; eps: theirs."""

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 1e-6


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """One of q, k as (B, S, H, D) in float32 (float64 for float64), of x (B, S, H, D) and cos, sin (B or 1, S, ≤ D);
    weight (D,) norms each head first."""
    dtype = working_dtype(x)
    x, cos, sin = x.to(dtype), cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
    if weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(dtype)
    n = cos.shape[-1]
    a, rest = x[..., :n], x[..., n:]
    turned = torch.cat((-a[..., n // 2 :], a[..., : n // 2]), -1)
    return torch.cat((a * cos + turned * sin, rest), -1)


def rope_reference_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, raw: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, eps: float = 1e-6,
) -> torch.Tensor:  # fmt: skip
    """The gradient of rope_reference with respect to x, of grad (B, S, H, D); raw is that x where weight is given."""
    dtype = working_dtype(grad)
    d, cos, sin = grad.to(dtype), cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
    n = cos.shape[-1]
    a, rest = d[..., :n], d[..., n:]
    s = a * sin
    out = torch.cat((a * cos + torch.cat((s[..., n // 2 :], -s[..., : n // 2]), -1), rest), -1)
    if weight is None or raw is None:
        return out
    x = raw.to(dtype)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    g = out * weight.to(dtype)
    return rstd * (g - x * rstd * (g * x * rstd).mean(-1, keepdim=True))


@jit
def _heads(
    x_ptr, y_ptr, raw_ptr, w_ptr, c1, c2, s1, s2, x_head, y_head, raw_head, n_heads, half, d, eps,
    BACKWARD: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token: a tile of HEADS x HALF for either half."""
    head = tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    ok = (head[:, None] < n_heads) & (i[None, :] < half)
    x1 = tl.load(x_ptr + head[:, None] * x_head + i[None, :], mask=ok, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head[:, None] * x_head + half + i[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        w1 = tl.load(w_ptr + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(w_ptr + half + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
        if NORM:
            r1 = tl.load(raw_ptr + head[:, None] * raw_head + i[None, :], mask=ok, other=0.0).to(tl.float32)
            r2 = tl.load(raw_ptr + head[:, None] * raw_head + half + i[None, :], mask=ok, other=0.0).to(tl.float32)
            rstd = 1.0 / tl.sqrt((tl.sum(r1 * r1, axis=1) + tl.sum(r2 * r2, axis=1)) / d + eps)
            r1 = r1 * rstd[:, None]
            r2 = r2 * rstd[:, None]
            y1 = y1 * w1
            y2 = y2 * w2
            mean = (tl.sum(y1 * r1, axis=1) + tl.sum(y2 * r2, axis=1)) / d
            y1 = rstd[:, None] * (y1 - r1 * mean[:, None])
            y2 = rstd[:, None] * (y2 - r2 * mean[:, None])
    else:
        if NORM:
            rstd = 1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / d + eps)
            x1 = x1 * rstd[:, None] * w1
            x2 = x2 * rstd[:, None] * w2
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    tl.store(y_ptr + head[:, None] * y_head + i[None, :], y1.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(y_ptr + head[:, None] * y_head + half + i[None, :], y2.to(y_ptr.dtype.element_ty), mask=ok)
    if REST > 0:
        _copy(x_ptr + 2 * half, y_ptr + 2 * half, x_head, y_head, n_heads, d - 2 * half, HEADS, REST)


@jit
def _copy(x_ptr, y_ptr, x_head, y_head, n_heads, d, HEADS: tl.constexpr, D: tl.constexpr):
    head = tl.arange(0, HEADS)
    i = tl.arange(0, D)
    ok = (head[:, None] < n_heads) & (i[None, :] < d)
    x = tl.load(x_ptr + head[:, None] * x_head + i[None, :], mask=ok, other=0.0)
    tl.store(y_ptr + head[:, None] * y_head + i[None, :], x, mask=ok)


@kernel
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, yq_ptr, yk_ptr, yv_ptr, rq_ptr, rk_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, seq,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, yq_b, yq_s, yq_h, yk_b, yk_s, yk_h, yv_b, yv_s, yv_h,
    rq_b, rq_s, rq_h, rk_b, rk_s, rk_h, c_b, c_s, s_b, s_s, n_q, n_k, half, d, eps,
    BACKWARD: tl.constexpr, NORM: tl.constexpr, WITH_V: tl.constexpr,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // seq).to(tl.int64)
    s = (tl.program_id(0) % seq).to(tl.int64)
    i = tl.arange(0, HALF)
    ok = i < half
    c = cos_ptr + b * c_b + s * c_s + i
    n = sin_ptr + b * s_b + s * s_s + i
    c1 = tl.load(c, mask=ok, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(c + half, mask=ok, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(n, mask=ok, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(n + half, mask=ok, other=0.0).to(tl.float32)[None, :]
    _heads(
        q_ptr + b * q_b + s * q_s, yq_ptr + b * yq_b + s * yq_s, rq_ptr + b * rq_b + s * rq_s, wq_ptr,
        c1, c2, s1, s2, q_h, yq_h, rq_h, n_q, half, d, eps, BACKWARD, NORM, HEADS_Q, HALF, REST,
    )  # fmt: skip
    _heads(
        k_ptr + b * k_b + s * k_s, yk_ptr + b * yk_b + s * yk_s, rk_ptr + b * rk_b + s * rk_s, wk_ptr,
        c1, c2, s1, s2, k_h, yk_h, rk_h, n_k, half, d, eps, BACKWARD, NORM, HEADS_K, HALF, REST,
    )  # fmt: skip
    if WITH_V:
        _copy(v_ptr + b * v_b + s * v_s, yv_ptr + b * yv_b + s * yv_s, v_h, yv_h, n_k, d, HEADS_K, D)


def rotate_into(
    source: HeadTensors, target: HeadTensors, rotary: Rotary, *,
    raw: tuple[torch.Tensor, torch.Tensor] | None = None, backward: bool = False,
) -> None:  # fmt: skip
    """target's q and k = rotated (and, with norms, normed) q and k of source; backward: their gradients.

    raw: q and k before the norms, for backward through them, shaped as source's. target may be source itself. v is only
    copied to target's: it saves a launch where q, k, v share a buffer.
    """
    (q, k, v), (out_q, out_k, out_v), (cos, sin, norms, eps) = source, target, rotary
    if q.numel() == 0:
        return
    if not use_triton(q, k, cos, out_q) or any(t.stride(-1) != 1 for t in (q, k, cos, sin, out_q, out_k)):
        _rotate_torch(source, target, rotary, raw, backward)
        return
    if v is not None and v.stride(-1) != 1:
        v = v.contiguous()
    batch, seq, n_q, d = q.shape
    half, n_k = cos.shape[-1] // 2, k.shape[2]
    rq, rk = raw if raw is not None else (q, k)
    wq, wk = norms if norms is not None else (cos, cos)
    vv, ov = (v, out_v) if v is not None and out_v is not None else (k, out_k)
    strides = [st for t in (q, k, vv, out_q, out_k, ov, rq, rk) for st in t.stride()[:3]]
    table = [st for t in (cos, sin) for st in (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))]
    _rope_kernel[(batch * seq,)](
        q, k, vv, out_q, out_k, ov, rq, rk, wq, wk, cos, sin, seq, *strides, *table, n_q, n_k, half, d, eps,
        BACKWARD=backward, NORM=norms is not None, WITH_V=v is not None,
        HEADS_Q=next_power_of_2(n_q), HEADS_K=next_power_of_2(n_k), HALF=next_power_of_2(half),
        REST=0 if d == 2 * half else next_power_of_2(d - 2 * half), D=next_power_of_2(d), num_warps=4,
    )  # fmt: skip


def _rotate_torch(
    source: HeadTensors, target: HeadTensors, rotary: Rotary,
    raw: tuple[torch.Tensor, torch.Tensor] | None, backward: bool,
) -> None:  # fmt: skip
    cos, sin, norms, eps = rotary
    for i, (x, out) in enumerate(((source.q, target.q), (source.k, target.k))):
        weight = None if norms is None else norms[i]
        if backward:
            out.copy_(rope_reference_backward(x, cos, sin, None if raw is None else raw[i], weight, eps))
        else:
            out.copy_(rope_reference(x, cos, sin, weight, eps))
    if source.v is not None and target.v is not None:
        target.v.copy_(source.v)


class RoPE(torch.autograd.Function):
    """`rope` as one node, on q, k as (B, S, H, D), which saves cos and sin alone."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        out_q, out_k = torch.empty_like(q), torch.empty_like(k)
        rotate_into(HeadTensors(q, k), HeadTensors(out_q, out_k), Rotary(cos, sin))
        return out_q, out_k

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        out_q, out_k = torch.empty_like(dq), torch.empty_like(dk)
        rotate_into(HeadTensors(dq, dk), HeadTensors(out_q, out_k), Rotary(cos, sin), backward=True)
        return out_q, out_k, None, None


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated (q, k), q (B, Hq, S, D) and k (B, Hk, S, D) as attention wants them; cos and sin as transformers gives
    them, (B or 1, S, ≤ D). Raises ValueError where they do not fit."""
    check(q.dim() == 4 and k.dim() == 4, "q and k must be (batch, heads, tokens, head size)", q=q, k=k)
    same = (q.shape[0], q.shape[2], q.shape[3]) == (k.shape[0], k.shape[2], k.shape[3])
    check(same, "q and k differ in batch, tokens or head size", q=q, k=k)
    fits = cos.shape == sin.shape and cos.dim() == 3 and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2]
    check(
        fits and cos.shape[2] <= q.shape[3] and cos.shape[2] % 2 == 0, "cos and sin do not fit q", q=q, cos=cos, sin=sin
    )
    out_q, out_k = RoPE.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return out_q.transpose(1, 2), out_k.transpose(1, 2)
