"""The tables of docs/packing.md, computed from the lengths alone: no step is measured here.

    python benchmarks/packing_efficiency.py            # write them anew
    python benchmarks/packing_efficiency.py --print    # only show them

Means over 30 draws of each workload of suite=packing. A table stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np

from lorabench.contract.ablation import Ablation
from lorabench.contract.batch import Sample
from lorabench.contract.workload import Workload
from lorabench.measure import flops
from lorabench.plan.compose import load_config, model, workload
from lorabench.plan.packing_gain import Batching, Costs, gain, padded
from lorabench.plan.samples import draw_lengths
from lorabench.report.tables import md_table
from lorabench_ablations.batching import Padding, micro_batch
from lorabench_ablations.grouping import GroupByLength, TokenBudget
from lorabench_ablations.packing import STRATEGIES, Packing, PaddingFree

sys.path.insert(0, str(Path(__file__).parent))
import markers

PAGE = Path(__file__).resolve().parents[1] / "docs/packing.md"
DRAWS = 30
ROW = 2048  # tokens of the shorter rows
NAMES = ("gsm8k", "gpteacher_toolformer", "gpteacher_roleplay", "viggo", "glue", "drop", "magicoder", "alpaca")
MODELS = ("smollm2-135m", "smollm2-1.7b", "llama-3.1-8b")
SIDE_BY_SIDE = (Padding(), GroupByLength(), TokenBudget(tokens=ROW))
SHORT_ROWS = Packing(row_tokens=ROW)


@cache
def steps(name: str) -> list[list[int]]:
    """Lengths of the samples of each draw."""
    feed = workload(name)
    drawn = (draw_lengths(name, feed.count, np.random.default_rng(seed)) for seed in range(DRAWS))
    return [np.clip(lengths, 2, feed.seq_len).tolist() for lengths in drawn]


def batched(toggle: Ablation, lengths: Sequence[int], feed: Workload, knows_borders: bool = False) -> Batching:
    """As the toggle really batches samples of these lengths."""
    batches = toggle.batch([Sample([0] * n, [0] * n) for n in lengths], feed)
    assert batches is not None
    return Batching(tuple(micro_batch(batch) for batch in batches), knows_borders)


def costs(name: str) -> Costs:
    """FLOPs, forward and backward, of a token and of a pair of positions."""
    config = load_config([])
    spec = model(name, config)
    shape = flops.decoder(spec, spec.lora)
    return Costs(token=4 * (shape.frozen + shape.head) + 6 * shape.adapter, pair=14 * shape.attention)


def efficiency() -> Iterator[list[str]]:
    """A row a distribution, the headings first."""
    rows = [f"rows of {ROW}, `{name}`" for name in STRATEGIES]
    yield ["lengths", "", "tokens a step", *(f"`{toggle.label}`" for toggle in SIDE_BY_SIDE), *rows]
    for name in NAMES:
        feed, drawn = workload(name), steps(name)
        shares = [fmean(batched(t, n, feed).efficiency for n in drawn) for t in SIDE_BY_SIDE]
        counts = [fmean(len(place(n, ROW)) for n in drawn) for place in STRATEGIES.values()]
        yield [
            f"`{name}`", str(feed.lengths_are), f"{fmean(map(sum, drawn)):.0f}",
            *(f"{100 * share:.0f} %" for share in shares), *(f"{count:.2f}" for count in counts),
        ]  # fmt: skip


def gains() -> Iterator[list[str]]:
    """A row a distribution, the headings first: by tokens, over micro-batches of 8 and over one of all 32 samples; then
    by the FLOPs of each model in three ways, over micro-batches of 8."""
    ways = [("packing", Packing(), False), (f"rows of {ROW}", SHORT_ROWS, False), ("borders known", Packing(), True)]
    yield [
        "lengths",
        "by tokens",
        "by tokens, one micro-batch",
        *(f"{name}: {way}" for name in MODELS for way, _, _ in ways),
    ]
    for name in NAMES:
        feed = workload(name)
        sizes = feed.batch_size, feed.count
        by_tokens = [fmean(gain(padded(n, b), batched(PaddingFree(), n, feed)) for n in steps(name)) for b in sizes]
        found = [
            fmean(gain(padded(n, feed.batch_size, known), batched(toggle, n, feed, known), cost) for n in steps(name))
            for cost in map(costs, MODELS) for _, toggle, known in ways
        ]  # fmt: skip
        yield [f"`{name}`", *(f"{x:.2f}" for x in (*by_tokens, *found))]


def tables() -> dict[str, str]:
    made = {"efficiency": list(efficiency()), "gains": list(gains())}
    return {name: md_table(headings, rows) for name, (headings, *rows) in made.items()}


if __name__ == "__main__":
    sys.exit(markers.main(__doc__, PAGE, tables))
