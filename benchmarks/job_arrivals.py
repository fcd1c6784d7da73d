"""Jobs that arrive over time on one GPU: what a shared base is worth to who waits for them. Real text.

    python benchmarks/job_arrivals.py gsm8k_train.jsonl --out results/h200/job_arrivals
    python benchmarks/job_arrivals.py FILE.jsonl --jobs 24 --load 0.7 --out somewhere

Jobs of different rank, batch and length arrive at drawn times, the same in every way, and are trained as `lorabench
jobs` trains them: one by one in the order of arrival, by plain PEFT and by our kernels; and together, each from when it
arrives, in micro-batches that `residual_capacity` puts together (tLoRA's idea, arXiv 2602.07263; the rule is ours).
Mean gap between arrivals: so long that plain PEFT, one by one, would be busy for --load of the time; above 1 a queue
builds up. Before the clock starts each way trains two short jobs, so that nothing is compiled within it.

Completion is from a job's arrival to its last step; throughput is real tokens over the time from the first arrival to
the last end. FILE.jsonl: one object a line, with the fields `question` and `answer`. Writes arrivals.json, and
arrivals.png and .svg, which show when each job came, began and ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lorabench.measure.machine import describe, nvml_handle
from lorabench.plan.jobs_file import JobsFile, toggles
from lorabench.record.store import write_atomically
from lorabench.report.figure import png, svg
from lorabench.train.job import RUNNING, Training
from lorabench.train.setup import Setup
from lorabench.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import slices, write_found

PLAIN, OURS, TOGETHER = "one by one, plain PEFT", "one by one, our kernels", "together, our kernels"
WAYS = {PLAIN: "sequential", OURS: "fused_multi_lora", TOGETHER: "fused_multi_lora"}
WARM = {f"warm_{n}": {"steps": 6, "batch_size": 2, "r": 8} for n in (1, 2)}  # whose last steps say what a step takes
SEEN = 3  # of those
LOOK_S = 0.1  # between two looks at the GPU


@dataclass
class Life:
    """Of a job, in seconds from the first arrival."""

    due: float
    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0


@dataclass
class Replayed:
    """What became of the jobs in one way; `busy`: share of the time in which the GPU ran a kernel, None without one."""

    lives: dict[str, Life] = field(default_factory=dict)
    busy: float | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        waits = [life.ended - life.due for life in self.lives.values()]
        whole = max(life.ended for life in self.lives.values())
        return {
            "tokens_s": sum(life.tokens for life in self.lives.values()) / whole, "whole_s": whole,
            "mean_completion_s": statistics.fmean(waits), "median_completion_s": statistics.median(waits),
            "last_tenth_completion_s": float(np.quantile(waits, 0.9)), "gpu_busy": self.busy,
        }  # fmt: skip


class Replay(Trainer):
    """The trainer of `lorabench jobs`, whose jobs arrive by the clock. Nothing is saved: it would be in the times."""

    def __init__(self, made: Trainer, one_by_one: bool) -> None:
        super().__init__(made.model, made.jobs, made.toggles, made.device, made.folder, made.base, 1 << 30, made.tell)
        self.one_by_one, self.found = one_by_one, Replayed()
        self.due: dict[str, float] = {}  # of each job; from when the short ones have ended
        self.ticks: list[float] = []
        self._started: float | None = None

    @property
    def now(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def started(self, due: Mapping[str, float]) -> None:
        self.due, self._started = dict(due), time.monotonic()
        self.found.lives = {name: Life(seconds) for name, seconds in due.items()}

    def _here(self) -> list[Training]:
        left = [job for job in self.jobs if not job.ended and (job.name in WARM) == (self._started is None)]
        there = sorted((job for job in left if self.due.get(job.name, 0.0) <= self.now), key=self._order)
        if left and not there:
            there = [min(left, key=self._order)]
            time.sleep(max(0.0, self.due[there[0].name] - self.now))
        here = there[:1] if self.one_by_one else there
        for job in here:
            if job.progress.status != RUNNING:
                job.progress.status = RUNNING
                if job.name in self.found.lives:
                    self.found.lives[job.name].began = self.now
        return here

    def _order(self, job: Training) -> float:
        return self.due.get(job.name, 0.0)

    def _tick(self, here: list[Training]) -> None:
        began = time.monotonic()
        for job in here:
            if job.name in self.found.lives:
                self.found.lives[job.name].tokens += sum(len(sample.tokens) for sample in job.batch())
        super()._tick(here)  # which reads the losses, and so waits for the device
        self.ticks.append(time.monotonic() - began)

    def _end(self, job: Training) -> None:
        if job.name in self.found.lives:
            self.found.lives[job.name].ended = self.now
            self.tell(f"{job.name}: {job.progress.status} {self.now:.1f} s after the first arrival")

    def save(self) -> None:
        pass


class Busy(threading.Thread):
    """How busy the GPU is, as NVML counts it, looked at ten times a second while the context lasts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nvml, self.seen, self.over = nvml_handle(), list[float](), threading.Event()

    def __enter__(self) -> Busy:
        if self.nvml:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()

    def run(self) -> None:
        assert self.nvml
        library, handle = self.nvml
        while not self.over.wait(LOOK_S):
            self.seen.append(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    @property
    def share(self) -> float | None:
        return statistics.fmean(self.seen) if self.seen else None


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    jobs, gaps = drawn(options)
    every = WARM | jobs
    found: dict[str, Replayed] = {}
    mean_gap = 0.0
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: own["steps"] * own["batch_size"] for name, own in every.items()}
        files = slices(options.text, Path(folder), rows)
        for way in WAYS:
            replay = prepared(options, every, files, way, Path(folder))
            replay.run(lambda now: None)  # the short jobs
            if way == PLAIN:
                step = statistics.median(replay.ticks[-SEEN:]) / WARM["warm_1"]["batch_size"]
                mean_gap = step * statistics.fmean(own["steps"] * own["batch_size"] for own in jobs.values())
                mean_gap /= options.load
            due = np.cumsum([0.0, *gaps[1:]]) * mean_gap
            with Busy() as busy:
                replay.started(dict(zip(jobs, map(float, due), strict=True)))
                replay.run(lambda now: None)
            found[way], replay.found.busy = replay.found, busy.share
            print(way, json.dumps(replay.found.numbers), flush=True)
            del replay
    told = verdict(found) | {
        "jobs": jobs,
        "lives": {way: {name: vars(life) for name, life in one.lives.items()} for way, one in found.items()},
        "settings": {
            "model": options.model, "weights": options.weights, "text": options.text.name, "load": options.load,
            "tokens": options.tokens, "seq_len": options.seq_len, "dtype": options.dtype, "seed": options.seed,
            "mean_gap_s": mean_gap, "optimizer": "AdamW",
        },
    }  # fmt: skip
    write_found(options.out / "arrivals.json", told)
    draw(options.out, found)
    print(json.dumps(told["ways"], indent=1))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="JSONL file with the fields question and answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--steps", type=int, nargs=2, default=(10, 80), metavar=("LEAST", "MOST"))
    parser.add_argument("--load", type=float, default=1.2, help="of plain PEFT, one job by one")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch of several jobs")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("output/job_arrivals"))
    options = parser.parse_args(argv)
    if not options.text.is_file():
        parser.error(f"{options.text}: no such file; expected JSON lines with the fields question and answer")
    if options.jobs < 2 or options.load <= 0 or not 1 <= options.steps[0] <= options.steps[1]:
        parser.error("expected two jobs at least, a load above 0, and --steps LEAST MOST")
    return options


