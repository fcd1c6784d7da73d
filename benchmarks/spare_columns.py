"""Are 64 spare columns faster than the fewest where a projection's input is narrower than 2048 columns?

    python benchmarks/spare_columns.py              # 8192 tokens, on a GPU
    python benchmarks/spare_columns.py --tokens 512

lorakernels' `operand.py` rounds the columns of S up to 64 from 2048 columns of input on, and to 16 below: the GEMMs of
an 8B took 338 ms with 64 columns for each linear and 342 with 16. This times [X | S]·[W | sB]ᵀ and [dY | dS]·[W ; A] of
narrower models with both, adapters of rank 16 on every linear. Where the sums say so, its `WIDE` is to be lowered.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from kernel_table import CUDA, SIZE, random, timed
from lorakernels.nodes.operand import WIDE
from lorakernels.runtime import round_up

RANK = 16
# (output columns, input columns, adapters) of a layer's projections.
MODELS = {
    "SmolLM2-135M": [(960, 576, 3), (576, 576, 1), (3072, 576, 2), (576, 1536, 1)],
    "SmolLM2-360M": [(1600, 960, 3), (960, 960, 1), (5120, 960, 2)],
    "Qwen3-0.6B": [(4096, 1024, 3), (6144, 1024, 2)],
    "Qwen2.5-1.5B": [(2048, 1536, 3), (1536, 1536, 1), (17920, 1536, 2)],
}
if not CUDA:
    MODELS = {"tiny": [(48, 16, 3), (32, 16, 2)]}


def both_directions(m: int, n: int, k: int, p: int) -> float:
    """Microseconds of forward's and backward's GEMM of m rows, with p spare columns."""

    def make():
        w, x, d = random(n + p, k + p), random(m, k + p), random(m, n + p)
        return lambda: (x @ w[:n].t(), d @ w[:, :k])

    return timed(make, SIZE * m * (n + k), replays=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192 if CUDA else 8)
    m = parser.parse_args().tokens
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, {m} tokens, µs forward and backward")
    for model, projections in MODELS.items():
        sums = [0.0, 0.0]
        for n, k, adapters in projections:
            assert k < WIDE
            columns = [round_up(RANK * adapters, multiple) for multiple in (16, 64)]
            times: list[list[float]] = [[], []]
            for _ in range(5):  # in turns: the power cap makes the clock drift
                for each, p in zip(times, columns, strict=True):
                    each.append(both_directions(m, n, k, p))
            fewest, full = (statistics.median(each) for each in times)
            sums = [sums[0] + fewest, sums[1] + full]
            print(f"{model} {k} -> {n}: {columns[0]} columns {fewest:.1f}, {columns[1]} columns {full:.1f}")
        print(f"{model}: fewest {sums[0]:.1f}, 64 {sums[1]:.1f}: {sums[0] / sums[1]:.3f} x")


if __name__ == "__main__":
    main()
