"""NF4 weights, expanded straight into an operand buffer: w[e] = code[nibble(e)] · absmax[e / blocksize], double
quantization included: absmax[i] = code2[absmax8[i]] · absmax2[i / blocksize2] + offset.

packed: uint8, two elements a byte, the high nibble first, in the row-major order of the (N, K) weight; absmax one a
block of 64 elements or so; out: (N, K), any row stride (that is the point: bitsandbytes' own function wants a
contiguous output). The quant_state is bitsandbytes' and only read by attribute, so the package itself is not needed
here. A forward in evaluation on a CPU makes bitsandbytes repack the weight in place for its own product; that layout is
read, too. Dettmers et al., "QLoRA" (2023). Run: python -m pytest tests/lorakernels/test_nf4.py
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import cdiv, check, kernel, next_power_of_2, tl, use_triton


def absmax_reference(state: Any) -> torch.Tensor:
    """The block scales (blocks,) in float32 of a quant_state, with double quantization undone."""
    if getattr(state, "state2", None) is None:
        return state.absmax.float().flatten()
    second = state.state2
    scale = second.absmax.float().repeat_interleave(second.blocksize)[: state.absmax.numel()]
    return second.code.float()[state.absmax.flatten().long()] * scale + state.offset.float()


def dequantize_reference(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight (N, K) in float32, of packed (N · K / 2, 1) uint8 and its quant_state."""
    if is_repacked(state):
        return _repacked_reference(packed, state)
    bytes_ = packed.flatten().view(torch.uint8)
    index = torch.stack((bytes_ >> 4, bytes_ & 15), 1).flatten().long()
    n = state.shape[0] * state.shape[1]
    scale = absmax_reference(state).repeat_interleave(state.blocksize)[:n]
    return (state.code.float()[index[:n]] * scale).view(*state.shape)


def is_repacked(state: Any) -> bool:
    """Whether bitsandbytes has repacked the weight of this quant_state for its product on a CPU."""
    return getattr(state, "packing_format_for_cpu", False)


def _repacked_reference(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """As `dequantize_reference`, of a repacked weight. 32 rows are interleaved, and of each 64 nibbles the first half
    lies in the low bits of 32 bytes, the second in the high ones; the scales are bfloat16, (K / blocksize, N)."""
    n, k = state.shape
    bytes_ = packed.reshape(-1, 32).view(torch.uint8)
    nibbles = torch.cat((bytes_ & 15, bytes_ >> 4), 1).view(n // 32, k // 2, 32, 2)
    index = nibbles.transpose(1, 2).reshape(n, k).long()
    return state.code.float()[index] * state.absmax.float().t().repeat_interleave(state.blocksize, 1)


@kernel
def _dequantize_kernel(
    packed_ptr, code_ptr, absmax_ptr, code2_ptr, absmax2_ptr, offset_ptr, out_ptr, k, out_row, blocksize, blocksize2,
    NESTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < k
    e = row * k + col
    byte = tl.load(packed_ptr + e // 2, mask=inside, other=0).to(tl.int32)
    # An odd K puts a row's first element into the low nibble, hence the index of the element and not of the column.
    nibble = tl.where(e % 2 == 0, byte // 16, byte % 16)
    value = tl.load(code_ptr + nibble).to(tl.float32)
    block = e // blocksize
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(code2_ptr + q).to(tl.float32)
        scale = scale * tl.load(absmax2_ptr + block // blocksize2, mask=inside, other=0.0).to(tl.float32)
        scale += tl.load(offset_ptr).to(tl.float32)
    else:
        scale = tl.load(absmax_ptr + block, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + col, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_into(packed: torch.Tensor, state: Any, out: torch.Tensor) -> None:
    """out (N, K) = the weight, of packed (N · K / 2, 1) uint8 and its quant_state; out may be a strided view into an
    operand buffer. Raises ValueError where they do not fit."""
    n, k = state.shape
    check(out.shape == (n, k), f"out must be {(n, k)}", out=out)
    fits = packed.numel() * packed.element_size() == cdiv(n * k, 2)
    check(fits, f"packed must hold {n * k} elements of 4 bits", packed=packed)
    packed = packed.detach().view(torch.uint8) if packed.dtype != torch.uint8 else packed.detach()
    second = getattr(state, "state2", None)
    if not use_triton(out) or is_repacked(state):
        out.copy_(dequantize_reference(packed, state))
        return
    block = min(1024, next_power_of_2(k))
    # Without double quantization the last three pointers are never read.
    nested = (
        (second.code, second.absmax, state.offset) if second is not None else (state.code, state.absmax, state.code)
    )
    _dequantize_kernel[(n, cdiv(k, block))](
        packed, state.code, state.absmax, *nested, out, k, out.stride(0), state.blocksize,
        1 if second is None else second.blocksize, NESTED=second is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def dequantize(packed: torch.Tensor, state: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight as a new contiguous (N, K) in dtype, of packed (N · K / 2, 1) uint8 and its quant_state."""
    out = torch.empty(tuple(state.shape), dtype=dtype, device=packed.device)
    dequantize_into(packed, state, out)
    return out
