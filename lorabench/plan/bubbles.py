"""How long the stages of a pipeline wait, by schedule and number of adapters: simulated, from lengths and stage times.

LoRAFusion's table is of Llama-3.1-70B over four H100s; so are the workloads and the stage times here. Its data sets are
log-normal stand-ins (`approximate`), its stage times those that its authors measured. Nothing here was measured by us.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from lorabench.contract.names import nearest
from lorabench.contract.workload import length_tables
from lorabench.plan.samples import draw_lengths
from lorabench.schedule import SCHEDULERS, Budget, Jobs, MicroBatch, fill, lorafusion, verify
from lorabench.schedule.batches import real, rounds
from lorabench.schedule.fifo import one_job_each
from lorabench.schedule.pipeline import ends_of_batches, pipeline
from lorabench.schedule.stage_times import StageTimes

ADAPTERS = 4
GLOBAL_BATCH = 16  # samples
MIXTURE = ("xsum", "cnn_dailymail", "wikisum")


class Feed(NamedTuple):
    """One of LoRAFusion's workloads for the 70B: the data sets of its four adapters, the tokens of a micro-batch, and
    how many samples a micro-batch of the two baselines has."""

    sets: tuple[str, ...]
    capacity: int
    flushed: int
    mlora: int


FEEDS = {
    "xsum": Feed(("xsum",) * ADAPTERS, 4096, 4, 8),
    "cnn_dailymail": Feed(("cnn_dailymail",) * ADAPTERS, 6144, 4, 4),
    "wikisum": Feed(("wikisum",) * ADAPTERS, 7168, 2, 2),
    "mixed": Feed(("mixed",) * ADAPTERS, 6144, 4, 4),
    "heterogeneous": Feed(("xsum", "cnn_dailymail", "wikisum", "mixed"), 6144, 4, 2),
}
FLUSHED, MLORA, GREEDY = "1F1B with flush", "mLoRA", "lorafusion, greedy"
EMPTIED = {FLUSHED: "1f1b", "GPipe with flush": "gpipe", "interleaved with flush": "interleaved"}  # and their orders
METHODS = (*EMPTIED, MLORA, *SCHEDULERS, GREEDY)
COUNTING = (*EMPTIED, MLORA)  # count samples of a micro-batch, and fill nothing up


# Bubble ratios in per cent of LoRAFusion's table, as far as a text that we have states them: the article that
# docs/claims.md cites for both. Which workload they are of is not known to us.
PUBLISHED = {("lorafusion", 1): 44.17, ("lorafusion", 4): 11.09}


@dataclass(frozen=True)
class Setting:
    """What is simulated: global batches a job, draws of the lengths, a micro-batch's tokens (None: the published) and
    the multiple to which each adapter's rows are filled up (LoRAFusion's kernels: 128; ours: 1), seconds of a packing's
    programme, milliseconds from one stage to the next and of each stage's part of a job's optimizer step, and into how
    many equal stages of its rank an interleaved pipeline cuts each stage."""

    times: StageTimes
    steps: int = 20
    seeds: int = 1
    capacity: int | None = None
    multiple: int = 128
    time_limit_s: float = 0.1
    transfer_ms: float = 0.0
    update_ms: float = 0.0
    chunks: int = 2


class Row(NamedTuple):
    """One method on one workload. In per cent: idle over total, of all stages, in the mean over the draws (of a mixed
    group of jobs: over the groups too), the lowest and highest draw; without the pipeline's first filling and last
    emptying; by stage. Micro-batches are those that compute, `empty` those of the bubble lemma, both a global batch.
    tokens_s: real tokens. `measured` is empty until somebody has measured it."""

    workload: str
    lengths: str
    method: str
    adapters: int
    capacity: int | None
    bubble_pct: float
    lowest_pct: float
    highest_pct: float
    without_ramp_pct: float
    by_stage_pct: str
    micro_batches: float
    empty: float
    padding_pct: float
    tokens_s: float
    scheduling_s: float
    published_pct: float | None
    measured_pct: float | None = None


def rows(
    setting: Setting, workloads: Sequence[str] = tuple(FEEDS), methods: Sequence[str] = METHODS,
    adapters: Sequence[int] = (1, 2, 3, 4), measured: Mapping[tuple[str, str, int], float] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Every method on every workload, as they are simulated. measured: bubbles in per cent by workload, method and
    adapters, to stand beside. Raises ValueError, in one line, before the first row is computed."""
    for what, asked, known in (("workload", workloads, FEEDS), ("method", methods, METHODS)):
        for name in asked:
            if name not in known:
                raise nearest(what, name, known)
    for n in adapters:
        if not 1 <= n <= ADAPTERS:
            raise ValueError(f"adapters={n}: expected 1 to {ADAPTERS}")
    if setting.capacity and set(methods) - set(COUNTING):
        for workload, seed in itertools.product(workloads, range(setting.seeds)):
            feed = FEEDS[workload]
            together = sorted({job for n in adapters for group in _groups(feed, n) for job in group})
            jobs = [_drawn(feed, job, seed, setting) for job in together]
            next(rounds(jobs, Budget(setting.capacity, setting.multiple)))  # raises for a sample above it
    for workload, method in itertools.product(workloads, methods):
        for n in [1] if method in EMPTIED else [ADAPTERS] if method == MLORA else adapters:
            row = _row(workload, method, n, setting)
            yield row._replace(measured_pct=(measured or {}).get((workload, method, n)))


