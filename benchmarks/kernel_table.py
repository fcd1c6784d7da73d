"""Every kernel of lorakernels at Llama-3.1-8B's shapes: time, bytes or operations at the least, share of the ceiling.

    python benchmarks/kernel_table.py [--tokens 8192] [--json FILE]      # the table of kernels/README.md

A kernel's time is the median over replays of a CUDA graph that holds it several times, with its inputs in turn from
copies that together exceed the L2 cache, so neither launches nor cached inputs flatter it. The ceilings (a large copy,
a large GEMM, sustained) are measured in the same process. "Least" counts every operand read once and every result
written once. Without a GPU it runs small shapes by the wall clock, which shows no more than that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lorakernels.ops.glu as glu
import lorakernels.ops.rms_norm as rms_norm
import lorakernels.ops.rope as rope
import torch
from lorakernels.nodes.fp8 import FrozenFp8, supported
from lorakernels.ops.adapter import Loader
from lorakernels.ops.concat_operand import LoraColumns, concat_operand_into, s_into
from lorakernels.ops.dropout import add_product_into, draw_seed, dropout_into, product_into
from lorakernels.ops.linear_cross_entropy import loss_and_gradient_
from lorakernels.ops.lora_grad import AdapterColumns, a_gradient, ds_and_db
from lorakernels.ops.nf4 import dequantize_into
from lorakernels.runtime import tensor_cores

from lorabench.measure.machine import describe
from lorabench.measure.roofline import ceilings

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEADS = (32, 8, 128) if CUDA else (4, 1, 8)  # of q, of k, size
HIDDEN, KEYS = HEADS[0] * HEADS[2], HEADS[1] * HEADS[2]
QKV = HIDDEN + 2 * KEYS
WIDE, VOCABULARY = (14336, 128256) if CUDA else (64, 500)
RANK, SPARE = 16, 64
CACHE = 200 << 20 if CUDA else 1  # bytes that surely exceed L2
DTYPE = torch.bfloat16
SIZE = 2  # bytes an element of DTYPE


@dataclass
class Row:
    """One line: what it computes, the formula of its least (elements moved), what it moves besides, microseconds, and
    either bytes at the least or operations."""

    kernel: str
    computes: str
    least: str
    besides: str
    us: float
    bytes: int = 0
    flops: int = 0

    def share(self, copy_gbs: float, tflops: float) -> float:
        return self.bytes / self.us / 1e3 / copy_gbs if self.bytes else self.flops / self.us / 1e6 / tflops


def timed(make: Callable[[], Callable[[], Any]], footprint: int, replays: int = 15) -> float:
    """Microseconds a call. `make` returns a call on inputs of its own, `footprint` bytes of them."""
    calls = [make() for _ in range(max(2, min(32, -(-CACHE // footprint))))]

    def once() -> None:
        for call in calls:
            call()

    once()
    once()
    times = []
    if not CUDA:
        for _ in range(3):
            began = time.perf_counter()
            once()
            times.append(1e6 * (time.perf_counter() - began) / len(calls))
        return statistics.median(times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    return statistics.median(times[3:])


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device=DEVICE, dtype=DTYPE)


def bandwidth_rows(m: int) -> list[Row]:
    """Kernels that move bytes. m: tokens."""
    rows: list[Row] = []

    def add(
        kernel: str, computes: str, least: str, elements: int, make: Callable[[], Callable[[], Any]], besides: str = ""
    ) -> None:
        rows.append(Row(kernel, computes, least, besides, timed(make, elements * SIZE), bytes=elements * SIZE))
        if CUDA:
            torch.cuda.empty_cache()

    def norm_input():
        x, r, h, w = random(m, HIDDEN), random(m, HIDDEN), random(m, HIDDEN), random(HIDDEN)
        return rms_norm.NormInput(x, w, norm, r, h)

    def norm_forward():
        inputs, y = norm_input(), empty(m, HIDDEN + SPARE)[:, :HIDDEN]
        return lambda: rms_norm.forward_into(inputs, y)

    def norm_with_s():
        inputs, columns = norm_input(), LoraColumns(random(SPARE, HIDDEN), 2 * RANK)
        buffer = empty(m, HIDDEN + SPARE)
        return lambda: rms_norm.forward_lora_into(inputs, buffer, columns, "fused_small")

    def norm_backward():
        dy, h, d, w = random(m, HIDDEN), random(m, HIDDEN), random(m, HIDDEN), random(HIDDEN)
        rstd, dx = random(m, dtype=torch.float32).abs(), empty(m, HIDDEN)
        factors = rms_norm.NormFactors(rstd, w, norm)
        return lambda: rms_norm.backward_into(dy, h, factors, dx, d)

    def turned(backward: bool):
        size = HEADS[2]
        rotary = rope.Rotary(random(1, m // 4, size), random(1, m // 4, size))

        def make():
            y = random(m, QKV + SPARE).view(4, m // 4, QKV + SPARE)
            q, k, v = (t.unflatten(-1, (-1, size)) for t in y[..., :QKV].split([HIDDEN, KEYS, KEYS], -1))
            if not backward:
                return lambda: rope.rotate_into(rope.HeadTensors(q, k), rope.HeadTensors(q, k), rotary)
            grads = rope.HeadTensors(*(random(*t.shape) for t in (q, k, v)))
            return lambda: rope.rotate_into(grads, rope.HeadTensors(q, k, v), rotary, backward=True)

        return make

    def glu_forward(act: str):
        def make():
            gate_up, h = random(m, 2 * WIDE), empty(m, WIDE + SPARE)
            return lambda: glu.forward_into(gate_up[:, :WIDE], gate_up[:, WIDE:], h[:, :WIDE], act)

        return make

    def glu_forward_with_s():
        gate_up, buffer = random(m, 2 * WIDE), empty(m, WIDE + SPARE)
        columns = LoraColumns(random(SPARE, WIDE), RANK)
        return lambda: glu.forward_lora_into(gate_up[:, :WIDE], gate_up[:, WIDE:], buffer, columns, "silu")

    def glu_backward(act: str):
        def make():
            gate_up, dh = random(m, 2 * WIDE + SPARE), random(m, WIDE)
            gate, up = gate_up[:, :WIDE], gate_up[:, WIDE : 2 * WIDE]
            return lambda: glu.backward_into(glu.GluBackward(gate, up, dh, act), gate, up, h_into_grad=True)

        return make

    def glu_backward_with_a():
        gate_up, dh, ds = random(m, 2 * WIDE + SPARE), random(m, WIDE), random(m, RANK)
        gate, up = gate_up[:, :WIDE], gate_up[:, WIDE : 2 * WIDE]
        return lambda: glu.backward_a_into(glu.GluBackward(gate, up, dh, "silu"), gate, up, ds)

    def glu_backward_whole():
        wide, dh, ds = random(m, 2 * WIDE + SPARE), random(m, WIDE), random(m, RANK)
        sb, s = random(2 * WIDE, SPARE), random(m, SPARE)
        gate, up = wide[:, :WIDE], wide[:, WIDE : 2 * WIDE]
        return lambda: glu.backward_whole_into(glu.GluBackward(gate, up, dh, "silu"), wide, ds, sb, s)

    def concat_operand():
        x, columns, out = random(m, HIDDEN), LoraColumns(random(SPARE, HIDDEN), RANK), empty(m, HIDDEN + SPARE)
        return lambda: concat_operand_into(x, columns, out)

    def s_alone():
        operand, columns = random(m, HIDDEN + SPARE), LoraColumns(random(SPARE, HIDDEN), RANK)
        return lambda: s_into(operand[:, :HIDDEN], columns, operand[:, HIDDEN:])

    def ds_db(widths: list[int], tile: str):
        def make():
            n = sum(widths)
            d, adapters = random(m, n + SPARE), AdapterColumns(random(n, SPARE), random(m, SPARE), widths, RANK)
            return lambda: ds_and_db(d[:, :n], d[:, n:], adapters, tile)

        return make

    def a_grad():
        ds, h, w = random(m, 2 * RANK), random(m, HIDDEN), random(HIDDEN)
        rstd = random(m, dtype=torch.float32).abs()
        factors = rms_norm.NormFactors(rstd, w, norm)
        return lambda: a_gradient(ds, h, factors)

    def loss():
        z = random(m // 8, VOCABULARY)
        target = torch.randint(0, VOCABULARY, (m // 8,), device=DEVICE)
        return lambda: loss_and_gradient_(z, target)

    def drop():
        x, out, seed = (
            random(m, HIDDEN),
            empty(m, HIDDEN),
            draw_seed(torch.device(DEVICE)),
        )
        return lambda: dropout_into(x, seed, 0.1, out)

    def dropped_product():
        x, a, s, seed = random(m, HIDDEN), random(RANK, HIDDEN), empty(m, RANK), draw_seed(torch.device(DEVICE))
        return lambda: product_into(x, a, seed, 0.1, s, "fused_small")

    def dropped_sum():
        ds, a, dx, seed = random(m, RANK), random(RANK, HIDDEN), random(m, HIDDEN), draw_seed(torch.device(DEVICE))
        return lambda: add_product_into(ds, a, seed, 0.1, dx)

    def expand():
        n, k = HIDDEN, WIDE
        blocks = n * k // 64
        packed, out = torch.randint(256, (n * k // 2, 1), dtype=torch.uint8, device=DEVICE), empty(n, k + SPARE)[:, :k]
        code, scales = torch.linspace(-1, 1, 16, device=DEVICE), torch.rand(blocks, device=DEVICE)
        state = SimpleNamespace(shape=(n, k), code=code, absmax=scales, blocksize=64, state2=None, offset=None)
        return lambda: dequantize_into(packed, state, out)

    def load():
        items = []
        for n, k in linears:
            buffer = empty(n + RANK, k + RANK)
            items.append((random(RANK, k), random(n, RANK), 2.0, buffer[n:, :k], buffer[:n, k:]))
        loader = Loader()
        return lambda: loader.load(items)

    norm = rms_norm.Norm(1e-6)
    linears = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN)]
    linears += [(WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)]
    adapters = RANK * sum(n + k for n, k in linears)
    triton_only = tensor_cores(empty(1, 1))  # elsewhere `Projection` takes library calls
    a_again, by_atomics = "A once a block of rows", "float32 sums of dS and dB, by atomic adds"
    add("rms_norm", "h = x + r, y = h·rstd·w", "4·M·H", 4 * m * HIDDEN, norm_forward)
    add("rms_norm", "h, and [y ∣ y·Aᵀ]", "4·M·H", 4 * m * HIDDEN, norm_with_s, f"x and r once more; {a_again}")
    add("rms_norm", "dh, with the residual's gradient", "4·M·H", 4 * m * HIDDEN, norm_backward)
    add("rope", "q and k rotated in place", "2·M·N", 2 * m * (HIDDEN + KEYS), turned(False))
    add("rope", "[dq ∣ dk ∣ dv]", "2·M·N", 2 * m * QKV, turned(True))
    add("swiglu", "h = silu(gate)·up", "3·M·I", 3 * m * WIDE, glu_forward("silu"))
    add("swiglu", "[h ∣ h·Aᵀ]", "3·M·I", 3 * m * WIDE, glu_forward_with_s, a_again)
    add("swiglu", "d gate, d up, and h again", "6·M·I", 6 * m * WIDE, glu_backward("silu"))
    add("swiglu", "d gate, d up, and dA = dSᵀ·h of down", "5·M·I", 5 * m * WIDE, glu_backward_with_a)
    if triton_only:
        whole = "d gate, d up, dA of down, dS and dB of gate and up"
        add("swiglu", whole, "5·M·I", 5 * m * WIDE, glu_backward_whole, by_atomics)
    add("geglu", "h = gelu(gate)·up, by erf", "3·M·I", 3 * m * WIDE, glu_forward("gelu"))
    add("geglu", "d gate, d up, and h again, by erf", "6·M·I", 6 * m * WIDE, glu_backward("gelu"))
    add("geglu", "the same by tanh", "6·M·I", 6 * m * WIDE, glu_backward("gelu_tanh"))
    add("concat_operand", "[x ∣ x·Aᵀ], attention's output", "2·M·H", 2 * m * HIDDEN, concat_operand, a_again)
    add("concat_operand", "S = x·Aᵀ behind the x of a norm", "M·H", m * HIDDEN, s_alone, a_again)
    if triton_only:
        o, qkv, gate_up = [HIDDEN], [HIDDEN, KEYS, KEYS], [WIDE, WIDE]
        add("lora_grad", "dS = dY·sB, dB = dYᵀ·sS of o or down", "M·H", m * HIDDEN, ds_db(o, "one_read"), by_atomics)
        add("lora_grad", "the same of q, k, v", "M·N", m * QKV, ds_db(qkv, "one_read_down"), by_atomics)
        add("lora_grad", "the same of gate and up", "2·M·I", 2 * m * WIDE, ds_db(gate_up, "one_read_down"), by_atomics)
        add("lora_grad", "dA = dSᵀ·y of gate and up, y made again", "M·H", m * HIDDEN, a_grad)
    chunk = m // 8
    add("linear_cross_entropy", "a chunk's loss, its gradient over its logits", "2·m·V", 2 * chunk * VOCABULARY, loss)
    add("dropout", "x·mask / (1 - p)", "2·M·H", 2 * m * HIDDEN, drop)
    add("dropout", "S = dropout(x)·Aᵀ", "M·H", m * HIDDEN, dropped_product, a_again)
    add("dropout", "dX += dropout(dS·A)", "2·M·H", 2 * m * HIDDEN, dropped_sum)
    add(
        "nf4",
        "a weight out of 4 bits (down's)",
        "N·K·(1 + ¼)",
        WIDE * HIDDEN * 5 // 4,
        expand,
        "a scale for 64 elements",
    )
    add("adapter", "A and s·B of a layer into their places", "2·(r·K + N·r)", 2 * adapters, load)
    return rows


def gemm_rows(m: int) -> list[Row]:
    """One library GEMM over concatenated operands, beside the bare frozen GEMM; operations of the frozen part only."""
    rows = []
    shapes = {"q, k, v": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate, up": (2 * WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    for name, (n, k) in shapes.items():
        w, x, d = random(n + SPARE, k + SPARE), random(m, k + SPARE), random(m, n + SPARE)
        bare_w, bare_x, bare_d = w[:n, :k].contiguous(), x[:, :k].contiguous(), d[:, :n].contiguous()
        calls = {
            f"{name}: frozen, forward": lambda bx=bare_x, bw=bare_w: bx @ bw.t(),
            f"{name}: [X ∣ S]·[W ∣ sB]ᵀ": lambda x=x, w=w, n=n: x @ w[:n].t(),
            f"{name}: frozen, backward": lambda bd=bare_d, bw=bare_w: bd @ bw,
            f"{name}: [dY ∣ dS]·[W ; A]": lambda d=d, w=w, k=k: d @ w[:, :k],
        }
        times: dict[str, list[float]] = {what: [] for what in calls}
        for _ in range(3):  # in turns: the power cap makes the clock drift
            for what, call in calls.items():
                times[what].append(timed(lambda call=call: call, CACHE, replays=8))
        besides = "p more columns"
        rows += [
            Row(
                "projection", what, "2·M·N·K", besides if "[" in what else "", statistics.median(t), flops=2 * m * n * k
            )
            for what, t in times.items()
        ]
    return rows


def fp8_row(m: int) -> list[Row]:
    """gate and up's frozen GEMM in FP8, the quantization of both included, with its error on random operands."""
    if supported(torch.device(DEVICE)):
        return []
    weight, x = random(2 * WIDE, HIDDEN), random(m, HIDDEN)
    frozen = FrozenFp8()
    exact = x.float() @ weight.float().t()
    error = float((frozen.forward(x, weight).float() - exact).norm() / exact.norm())
    us = timed(lambda: lambda: frozen.forward(x, weight), CACHE, replays=8)
    what = f"gate, up: X·Wᵀ of FP8 operands, {100 * error:.1f} % off"
    besides = "X and W once more, to quantize them; the share is of the bf16 ceiling"
    return [Row("fp8", what, "2·M·N·K", besides, us, flops=4 * m * WIDE * HIDDEN)]


