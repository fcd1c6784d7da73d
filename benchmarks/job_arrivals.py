"""Jobs that arrive over time on one GPU: what a shared base is worth to who waits for them. Real text.

    python benchmarks/job_arrivals.py gsm8k_train.jsonl --out results/h200/job_arrivals
    python benchmarks/job_arrivals.py FILE.jsonl --jobs 24 --load 0.7 --replays 3 --out somewhere
    python benchmarks/job_arrivals.py FILE.jsonl --model llama-3.1-8b --weights random --tokenizer FOLDER

A replay draws jobs of different rank, batch and length, and the times at which they arrive, the same in every way. They
are trained as `lorabench jobs` trains them: one by one in the order of arrival, by plain PEFT and by our kernels; and
together, each from when it arrives, in micro-batches that `residual_capacity` puts together (tLoRA's idea, arXiv
2602.07263; the rule is ours). The ways of a replay run one after the other, and each replay begins with another one.
Mean gap between arrivals: so long that plain PEFT, one by one, would be busy for --load of the time, by what the jobs
of the first replay take it one after the other; above 1 a queue builds up. Before that each way has trained all jobs of
the first replay, and before the clock starts it trains two short ones, so that little is compiled within it.

Completion is from a job's arrival to its last step; throughput is real tokens over the time from the first arrival to
the last end. Ratios are to plain PEFT in the same replay. FILE.jsonl: one object a line, with the fields `question` and
`answer`. Writes, after each replay: arrivals.json, with all that happened; arrivals.csv, a row for each replay and way;
arrivals.md, the medians over the replays with their 95 % intervals; and arrivals.png and .svg, which show when each job
of the first replay came, began and ended.
"""

from __future__ import annotations

import argparse
import gc
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
import pandas as pd
from matplotlib.figure import Figure

from lorabench.measure.machine import describe, nvml_handle
from lorabench.plan.jobs_file import JobsFile, toggles
from lorabench.record.stats import median_intervals
from lorabench.record.store import write_atomically
from lorabench.report.figure import png, svg
from lorabench.report.tables import md_table
from lorabench.train.job import RUNNING, Training
from lorabench.train.setup import Setup
from lorabench.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import slices, write_found

PLAIN, OURS, TOGETHER = "one by one, plain PEFT", "one by one, our kernels", "together, our kernels"
WAYS = {PLAIN: "sequential", OURS: "fused_multi_lora", TOGETHER: "fused_multi_lora"}
WARM = {f"warm_{n}": {"steps": 6, "batch_size": 2, "r": 8} for n in (1, 2)}
Jobs = dict[str, dict[str, int]]  # steps, batch_size and r by name, in the order of arrival
LOOK_S = 0.1  # between two looks at the GPU
SHOWN = {
    "tokens_s": "real tokens a second", "times_tokens_s": "times plain PEFT's",
    "mean_completion_s": "a job's completion, mean, s", "times_completion": "times as soon as plain PEFT's",
    "gpu_busy": "share of the time that the GPU is busy",
}  # fmt: skip
SETTINGS = ("model", "weights", "tokenizer", "load", "tokens", "seq_len", "dtype", "seed")


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
    def whole_s(self) -> float:
        return max(life.ended for life in self.lives.values())

    @property
    def numbers(self) -> dict[str, Any]:
        waits, whole = [life.ended - life.due for life in self.lives.values()], self.whole_s
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
        for job in here:
            if job.name in self.found.lives:
                self.found.lives[job.name].tokens += sum(len(sample.tokens) for sample in job.batch())
        super()._tick(here)  # which reads the losses, and so waits for the device

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
    options.out.mkdir(parents=True, exist_ok=True)
    order, replays, step_s = list(WAYS), list[dict[str, Any]](), 0.0
    for number in range(options.replays):
        jobs, gaps = drawn(options, options.seed + number)
        rows = {name: own["steps"] * own["batch_size"] for name, own in (WARM | jobs).items()}
        steps = sum(own["steps"] for own in jobs.values())
        found: dict[str, Replayed] = {}
        with tempfile.TemporaryDirectory() as folder:
            files = slices(options.text, Path(folder), rows)
            if not replays:  # the first time is the compiler's, in each way, and no measure of a load
                for place, way in enumerate((*WAYS, PLAIN)):
                    before = replayed(options, jobs, files, way, Path(folder) / f"before_{place}", [0.0] * len(jobs))
                step_s = before.whole_s / steps
            mean_gap = step_s * steps / len(jobs) / options.load
            due = (np.cumsum([0.0, *gaps[1:]]) * mean_gap).tolist()
            for way in order:
                found[way] = replayed(options, jobs, files, way, Path(folder) / way.replace(" ", "_"), due)
                print(f"replay {number + 1}, {way}: {json.dumps(found[way].numbers)}", flush=True)
        found = {way: found[way] for way in WAYS}
        if not replays:
            draw(options.out, found)
        replays.append({
            "order": list(order), "jobs": jobs, "mean_gap_s": mean_gap, "ways": compared(found),
            "lives": {way: {name: vars(life) for name, life in one.lives.items()} for way, one in found.items()},
        })  # fmt: skip
        write(options, replays)
        order.append(order.pop(0))
    print((options.out / "arrivals.md").read_text())
    return 0


