"""How long the ranks of a pipeline wait, measured on several processes of a CPU and as the simulator predicts it.

    python -m lorabench.log_command FOLDER/log.txt python benchmarks/pipeline_bubbles.py FOLDER

Stages that sleep for known times run under torch's schedules, over gloo. Each row is one run: bubbles.csv and .md
in FOLDER have idle time over wall time, by rank and of all, beside what `lorabench.simulate.pipeline` makes of the same
times. Sleeping needs no core, so two cores are enough for four ranks. The shortest of several runs counts, because
what else runs on the machine only makes one longer: as many as it takes until the two shortest agree, six at most.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorabench import simulate
from lorabench.report.tables import md_table
from lorabench_ablations.pipeline_stages import Line, Pipeline

Table = Sequence[Sequence[float]]  # milliseconds, of each micro-batch, of each stage


class Case(NamedTuple):
    """One run: its schedule, and how long every stage takes for every micro-batch."""

    name: str
    order: str
    ranks: int
    forward_ms: Table
    backward_ms: Table

    @property
    def predicted(self) -> simulate.Bubbles:
        return simulate.pipeline(self.forward_ms, self.backward_ms, order=self.order, ranks=self.ranks)


class Row(NamedTuple):
    """In per cent: idle over wall time."""

    case: str
    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    predicted_pct: float
    measured_pct: float
    predicted_by_rank_pct: str
    measured_by_rank_pct: str
    wall_ms: float


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_ms / 1000)
        return gradient.clone(), None, None


class Sleeper(nn.Module):
    """A stage that sleeps for what its column of the two tables says."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.stage, self.last = stage, stage == stages - 1
        self.weight = nn.Parameter(torch.ones(1))  # else the first stage would have nothing to differentiate

    def forward(self, x: Tensor, *, forward_ms: Tensor, backward_ms: Tensor) -> Tensor:
        column = float(forward_ms[0, self.stage]), float(backward_ms[0, self.stage])
        x = Nap.apply(x * self.weight, *column)
        return x.sum() if self.last else x


def equal(name: str, order: str, ranks: int, count: int, ms: float, each: int = 1) -> Case:
    """`count` micro-batches, of which every stage has a forward and a backward of `ms`."""
    table = [[ms] * (ranks * each)] * count
    return Case(name, order, ranks, table, table)


def continuous(adapters: int, ranks: int, ms: float, each: int = 2, rounds: int = 3) -> Case:
    """`rounds` global batches of `each` micro-batches of every adapter, without a flush; where the bubble lemma asks
    for it an empty micro-batch, which takes no time."""
    jobs = [[[1] * each] * rounds] * adapters
    plan = [
        (simulate.Sample(job, batch, place, 1),)
        for batch in range(rounds) for job in range(adapters) for place in range(each)
    ]  # fmt: skip
    schedule = simulate.fill(plan, ranks)
    simulate.verify(schedule, jobs, None, ranks)
    table = [[ms if held else 0.0] * ranks for held in schedule]
    return Case(f"continuous, adapters: {adapters}", "1f1b", ranks, table, table)


