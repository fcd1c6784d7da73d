"""The gated activation behind `swiglu` and `geglu`: h = act(gate) * up, element by element.

gate, up: (M, I), any row stride, last dimension contiguous. h: (M, I), also into a wider buffer.
Forward reads 2 and writes 1 element, backward reads 3 and writes 2 (3 with h recomputed): nothing is saved but gate and
up. All arithmetic is in float32 and is rounded once, on the way out.

With `lora_a` (R, I) the same launch leaves S = h · Aᵀ behind h, because the down projection's LoRA wants it and h is
in registers anyway. Run: python -m pytest tests/lorakernels/test_swiglu.py tests/lorakernels/test_geglu.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .runtime import cdiv, check, jit, next_power_of_2, tile_of, tl, use_triton, working_dtype

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
# Above this many columns S would not stay in registers beside the tile; a library GEMM is then the better way.
MAX_FUSED_RANK = 128


def activation(gate: torch.Tensor, act: str) -> torch.Tensor:
    if act == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")


def activation_slope(gate: torch.Tensor, act: str) -> torch.Tensor:
    """d act / d gate, in the dtype given."""
    if act == "silu":
        s = torch.sigmoid(gate)
        return s * (1 + gate * (1 - s))
    if act == "gelu":
        density = torch.exp(-0.5 * gate * gate) * 0.3989422804014327
        return 0.5 * (1 + torch.erf(gate * 0.7071067811865476)) + gate * density
    t = torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3))
    return 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * gate * gate)


def reference(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up in float32 (float64 for float64)."""
    dtype = working_dtype(gate)
    return activation(gate.to(dtype), act) * up.to(dtype)


@jit
def _act(g, ACT: tl.constexpr):
    """(act(g), act'(g)) of a float32 tile."""
    if ACT == 0:
        s = 1.0 / (1.0 + tl.exp(-g))
        a = g * s
        d = s * (1.0 + g * (1.0 - s))
    elif ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        a = g * cdf
        d = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        # tanh through a sigmoid of 2z: the exponential of a large negative number is 0, never inf/inf.
        t = 2.0 / (1.0 + tl.exp(-2.0 * z)) - 1.0
        a = 0.5 * g * (1.0 + t)
        d = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    return a, d


