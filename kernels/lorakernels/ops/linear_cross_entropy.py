"""Cross-entropy of a linear head, in chunks of rows that never hold all logits: loss = Σ_i [logsumexp(z_i) - z_i[t_i]]
/ n with z = x · Wᵀ (+ bias), softcapped as cap · tanh(z / cap) where a cap is given.

x: (M, H), W: (V, H) of one dtype; target: (M,) int64; rows with target == ignore_index count for nothing. n is the
number of other rows, or `num_items` as transformers passes it. A chunk's logits are replaced in place by softmax -
onehot and multiplied with W at once, so backward is one multiplication by a scalar: the head costs two GEMMs (three if
W learns; a frozen W costs nothing). The scalar 1/n comes last because (softmax - onehot)/n underflows in float16 before
a GradScaler could help. Nothing waits for the GPU, so a CUDA graph can hold it. Idea of computing the gradient in
forward: Liger-Kernel (Hsu et al. 2024). Run: python -m pytest tests/lorakernels/test_linear_cross_entropy.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..runtime import cdiv, check, kernel, next_power_of_2, rows, tl, use_triton, working_dtype
from .fast_math import exp, tanh

CHUNK_BYTES = 256 << 20  # of logits; 1024 rows at Llama 3's vocabulary: dX still fills the GPU with tiles


def linear_cross_entropy_reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ignore_index: int = -100, num_items: int | torch.Tensor | None = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same in float32 (float64 for float64), all logits at once: x (M, H), weight (V, H), target (M,), bias
    (V,)."""
    dtype = working_dtype(x)
    z = x.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        z = z + bias.to(dtype)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    total = F.cross_entropy(z, target, ignore_index=ignore_index, reduction="sum")
    return total / ((target != ignore_index).sum() if num_items is None else num_items)