class _Run(NamedTuple):
    """One draw of one group of jobs."""

    ratio: float
    without_ramp: float
    by_stage: tuple[float, ...]
    micro_batches: float
    empty: float
    real: int
    used: int
    ms: float
    scheduling_s: float


def _row(workload: str, method: str, adapters: int, setting: Setting) -> Row:
    feed = FEEDS[workload]
    groups = _groups(feed, adapters)
    draws = [[_run(feed, method, group, seed, setting) for group in groups] for seed in range(setting.seeds)]
    runs = list(itertools.chain.from_iterable(draws))
    by_seed = [100 * fmean(run.ratio for run in own) for own in draws]
    mean = {name: fmean(getattr(run, name) for run in runs) for name in _Run._fields if name != "by_stage"}
    stages = [100 * fmean(stage) for stage in zip(*(run.by_stage for run in runs), strict=True)]
    approximate = not {one for name in feed.sets for one in _sets(name)} <= set(length_tables()["measured"])
    return Row(
        workload, "approximate" if approximate else "measured", method, adapters,
        None if method in COUNTING else setting.capacity or feed.capacity,
        fmean(by_seed), min(by_seed), max(by_seed), 100 * mean["without_ramp"],
        " ".join(f"{percent:.1f}" for percent in stages), mean["micro_batches"], mean["empty"],
        100 * (1 - mean["real"] / mean["used"]), 1000 * mean["real"] / mean["ms"], mean["scheduling_s"],
        PUBLISHED.get((method, adapters)),
    )  # fmt: skip


def _run(feed: Feed, method: str, group: Sequence[int], seed: int, setting: Setting) -> _Run:
    jobs = [_drawn(feed, job, seed, setting) for job in group]
    budget, stages = Budget(setting.capacity or feed.capacity, setting.multiple), setting.times.stages
    held, emptied = None if method in COUNTING else budget, EMPTIED.get(method)
    began = time.monotonic()
    schedule = _methods(feed, budget, stages, setting)[method](jobs)
    if not emptied:
        schedule = fill(schedule, stages)
    took = time.monotonic() - began
    verify(schedule, jobs, held, 1 if emptied else stages)
    used = [held.used(batch) if held else real(batch) for batch in schedule]
    ends = ends_of_batches(schedule)
    updates = [[setting.update_ms * len(ends.get(at, ()))] * stages for at in range(len(schedule))]
    n = setting.chunks if emptied == "interleaved" else 1  # each stage is cut into so many of its rank's
    tables = ([[ms / n for ms in row] * n for row in table] for table in (*setting.times.of(used), updates))
    forward, backward, update = tables
    flushes = sorted(ends) if emptied else []
    found = pipeline(forward, backward, update, setting.transfer_ms, flushes, emptied or "1f1b", stages)
    computing, turns = sum(map(bool, schedule)), setting.steps * len(jobs)
    return _Run(
        found.ratio, found.without_ramp, found.by_stage, computing / turns, (len(schedule) - computing) / turns,
        sum(map(real, schedule)), sum(used), found.total_ms, took,
    )  # fmt: skip


def _groups(feed: Feed, adapters: int) -> list[Sequence[int]]:
    """The groups of so many jobs: one where all have the same data set, else every one."""
    if len(set(feed.sets)) == 1:
        return [range(adapters)]
    return list(itertools.combinations(range(ADAPTERS), adapters))


def _drawn(feed: Feed, job: int, seed: int, setting: Setting) -> list[list[int]]:
    return drawn(feed.sets[job], setting.steps, np.random.default_rng([seed, job]))


def _methods(
    feed: Feed, budget: Budget, stages: int, setting: Setting
) -> dict[str, Callable[[Jobs], list[MicroBatch]]]:
    made: dict[str, Callable[[Jobs], list[MicroBatch]]] = {
        name: lambda jobs, way=way: way(jobs, budget, stages) for name, way in SCHEDULERS.items()
    }
    return made | {
        **dict.fromkeys(EMPTIED, lambda jobs: one_job_each(jobs, feed.flushed)),
        MLORA: lambda jobs: one_job_each(jobs, feed.mlora),
        "lorafusion": lambda jobs: lorafusion(jobs, budget, stages, setting.time_limit_s),
        GREEDY: lambda jobs: lorafusion(jobs, budget, stages, None),
    }


def drawn(name: str, steps: int, rng: np.random.Generator) -> list[list[int]]:
    """So many global batches of a data set's lengths, in tokens; of `mixed` as many samples of each of its three,
    shuffled."""
    count = steps * GLOBAL_BATCH
    every = np.concatenate([draw_lengths(one, -(-count // len(_sets(name))), rng) for one in _sets(name)])
    return rng.permutation(every)[:count].reshape(steps, GLOBAL_BATCH).tolist()


def _sets(name: str) -> tuple[str, ...]:
    return MIXTURE if name == "mixed" else (name,)