def replayed(
    options: argparse.Namespace, jobs: Jobs, files: Mapping[str, Path], way: str, output: Path, due: Sequence[float]
) -> Replayed:
    """The jobs in one way, each from its second on, on a model of its own, which is gone when this returns."""
    replay = prepared(options, WARM | jobs, files, way, output)
    replay.run(lambda now: None)  # the short jobs
    with Busy() as busy:
        replay.started(dict(zip(jobs, due, strict=True)))
        replay.run(lambda now: None)
    found = replay.found
    found.busy = busy.share
    del replay
    gc.collect()  # or two models are there at once
    return found


def write(options: argparse.Namespace, replays: Sequence[Mapping[str, Any]]) -> None:
    frame = pd.DataFrame([
        {"replay": number, "way": way, **numbers}
        for number, replay in enumerate(replays, 1) for way, numbers in replay["ways"].items()
    ])  # fmt: skip
    settings = {name: getattr(options, name) for name in SETTINGS}
    told = write_found(options.out / "arrivals.json", {
        "ways": {way: medians(own) for way, own in frame.groupby("way", sort=False)},
        "replays": replays,
        "settings": settings | {"text": options.text.name, "optimizer": "AdamW"},
    })  # fmt: skip
    write_atomically(options.out / "arrivals.csv", frame.to_csv(index=False, float_format="%.5g").encode())
    rows = [[way, *(cell(name, own.get(name)) for name in SHOWN)] for way, own in told["ways"].items()]
    write_atomically(options.out / "arrivals.md", (md_table(["way", *SHOWN.values()], rows) + "\n").encode())


def medians(own: pd.DataFrame) -> dict[str, list[float]]:
    """Of a way's numbers the median over the replays and its interval; what no replay has is left out."""
    numbers = own.drop(columns=["replay", "way"]).dropna(axis="columns")
    spans = median_intervals([list(column) for _, column in numbers.items()])
    return {str(name): span.tolist() for name, span in zip(numbers, spans, strict=True)}


def cell(name: str, span: Sequence[float] | None) -> str:
    if span is None:
        return ""
    digits = 0 if name == "tokens_s" else 2
    median, low, high = (f"{value:.{digits}f}" for value in span)
    return f"{median} [{low}, {high}]"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="JSONL file with the fields question and answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="smollm2-135m-instruct", help="or random")
    parser.add_argument("--tokenizer", help="of a model that has none of its own: a folder or a hub name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--steps", type=int, nargs=2, default=(10, 80), metavar=("LEAST", "MOST"))
    parser.add_argument("--load", type=float, default=1.2, help="of plain PEFT, one job by one")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch of several jobs")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--replays", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the first replay's draws; each other one has the next")
    parser.add_argument("--out", type=Path, default=Path("output/job_arrivals"))
    options = parser.parse_args(argv)
    if not options.text.is_file():
        parser.error(f"{options.text}: no such file; expected JSON lines with the fields question and answer")
    if min(options.jobs - 1, options.replays) < 1 or options.load <= 0 or not 1 <= options.steps[0] <= options.steps[1]:
        parser.error("expected two jobs and one replay at least, a load above 0, and --steps LEAST MOST")
    return options


def drawn(options: argparse.Namespace, seed: int) -> tuple[Jobs, np.ndarray]:
    """(the jobs in the order of their arrival, the gaps before them in units of the mean one): a Poisson process."""
    rng = np.random.default_rng(seed)
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
    jobs: Jobs,
    files: Mapping[str, Path],
    way: str,
    output: Path,
) -> Replay:
    reading: dict[str, Any] = {"fields": ["question", "answer"], "seq_len": options.seq_len}
    if options.tokenizer:
        reading["tokenizer"] = options.tokenizer
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
        "scheduler": scheduler, "output": output, "jobs": entries,
    })  # fmt: skip
    file.output.mkdir()
    made = Setup(file, describe()).trainer(
        toggles(file, WAYS[way]), lambda text: print(f"{way}: {text}", flush=True)
    )  # fmt: skip
    return Replay(made, one_by_one=way != TOGETHER)


def compared(found: Mapping[str, Replayed]) -> dict[str, dict[str, Any]]:
    """Each way's numbers, and how many times as good they are as plain PEFT's."""
    ways = {way: one.numbers for way, one in found.items()}
    for numbers in ways.values():
        plain = ways[PLAIN]
        numbers["times_tokens_s"] = numbers["tokens_s"] / plain["tokens_s"]
        numbers["times_completion"] = plain["mean_completion_s"] / numbers["mean_completion_s"]
        busy = numbers["gpu_busy"] and plain["gpu_busy"]
        numbers["busier_pct"] = (numbers["gpu_busy"] / plain["gpu_busy"] - 1) * 100 if busy else None
    return ways


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
