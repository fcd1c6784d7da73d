"""The formula against steps of a tiny model that are really taken: each distribution is predicted by the others.

In seconds of this process's own: what else the machine does is no part of them.
"""

import statistics
import time

import pytest
from helpers import arm

from lorabench.contract.ablation import Evidence
from lorabench.contract.workload import Workload
from lorabench.measure import trial
from lorabench.measure.trial import run_rounds
from lorabench.plan.packing_gain import Batching, fitted, gain
from lorabench_ablations.batching import own_batches

DISTRIBUTIONS = ("glue", "viggo", "gpteacher_toolformer", "alpaca")
WAYS = ("packing", {"packing": {"row_tokens": 512}}, {"token_budget": {"tokens": 512}})
ROUNDS = 7


def batching(made):
    return Batching(tuple(own_batches(Evidence(made, None, None))))


def measured(distribution, way):
    """(padded, other, gain) of a pair that steps in turn."""
    feed = Workload(name="t", kind="lengths", distribution=distribution, samples=24, batch_size=6, seq_len=512)
    pair = {name: arm("sdpa", "adamw", one, workload=feed) for name, one in (("reference", "padding"), ("other", way))}
    run_rounds(pair, 1, seed=0)  # not counted
    done = run_rounds(pair, ROUNDS, seed=1)
    before, after = ([sum(turn) for turn in zip(*own.ms.values(), strict=True)] for own in done.values())
    ratios = [a / b for a, b in zip(before, after, strict=True)]
    return batching(pair["reference"]), batching(pair["other"]), statistics.median(ratios)


@pytest.mark.exhaustive
def test_the_gain_of_a_distribution_is_predicted_by_the_others(monkeypatch):
    monkeypatch.setattr(trial, "perf_counter", time.process_time)
    seen = {name: [measured(name, way) for way in WAYS] for name in DISTRIBUTIONS}
    off = []
    for name, own in seen.items():
        costs = fitted([pair for other, pairs in seen.items() if other != name for pair in pairs])
        assert costs is not None
        off += [abs(gain(reference, other, costs) / found - 1) for reference, other, found in own]
    by_tokens = [abs(gain(a, b) / found - 1) for pairs in seen.values() for a, b, found in pairs]
    assert statistics.median(off) < 0.15 and statistics.median(off) < statistics.median(by_tokens), (off, by_tokens)
