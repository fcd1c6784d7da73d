"""Every kernel once, small and ragged, and whole tiny models, for compute-sanitizer: accesses, not values.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/lorakernels/memcheck.py

It switches torch's caching allocator off: then every tensor is an allocation of its own, and a byte beside it an error
that memcheck sees. Shapes are no multiple of any tile. Without a GPU it runs the torch paths, which shows that it runs.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch reads it when it first allocates

from itertools import product
from typing import Any

import lorakernels
import torch
from kernel_checks import quantized
from lorakernels import tune
from lorakernels.nodes import fp8
from lorakernels.ops import multi_lora, multi_product, own_columns, quantized_glu
from lorakernels.ops.adapter import Loader, load_adapter, raised_b
from lorakernels.ops.concat_operand import LoraColumns, ScaledS, concat_operand_into, s_into
from lorakernels.ops.dropout import add_product_into, draw_seed, dropout_into, product_into
from lorakernels.ops.glu import A_TILES as GLU_A_TILES
from lorakernels.ops.glu import (
    ACTIVATIONS,
    WHOLE_TILES,
    GluBackward,
    OwnOfMLP,
    backward_a_into,
    backward_whole_into,
    forward_lora_into,
    gated,
    whole_fits,
)
from lorakernels.ops.job_columns import keep_own_columns
from lorakernels.ops.job_rows import JobRows
from lorakernels.ops.linear_cross_entropy import linear_cross_entropy
from lorakernels.ops.linear_log_probs import linear_log_probs
from lorakernels.ops.lora_grad import A_TILES, B_TILES, AdapterColumns, a_gradient, b_gradient, ds_and_db, fitting_tiles
from lorakernels.ops.nf4 import dequantize_into
from lorakernels.ops.quantize_rows import FP8, new_quantized, quantize_rows, quantize_rows_into
from lorakernels.ops.rms_norm import Norm, NormFactors, NormInput, rms_norm
from lorakernels.ops.rms_norm import forward_into as norm_into
from lorakernels.ops.rms_norm import forward_lora_into as norm_lora_into
from lorakernels.ops.rope import rope
from lorakernels.runtime import TILES, tensor_cores
from tiny_models import batch, build, step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K, P = 37, 75, 130, 5


def random(*shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(grad)


def own_columns_of(new: Any, rows: JobRows) -> None:
    """The kernels in which each row makes its own job's columns: of ranks that allow wide loads, and of others."""
    if not tensor_cores(new(1)):
        return
    for first in (3, 8):
        p, widths = first + 8, [64, 64]
        pair = []
        for i in range(2):
            of_jobs = [(i * p, first), (i * p + first, 8)]
            columns = slice(i * p, (i + 1) * p)
            pair.append(own_columns.LinearColumns(columns, of_jobs))
        two = own_columns.Own(own_columns.OwnColumns(pair, torch.device(DEVICE)), rows)
        one = own_columns.Own(own_columns.OwnColumns(pair[:1], torch.device(DEVICE)), rows)
        s, scaled_s = new(M, 2 * p), ScaledS(new(M, 2 * p), new(2 * p).float())
        for tile in own_columns.TILES:
            own_columns.own_s(new(M, K), new(2 * p, K), two, s, scaled_s, tile)
        for tile in own_columns.A_TILES:
            for of_norm in (None, NormFactors(new(M).float(), new(K), Norm(1e-6))):
                own_columns.own_a_gradients(new(M, K), s, two, new(2 * p, K).float(), tile, of_norm)
        adapters = AdapterColumns(new(128, 2 * p), scaled_s.out, widths, p, two)
        for tile in fitting_tiles(s, widths, [8, 8]):
            ds_and_db(new(M, 128), s, adapters, tile)
        for tile in TILES:
            columns = LoraColumns(new(p, 64), p, ScaledS(new(M, p), new(p).float()))
            forward_lora_into(new(M, 64), new(M, 64), new(M, 64 + p), columns, "silu", tile, one)
        for tile in WHOLE_TILES:
            wide = new(M, 128 + 2 * p)
            inputs = GluBackward(wide[:, :64], wide[:, 64:128], new(M, 64), "silu")
            own = OwnOfMLP(two, one)
            backward_whole_into(inputs, wide, new(M, p), new(128, 2 * p), scaled_s.out, tile, own=own)