def drawn(options: argparse.Namespace) -> tuple[dict[str, dict[str, int]], np.ndarray]:
    """(the jobs in the order of their arrival, the gaps before them in units of the mean one): a Poisson process."""
    rng = np.random.default_rng(options.seed)
    least, most = np.log(options.steps)
    jobs = {
        f"job_{n + 1}": {
            "steps": round(float(np.exp(rng.uniform(least, most)))),
            "batch_size": int(rng.choice([1, 2, 4])),
            "r": int(rng.choice([4, 8, 16, 32])),
        }
        for n in range(options.jobs)
    }
    return jobs, rng.exponential(size=options.jobs)


def prepared(
    options: argparse.Namespace,
    jobs: Mapping[str, Mapping[str, int]],
    files: Mapping[str, Path],
    way: str,
    within: Path,
) -> Replay:
    reading = {"fields": ["question", "answer"], "seq_len": options.seq_len}
    scheduler: Any = {"residual_capacity": {"tokens": options.tokens}} if way == TOGETHER else "auto"
    entries = [
        {
            "name": name, "data": {str(files[name]): reading}, "steps": own["steps"], "batch_size": own["batch_size"],
            "lora": {"r": own["r"], "lora_alpha": 2 * own["r"]}, "seed": place,
        }
        for place, (name, own) in enumerate(jobs.items())
    ]  # fmt: skip
    file = JobsFile.model_validate({
        "model": options.model, "weights": options.weights, "dtype": options.dtype, "way": WAYS[way],
        "scheduler": scheduler, "output": within / way.replace(", ", "_").replace(" ", "_"), "jobs": entries,
    })  # fmt: skip
    file.output.mkdir()
    made = Setup(file, describe()).trainer(
        toggles(file, WAYS[way]), lambda text: print(f"{way}: {text}", flush=True)
    )  # fmt: skip
    return Replay(made, one_by_one=way != TOGETHER)


def verdict(found: Mapping[str, Replayed]) -> dict[str, Any]:
    """Each way's numbers, and how many times as good they are as plain PEFT's."""
    ways = {way: one.numbers for way, one in found.items()}
    for numbers in ways.values():
        plain = ways[PLAIN]
        numbers["times_tokens_s"] = numbers["tokens_s"] / plain["tokens_s"]
        numbers["times_completion"] = plain["mean_completion_s"] / numbers["mean_completion_s"]
    return {"ways": ways}


def draw(folder: Path, found: Mapping[str, Replayed]) -> None:
    """A panel a way, a row a job: from its arrival it waits (grey), then it trains (colour)."""
    figure = Figure(figsize=(9, 6.5), dpi=150, layout="constrained")
    axes: Any = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (way, one) in zip(axes, found.items(), strict=True):
        for row, life in enumerate(one.lives.values()):
            ax.barh(row, life.began - life.due, left=life.due, height=0.7, color="#cccccc")
            ax.barh(row, life.ended - life.began, left=life.began, height=0.7, color="#0072B2")
        ax.set_title(
            f"{way}: a job takes {one.numbers['mean_completion_s']:.0f} s in the mean", loc="left", fontsize=9.5
        )
        ax.invert_yaxis()
        ax.set_yticks([])
        ax.set_ylabel("jobs")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds from the first arrival; grey: it waits, blue: it trains")
    write_atomically(folder / "arrivals.png", png(figure))
    write_atomically(folder / "arrivals.svg", svg(figure, "arrivals"))


if __name__ == "__main__":
    raise SystemExit(main())