@kernel
def _loss_kernel(
    z_ptr, target_ptr, loss_ptr, entropy_ptr, top1_ptr, n, z_row, ignore_index, cap,
    CAP: tl.constexpr, WITH_GRAD: tl.constexpr, WITH_STATS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One row: running maximum and sum, then the logits become their gradient (the second walk is served by L2).

    A lane keeps one maximum and one sum for the EACH neighbours it loads at once, so the sum is rescaled once for them
    all, and no lane waits for another inside the walk.
    """
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_row
    target = tl.load(target_ptr + row)
    counted = target != ignore_index
    spot = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, n, LANES * EACH):
        z = tl.load(z_ptr + start + spot, mask=start + spot < n, other=float("-inf")).to(tl.float32)
        if CAP:
            z = tl.where(start + spot < n, cap * tanh(z / cap), float("-inf"))
        new = tl.maximum(top, tl.max(z, axis=1))
        # A lane may have met nothing but padding so far: -inf - -inf is NaN, so it subtracts 0.
        safe = tl.where(new > float("-inf"), new, 0.0)
        total = total * exp(top - safe) + tl.sum(exp(z - safe[:, None]), axis=1)
        top = new
    peak = tl.max(top, axis=0)
    # Differences from the peak throughout: at logits of 1e4 a float32 logsumexp is off by 1e-3.
    total_sum = tl.sum(total * exp(top - peak), axis=0)
    # torch stops at a target that is no token. Here its loss and gradient are NaN, and nothing outside is read.
    token = (target >= 0) & (target < n)
    peak = tl.where(counted & (token == 0), float("nan"), peak)
    at_target = tl.load(z_ptr + tl.where(counted & token, target, 0)).to(tl.float32)
    if CAP:
        at_target = cap * tanh(at_target / cap)
    tl.debug_barrier()  # every thread has read the target's logit before one of them overwrites it
    tl.store(loss_ptr + row, tl.where(counted, (peak - at_target) + tl.log(total_sum), 0.0))  # pyright: ignore[reportOperatorIssue]
    if WITH_GRAD or WITH_STATS:
        share = 1.0 / total_sum  # pyright: ignore[reportOperatorIssue]  # one tensor's sum is no tuple
        mean = tl.zeros((LANES,), tl.float32)  # of z - peak
        above = tl.zeros((LANES,), tl.float32)  # logits that are chosen before the target's
        for start in range(0, n, LANES * EACH):
            inside = start + spot < n
            z = tl.load(z_ptr + start + spot, mask=inside, other=0.0).to(tl.float32)
            slope = 1.0
            if CAP:
                t = tanh(z / cap)
                z = cap * t
                slope = 1.0 - t * t
            p = exp(z - peak) * share
            if WITH_STATS:
                mean += tl.sum(tl.where(inside & (p > 0), p * (z - peak), 0.0), axis=1)
                before = (z > at_target) | ((z == at_target) & (start + spot < target))
                above += tl.sum(tl.where(inside & before, 1.0, 0.0), axis=1)
            if WITH_GRAD:
                g = (p - tl.where(start + spot == target, 1.0, 0.0)) * slope
                # where, not a product: an ignored row may hold infinities, and 0 * inf is NaN.
                tl.store(z_ptr + start + spot, tl.where(counted, g, 0.0).to(z_ptr.dtype.element_ty), mask=inside)
        if WITH_STATS:
            entropy = tl.log(total_sum) - tl.sum(mean, axis=0)  # pyright: ignore[reportOperatorIssue]
            tl.store(entropy_ptr + row, tl.where(counted, entropy, 0.0))
            top1 = tl.where(tl.sum(above, axis=0) > 0, 0, 1)  # pyright: ignore[reportOperatorIssue]
            tl.store(top1_ptr + row, tl.where(counted, top1, 0).to(tl.uint8))


def loss_and_gradient_(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, softcap: float | None = None,
    with_grad: bool = True, stats: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Loss of each row (M,) float32, of target (M,) int64; with_grad overwrites logits (M, V) with softmax - onehot
    (times the slope of the cap). stats: where each row's entropy (M,) in float32 goes, and whether the target is the
    first of the largest logits (M,) in uint8; both 0 where the target is ignored."""
    m, n = logits.shape
    if not use_triton(logits):
        return _loss_torch(logits, target, ignore_index, softcap, with_grad, stats)
    loss = torch.empty(m, dtype=torch.float32, device=logits.device)
    each = 8  # 16 bytes of a 2-byte type
    lanes = max(1, min(2048, next_power_of_2(n) // each))
    # One large program a multiprocessor: the rows in flight have to fit L2, or the second walk goes to memory again.
    _loss_kernel[(m,)](
        logits, target, loss, *((loss, loss) if stats is None else stats), n, logits.stride(0), ignore_index,
        1.0 if softcap is None else softcap,
        CAP=softcap is not None, WITH_GRAD=with_grad, WITH_STATS=stats is not None, LANES=lanes, EACH=each,
        num_warps=32 if lanes >= 1024 else 4,
    )  # fmt: skip
    return loss


def _loss_torch(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, softcap: float | None, with_grad: bool,
    stats: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    z = logits.to(working_dtype(logits))
    t = None
    if softcap is not None:
        t = torch.tanh(z / softcap)
        z = t * softcap
    counted = target != ignore_index
    index = torch.where(counted, target, 0)[:, None]
    top1 = None if stats is None else (z.argmax(-1) == target) & counted
    z = torch.log_softmax(z, -1)
    if stats is not None and top1 is not None:
        p = z.exp()
        stats[0].copy_(torch.where(counted, -torch.where(p > 0, p * z, 0).sum(-1), 0))
        stats[1].copy_(top1)
    loss = torch.where(counted, -z.gather(1, index)[:, 0], 0)
    if with_grad:
        g = torch.exp(z).scatter_add(1, index, torch.full_like(index, -1, dtype=z.dtype))
        g = g if t is None else g * (1 - t * t)
        logits.copy_(torch.where(counted[:, None], g, 0))
    return loss


def mm_in(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) @ b (K, N) with the result (M, N) in dtype, accumulated and left in float32 where that is asked for."""
    if dtype == a.dtype:
        return a @ b
    if dtype == torch.float32 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(dtype) @ b.to(dtype)


def chunk_rows(m: int, n_vocabulary: int, element_size: int) -> int:
    """Rows a chunk of m rows, so that all chunks are about equal and the logits, of element_size bytes each, stay under
    CHUNK_BYTES."""
    most = max(128, CHUNK_BYTES // (n_vocabulary * element_size))
    size = cdiv(m, cdiv(m, most))
    return min(m, cdiv(size, 128) * 128)


class LossSpec(NamedTuple):
    """Rows whose target is ignore_index count for nothing; softcap: of the logits; chunk: rows at a time, None for
    `chunk_rows`."""

    ignore_index: int = -100
    softcap: float | None = None
    chunk: int | None = None


def chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, spec: LossSpec,
    loss: torch.Tensor, dx: torch.Tensor | None, with_grad: bool,
    stats: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """Chunk by chunk, its rows of x (M, H) and what `loss_and_gradient_` has left in its logits (rows, V). loss (M,),
    dx (M, H) where there is one, and stats (M,) each, are filled on the way."""
    m = x.shape[0]
    step = spec.chunk or chunk_rows(m, weight.shape[0], x.element_size()) if m else 1
    for i in range(0, m, step):
        part = slice(i, min(i + step, m))
        z = F.linear(x[part], weight, bias)
        of_part = None if stats is None else (stats[0][part], stats[1][part])
        loss[part] = loss_and_gradient_(z, target[part], spec.ignore_index, spec.softcap, with_grad, of_part)
        if dx is not None:
            torch.mm(z, weight, out=dx[part])
        yield part, z


class LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` as one node, which saves the gradients of x (M, H), weight (V, H) and bias (V,)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        num_items: int | torch.Tensor | None, spec: LossSpec,
    ) -> torch.Tensor:  # fmt: skip
        needs = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs[0] else None
        dw = torch.zeros(weight.shape, dtype=working_dtype(weight), device=weight.device) if needs[1] else None
        db = (
            torch.zeros(bias.shape, dtype=working_dtype(bias), device=x.device)
            if bias is not None and needs[2]
            else None
        )
        loss = torch.empty(x.shape[0], dtype=working_dtype(x), device=x.device)
        for part, z in chunks(x, weight, bias, target, spec, loss, dx, any(needs[:3])):
            if dw is not None:
                dw += mm_in(z.t(), x[part], dw.dtype)
            if db is not None:
                db += z.sum(0, dtype=db.dtype)
        count = (target != spec.ignore_index).sum() if num_items is None else num_items
        if torch.is_tensor(count):
            count = count.to(x.device)
        scale = torch.ones((), dtype=loss.dtype, device=x.device) / count
        # Of no token at all the mean is NaN, as torch's is, but its gradient is zero.
        ctx.save_for_backward(dx, dw, db, torch.where(scale.isfinite(), scale, 0))
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss.sum() * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, db, scale = ctx.saved_tensors
        scale = grad.to(scale.dtype) * scale
        out: list[Any] = [None if t is None else (t * scale).to(t.dtype) for t in (dx, dw, db)]
        for i, dtype in enumerate(ctx.dtypes, 1):
            out[i] = None if out[i] is None else out[i].to(dtype)
        return *out, None, None, None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    ignore_index: int = -100, num_items: int | torch.Tensor | None = None, softcap: float | None = None,
    chunk: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Mean (or sum / num_items) cross-entropy of x · weightᵀ (+ bias) against target, a float32 scalar.

    x: (…, H), weight: (V, H), target: (…), int64, bias: (V,); num_items may be a scalar tensor on the device; chunk:
    rows at a time. Raises ValueError where the shapes do not fit, or x and weight differ in dtype.
    """
    check(x.shape[-1:] == weight.shape[1:] and weight.dim() == 2, "x and weight do not fit", x=x, weight=weight)
    check(target.shape == x.shape[:-1], "target must have one entry a row of x", x=x, target=target)
    check(x.dtype == weight.dtype, "x and weight differ in dtype", x=x, weight=weight)
    if bias is not None:
        check(bias.shape == weight.shape[:1], "bias must have one entry a row of weight", bias=bias, weight=weight)
    spec = LossSpec(ignore_index, softcap, chunk)
    return LinearCrossEntropy.apply(rows(x), weight, bias, target.reshape(-1).contiguous(), num_items, spec)