def kernels(dtype: torch.dtype) -> None:
    """All kernels, forward and backward, in one dtype."""

    def new(*shape: int, grad: bool = False) -> torch.Tensor:
        return random(*shape, dtype=dtype, grad=grad)

    scaled_s = ScaledS(new(M, P), random(P, dtype=torch.float32))

    def columns(k: int, rank: int) -> LoraColumns:
        return LoraColumns(new(P, k), rank, scaled_s)

    for act in ACTIVATIONS:
        gated(new(M, N, grad=True), new(M, N, grad=True), act).sum().backward()
        for tile in TILES:
            forward_lora_into(new(M, N), new(M, N), new(M, N + P), columns(N, P - 1), act, tile)
        for tile in GLU_A_TILES:
            gate, up = new(M, N), new(M, N)
            backward_a_into(GluBackward(gate, up, new(M, N), act), gate, up, new(M, P), tile)
        wide, ds = new(M, 2 * N + 3 * P), new(M, P)
        for tile in WHOLE_TILES if whole_fits(ds, [P, P], [N, N]) else ():
            gate, up = wide[:, :N], wide[:, N : 2 * N]
            inputs = GluBackward(gate, up, new(M, N), act)
            backward_whole_into(inputs, wide, ds, new(2 * N, 3 * P), new(M, 3 * P), tile)
    y, h = rms_norm(new(M, K, grad=True), new(K, grad=True), residual=new(M, K, grad=True))
    (y.sum() + h.sum()).backward()
    for tile in TILES:
        inputs = NormInput(new(M, K), new(K), Norm(1e-6), new(M, K), new(M, K), new(M, K))
        norm_lora_into(inputs, new(M, K + P), columns(K, 3), tile)
        concat_operand_into(new(M, K), columns(K, 3), new(M, K + P), tile)
        s_into(new(M, K), columns(K, 3), new(M, K + P)[:, K:], tile)
    q, k = rope(new(2, 3, 7, 10, grad=True), new(2, 1, 7, 10, grad=True), new(1, 7, 10), new(1, 7, 10))
    (q.sum() + k.sum()).backward()
    target = torch.randint(0, 501, (M,), device=DEVICE)
    for cap in (None, 30.0):
        linear_cross_entropy(new(M, K, grad=True), new(501, K), target, softcap=cap, chunk=16).backward()
        linear_log_probs(new(M, K, grad=True), new(501, K), target, softcap=cap, chunk=16).log_probs.sum().backward()
    seed = draw_seed(torch.device(DEVICE))
    dropout_into(new(M, K), seed, 0.3, new(M, K))
    for tile in TILES:
        product_into(new(M, K), new(P, K), seed, 0.3, new(M, 2 * P)[:, :P], tile)
    add_product_into(new(M, P), new(P, K), seed, 0.3, new(M, K))
    d = new(M, 192 + 3 * P)
    for tile in fitting_tiles(d, [64, 64, 64], [P] * 3):
        adapters = AdapterColumns(new(192, 3 * P), new(M, 3 * P), [64, 64, 64], P)
        ds_and_db(d[:, :192], d[:, 192:], adapters, tile)
    for tile in fitting_tiles(d, [N], [P]):
        ds_and_db(new(M, N), new(M, P), AdapterColumns(new(N, P), new(M, P), [N], P), tile)
    for widths in ([64, 64, 64], [N]):
        for tile in fitting_tiles(d, widths, [P] * len(widths), B_TILES):
            b_gradient(new(M, sum(widths)), new(M, P * len(widths)), widths, P, tile)
    if tensor_cores(d):
        for tile in A_TILES:
            factors = NormFactors(torch.rand(M, device=DEVICE), new(K), Norm(1e-6))
            a_gradient(new(M, P), new(M, K), factors, tile)
            a_gradient(new(M, P), new(M, K), tile=tile, seed=seed, dropout=0.3)
    rows = JobRows([(1, 20), (0, 3), (1, M - 23)], DEVICE)
    adapters = [multi_lora.Adapter(new(3, K), new(N, 3), 0.5), multi_lora.Adapter(new(P, K), new(N, P), 2.0, 0.3)]
    table = multi_lora.AdapterTable(adapters)
    # All at multiples of 16 bytes, of which several elements are loaded at once.
    whole = multi_lora.AdapterTable([multi_lora.Adapter(new(8, 8 * K), new(N, 8), 0.5)] * 2)
    x, dy = new(M, 8 * K), new(M, N)
    s, ds = multi_lora.down(x, whole, rows), multi_lora.down(dy, whole, rows, of_b=True)
    multi_lora.up(s, whole, rows, new(M, N))
    multi_lora.gradients(x, ds, whole, rows)
    for seeds in (None, torch.arange(2, device=DEVICE)):
        x, dy = new(M, K), new(M, N)
        s, ds = multi_lora.down(x, table, rows, seeds=seeds), multi_lora.down(dy, table, rows, of_b=True)
        multi_lora.up(s, table, rows, new(M, N))
        multi_lora.up(ds, table, rows, new(M, K), of_b=False, seeds=seeds)
        multi_lora.gradients(x, ds, table, rows, seeds=seeds)
        multi_lora.gradients(dy, s, table, rows, of_b=True)
        slots = multi_lora.AdapterTable([a and a._replace(column=3 * i) for i, a in enumerate(adapters)])
        multi_lora.down(x, slots, rows, seeds=seeds, out=new(M, 3 + P))
    w, s = new(N + 5, K + 6)[:N, :K], new(M, P + 3)  # rows at multiples of 16 bytes in each dtype
    for tile, of_b in product(multi_product.TILES, (True, False)):
        x = new(M, K + 6)[:, :K] if of_b else new(M, N + 5)[:, :N]
        out = new(M, N + 5)[:, :N] if of_b else new(M, K + 6)[:, :K]
        if multi_product.takes(x, w, P, [8], out):
            for seeds in (None, torch.arange(2, device=DEVICE)) if not of_b else (None,):
                multi_product.multi_product(x, w, s, [table], rows, tile, of_b=of_b, seeds=seeds, residual=out, out=out)
    own_columns_of(new, rows)
    columns = torch.tensor([0] * 3 + [1] * P, dtype=torch.int32, device=DEVICE)
    keep_own_columns(new(M, 3 + P), rows.job_of_row(), columns)
    keep_own_columns(new(M, 3 + P), rows.job_of_row(), columns, new(M, 3 + P))
    keep_own_columns(new(M, 3 + P), rows.job_of_row(), columns, new(M, 3 + P), new(3 + P).float())
    items = []
    for n, r in ((N, 3), (K, 7)):
        buffer = new(n + r, K + r)
        items.append((new(r, K), new(n, r), 2.0, buffer[n:, :K], buffer[:n, K:]))
    Loader().load(items)
    load_adapter(*items[0])
    raised_b([(new(N, 3), N, 2.0), (None, K, 1.0), (new(5, 7), 5, 0.5)], 13, dtype, torch.device(DEVICE))
    raised_b([(new(1, 1), 1, 1.0), (new(N, 1), N, 2.0)], 16, dtype, torch.device(DEVICE))  # ones are compiled in
    if fp8.supported(torch.device(DEVICE)) is None:
        for width in (K, 33000):  # one walk over a row, and two
            quantize_rows(new(M, width + P)[:, :width], random(width, dtype=torch.float32))
        q = torch.zeros(K, M, device=DEVICE).to(FP8)
        quantize_rows_into(new(M, K), q.t(), random(M, 1, dtype=torch.float32))
        norm_into(NormInput(new(M, K), new(K), Norm(1e-6)), new(M, K), new_quantized(M, K, q.device))
        factor = random(2 * N, dtype=torch.float32)
        for act in ACTIVATIONS:
            for tile in TILES:
                gate_up, s, t = new(M, 2 * N + 3)[:, : 2 * N], new(M, 2 * P), new(M, P)
                of_down = LoraColumns(new(P, N), P - 1, scaled_s)
                quantized_glu.forward(gate_up, s, new(2 * N, 2 * P), act, of_down, t, 2 * P, tile)
            for tile in WHOLE_TILES:
                inputs = GluBackward(new(M, N), new(M, N), new(M, N), act)
                sb, s = new(2 * N, 3 * P), new(M, 3 * P)
                quantized_glu.backward(inputs, new(M, P), new(P, N), factor, sb, s, new(M, 3 * P), tile)
    for nested in (False, True):
        packed, state = quantized(N, 128, 64, nested, DEVICE)
        dequantize_into(packed, state, new(N, 128 + P)[:, :128])


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kernels(dtype)
        print("kernels", dtype, flush=True)
    data = {n: t.to(DEVICE) for n, t in batch(3, 13).items()}
    models = [("llama", 4), ("qwen3", 4), ("gemma2", 4), ("phi3", 4), ("llama", 65)]
    # RoPE behind head norms, GEGLU with soft-capping, RoPE on half a head; the tiles of large ranks.
    for (family, rank), form, dropout in product(models, ("one", "addmm"), (0.0, 0.1)):
        model = build(family, torch.bfloat16, r=rank, lora_dropout=dropout).to(DEVICE)
        print(family, "r", rank, form, dropout, lorakernels.apply(model), flush=True)
        with tune.forced(form):
            step(model, data)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        if cached := torch.cuda.memory_reserved():
            raise SystemExit(
                f"torch's caching allocator holds {cached} bytes: what memcheck saw is not every tensor's end"
            )
    print("all ran on", DEVICE)


if __name__ == "__main__":
    main()