def ragged(scheduler: str, adapters: int, ranks: int, ms: float, rounds: int = 2) -> Case:
    """The same of samples of unequal length, packed by a scheduler of lorabench: a full micro-batch takes `ms` for its
    forward and 1.2 times as much for its backward, and the last stage an eighth more, as with a head."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(6.5, 0.5, (adapters, rounds, 8)).clip(32, 2048).astype(int)
    jobs, budget = drawn.tolist(), simulate.Budget(2048)
    schedule = simulate.fill(simulate.SCHEDULERS[scheduler](jobs, budget, ranks), ranks)
    simulate.verify(schedule, jobs, budget, ranks)
    share = [budget.used(held) / 2048 for held in schedule]
    forward = [[ms * one * (1.125 if stage == ranks - 1 else 1) for stage in range(ranks)] for one in share]
    backward = [[1.2 * one for one in row] for row in forward]
    return Case(f"{scheduler}, unequal samples, adapters: {adapters}", "1f1b", ranks, forward, backward)


def cases(ms: float = 250.0) -> list[Case]:
    return [
        equal("GPipe", "gpipe", 4, 8, ms),
        equal("1F1B", "1f1b", 4, 8, ms),
        equal("1F1B", "1f1b", 2, 8, ms),
        equal("interleaved, v = 2", "interleaved", 4, 8, ms, 2),
        equal("interleaved, v = 4", "interleaved", 2, 8, ms, 4),
        *(continuous(n, 4, ms) for n in (1, 2, 3, 4)),
        *(ragged("lorafusion", n, 4, ms / 2) for n in (1, 2, 3, 4)),
    ]


def measure(case: Case, timeout_s: float = 300.0) -> Row:
    """The shortest run of the case. Raises RuntimeError where a rank does not answer."""
    context = multiprocessing.get_context("fork")  # torch is imported already
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(case.ranks)]
        started = [
            context.Process(target=_rank, args=(rank, case, f"file://{folder}/rendezvous", pipes[rank][1]))
            for rank in range(case.ranks)
        ]
        for process in started:
            process.start()
        try:
            answers = []
            for rank, (ours, _) in enumerate(pipes):
                if not ours.poll(timeout_s):
                    raise RuntimeError(f"{case.name}: rank {rank} does not answer")
                answers.append(ours.recv())
        finally:
            for process in started:
                process.kill()
                process.join()
    runs = list(zip(*answers, strict=True))  # each of all ranks
    shortest = min(runs, key=lambda run: max(wall for _, wall in run))
    wall = max(wall for _, wall in shortest)
    idle = [100 * (1 - busy / wall) for busy, _ in shortest]
    predicted = case.predicted
    return Row(
        case.name, case.order, case.ranks, len(case.forward_ms[0]), len(case.forward_ms), 100 * predicted.ratio,
        sum(idle) / len(idle), _words(100 * one for one in predicted.by_stage), _words(idle), wall,
    )  # fmt: skip


def _rank(rank: int, case: Case, where: str, pipe: Any) -> None:
    """(milliseconds in which this rank slept, milliseconds of the whole run) of each run, into the pipe."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=case.ranks)
    stages, count = len(case.forward_ms[0]), len(case.forward_ms)
    mine = [Sleeper(stage, stages) for stage in range(rank, stages, case.ranks)]
    nothing = lambda *_: None  # noqa: E731
    made = Pipeline(mine, Line(rank, case.ranks), case.order, count, torch.device("cpu"), nothing, nothing)
    times = [torch.tensor(table, dtype=torch.float64) for table in (case.forward_ms, case.backward_ms)]
    x = torch.ones(count, 1)
    clock, walls = made.clock, list[float]()  # of all ranks together
    while not (len(walls) > 2 and _agree(walls[1:])):
        forward, backward = (t * bool(walls) for t in times)  # the first makes the connections and learns the shapes
        dist.barrier()
        with clock.run():
            made(x, {"forward_ms": forward, "backward_ms": backward})
        slowest = torch.tensor(clock.wall_ms(-1))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        walls.append(float(slowest))
    pipe.send([(sum(map(sum, clock.milliseconds(n).values())), clock.wall_ms(n)) for n in range(1, len(walls))])


def _agree(walls: Sequence[float]) -> bool:
    """Whether the two shortest runs are within 0.3 % of each other, or there are enough."""
    first, second = sorted(walls)[:2]
    return second < 1.003 * first or len(walls) == 6


def _words(numbers: Any) -> str:
    return " ".join(f"{one:.1f}" for one in numbers)


def markdown(rows: Sequence[Row]) -> str:
    head = ["case", "schedule", "ranks", "stages", "micro-batches", "predicted", "measured", "by rank, predicted, %",
            "by rank, measured, %", "wall, ms"]  # fmt: skip
    lines = []
    for row in rows:
        percent = [f"{ratio:.2f} %" for ratio in (row.predicted_pct, row.measured_pct)]
        by_rank = [row.predicted_by_rank_pct, row.measured_by_rank_pct]
        counts = map(str, (row.ranks, row.stages, row.micro_batches))
        lines.append([row.case, row.schedule, *counts, *percent, *by_rank, f"{row.wall_ms:.0f}"])
    said = "Idle time over wall time, of stages that sleep for known times; empty micro-batches included."
    return f"{said}\n\n{md_table(head, lines)}\n"


def main(folder: Path) -> None:
    rows = []
    for case in cases():
        rows.append(measure(case))
        print(f"{case.name}, {case.ranks} ranks: predicted {rows[-1].predicted_pct:.2f} %, "
              f"measured {rows[-1].measured_pct:.2f} %", flush=True)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "bubbles.csv", index=False, float_format="%.6g")
    (folder / "bubbles.md").write_text(markdown(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