@jit
def _forward_kernel(g_ptr, u_ptr, h_ptr, n, g_row, u_row, h_row, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n
    g = tl.load(g_ptr + row * g_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + col, mask=inside, other=0.0).to(tl.float32)
    a, _ = _act(g, ACT)
    tl.store(h_ptr + row * h_row + col, (a * u).to(h_ptr.dtype.element_ty), mask=inside)


@jit
def _forward_lora_kernel(
    g_ptr, u_ptr, h_ptr, a_ptr, m, n, g_row, u_row, h_row, a_row, n_spare,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A block of rows walks over all columns; S = h Aᵀ grows in registers and lands in the columns n … n + n_spare."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, R), tl.float32)
    for start in range(0, n, BN):
        col = start + tl.arange(0, BN)
        inside = (row[:, None] < m) & (col[None, :] < n)
        g = tl.load(g_ptr + row[:, None] * g_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + row[:, None] * u_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
        a, _ = _act(g, ACT)
        h = (a * u).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * h_row + col[None, :], h, mask=inside)
        w = tl.load(
            a_ptr + r[None, :] * a_row + col[:, None], mask=(col[:, None] < n) & (r[None, :] < n_spare), other=0.0
        )
        acc = tl.dot(h, w, acc, input_precision="ieee")
    spare = (row[:, None] < m) & (r[None, :] < n_spare)
    tl.store(h_ptr + row[:, None] * h_row + n + r[None, :], acc.to(h_ptr.dtype.element_ty), mask=spare)


@jit
def _backward_kernel(
    g_ptr, u_ptr, dh_ptr, dg_ptr, du_ptr, h_ptr, n, g_row, u_row, dh_row, dg_row, du_row, h_row,
    ACT: tl.constexpr, WITH_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n
    g = tl.load(g_ptr + row * g_row + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + col, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * dh_row + col, mask=inside, other=0.0).to(tl.float32)
    a, d = _act(g, ACT)
    tl.store(dg_ptr + row * dg_row + col, (dh * u * d).to(dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + row * du_row + col, (dh * a).to(du_ptr.dtype.element_ty), mask=inside)
    if WITH_H:
        tl.store(h_ptr + row * h_row + col, (a * u).to(h_ptr.dtype.element_ty), mask=inside)


def forward_into(gate, up, out, act: str) -> None:
    """out[:, :I] = act(gate) * up; out may be a slice of a wider buffer."""
    if not use_triton(gate, up, out):
        out.copy_(reference(gate, up, act))
        return
    m, n = gate.shape
    block = min(1024, next_power_of_2(n))
    _forward_kernel[(m, cdiv(n, block))](
        gate, up, out, n, gate.stride(0), up.stride(0), out.stride(0), ACT=ACTIVATIONS[act], BLOCK=block, num_warps=4
    )


def forward_lora_into(gate, up, buffer, lora_a, act: str, tile: str = "fused") -> None:
    """buffer = [h | h · lora_aᵀ] in one launch; lora_a (p, I) with p spare columns in buffer, p <= MAX_FUSED_RANK."""
    m, n = gate.shape
    p = lora_a.shape[0]
    check(
        buffer.shape == (m, n + p), "buffer needs a spare column for each row of lora_a", buffer=buffer, lora_a=lora_a
    )
    if not use_triton(gate, up, buffer, lora_a) or p > MAX_FUSED_RANK:
        forward_into(gate, up, buffer[:, :n], act)
        torch.mm(buffer[:, :n], lora_a.t(), out=buffer[:, n:])
        return
    bm, bn, warps, stages = tile_of(tile, gate)
    _forward_lora_kernel[(cdiv(m, bm),)](
        gate, up, buffer, lora_a, m, n, gate.stride(0), up.stride(0), buffer.stride(0), lora_a.stride(0), p,
        ACT=ACTIVATIONS[act], BM=bm, BN=bn, R=max(16, next_power_of_2(p)), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def backward_into(gate, up, grad, d_gate, d_up, act: str, h_into_grad: bool = False) -> None:
    """Writes d_gate and d_up, also over gate and up themselves; with h_into_grad the recomputed h = act(gate) * up
    replaces grad (it is overwritten)."""
    if not use_triton(gate, up, grad, d_gate):
        g, u, dh = (t.to(working_dtype(gate)) for t in (gate, up, grad))
        a = activation(g, act)
        new = (
            dh * u * activation_slope(g, act),
            dh * a,
            a * u,
        )  # all before any is written: they may lie over the inputs
        d_gate.copy_(new[0])
        d_up.copy_(new[1])
        if h_into_grad:
            grad.copy_(new[2])
        return
    m, n = gate.shape
    block = min(1024, next_power_of_2(n))
    _backward_kernel[(m, cdiv(n, block))](
        gate, up, grad, d_gate, d_up, grad, n,
        gate.stride(0), up.stride(0), grad.stride(0), d_gate.stride(0), d_up.stride(0), grad.stride(0),
        ACT=ACTIVATIONS[act], WITH_H=h_into_grad, BLOCK=block, num_warps=4,
    )  # fmt: skip


class GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, act):
        ctx.save_for_backward(gate, up)
        ctx.act = act
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if out.numel():
            forward_into(_flat(gate), _flat(up), out.view(-1, out.shape[-1]), act)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        d_gate, d_up = (torch.empty(gate.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        if gate.numel():
            n = gate.shape[-1]
            backward_into(_flat(gate), _flat(up), _flat(grad), d_gate.view(-1, n), d_up.view(-1, n), ctx.act)
        return d_gate, d_up, None


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    check(gate.shape == up.shape and gate.dim() >= 1, "gate and up differ", gate=gate, up=up)
    check(gate.dtype == up.dtype, "gate and up differ in dtype", gate=gate, up=up)
    return GatedActivation.apply(gate, up, act)