def markdown(rows: list[Row], copy_gbs: float, tflops: float) -> str:
    out = [f"Ceilings: {copy_gbs:.0f} GB/s copied, {tflops:.0f} TFLOP/s.", ""]
    out += [
        "| kernel | computes | least | | besides | µs | rate | of the ceiling |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        amount = f"{r.bytes / 2**20:.0f} MiB" if r.bytes else f"{r.flops / 1e12:.2f} TFLOP"
        rate = f"{r.bytes / r.us / 1e3:.0f} GB/s" if r.bytes else f"{r.flops / r.us / 1e6:.0f} TFLOP/s"
        cells = [f"`{r.kernel}`", r.computes, r.least, amount, r.besides, f"{r.us:.1f}", rate]
        out.append(f"| {' | '.join(cells)} | {100 * r.share(copy_gbs, tflops):.0f} % |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192 if CUDA else 64, help="a multiple of 32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = ceilings(torch.device(DEVICE), DTYPE)
    copy_gbs, (tflops,) = found["copy_gbs"], found["gemm_tflops"].values()
    rows = bandwidth_rows(arguments.tokens) + gemm_rows(arguments.tokens) + fp8_row(arguments.tokens)
    print(torch.cuda.get_device_name() if CUDA else "CPU", "torch", torch.__version__)
    print(markdown(rows, copy_gbs, tflops))
    if arguments.json:
        machine = describe().model_dump(mode="json")
        out = {"machine": machine, "copy_gbs": copy_gbs, "tflops": tflops, "rows": [asdict(r) for r in rows]}
        arguments.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
