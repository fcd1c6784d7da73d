"""Four jobs on one base, trained together: does each learn what it learns alone? Real weights, real text.

    python benchmarks/several_jobs.py gsm8k_train.jsonl --out results/h200/several_jobs
    python benchmarks/several_jobs.py FILE.jsonl --way batched_packed --steps 20 --out somewhere
    python benchmarks/several_jobs.py FILE.jsonl --captured --out somewhere                   (wants a GPU)
    python benchmarks/several_jobs.py --redraw results/cpu/several_jobs     # the figure alone, from losses.csv

The jobs differ in rank, alpha, learning rate, schedule, batch and seed, and each has a slice of the file of its own.
They are trained three times, as `lorabench jobs` trains them: together by --way; one after the other by plain PEFT in
float32, which is what each should learn; and so again in --dtype. What these last two differ by is what rounding does
to plain PEFT. Where --dtype is float32, too, each step's samples are in micro-batches of one the second time, which is
the same step but for the order of its sums. With --captured they are trained a fourth time, together as CUDA graphs.
Rates are of the second half of the steps, by the clock: real tokens a second over all jobs.

A job passes if its curve lies no further from the float32 one, in the mean and at most, than rounding takes that of any
job, --times over. Curves are moving averages. FILE.jsonl: one object a line, with the fields `question` and
`answer`. Writes losses.csv, summary.json and several_jobs.png and .svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lorabench.measure.machine import describe
from lorabench.plan.jobs_file import PLAIN, JobsFile, toggles
from lorabench.train.setup import Setup
from lorabench.train.state import LOSSES
from lorabench.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import WINDOW, beside, read, save, slices, smooth, write_figure

JOBS: dict[str, dict[str, Any]] = {
    "small": {"lora": {"r": 4, "lora_alpha": 8}, "learning_rate": 5e-4, "batch_size": 2, "seed": 1},
    "usual": {"lora": {"r": 16, "lora_alpha": 32}, "learning_rate": 2e-4, "batch_size": 2, "seed": 2},
    "large": {"lora": {"r": 64, "lora_alpha": 64}, "learning_rate": 1e-4, "batch_size": 2, "schedule": "cosine"},
    "odd": {"lora": {"r": 7, "lora_alpha": 20}, "learning_rate": 3e-4, "batch_size": 3, "schedule": "linear"},
}
TOGETHER, ALONE, AGAIN = HOW = "together", "alone in float32", "alone"
CAPTURED = "together as CUDA graphs"
COLORS = {TOGETHER: "#E69F00", CAPTURED: "#009E73", AGAIN: "#0072B2"}
ONE_AFTER_THE_OTHER = "sequential"


@dataclass(frozen=True)
class Run:
    """The curve of one job in one of the trainings."""

    job: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.job}, {self.how}"


def runs(ways: Sequence[str]) -> list[Run]:
    return [Run(job, how) for job in JOBS for how in ways]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.redraw:
        ways = json.loads((options.redraw / "summary.json").read_text())["seconds"]
        draw(options.redraw, *read(options.redraw, runs(list(ways))))
        return 0
    ways = [*HOW, CAPTURED] if options.captured else list(HOW)
    curves: dict[Run, list[float]] = {}
    seconds, rates = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, beside(options.at_once) as each:
        rows = {name: options.steps * job["batch_size"] for name, job in JOBS.items()}
        files = slices(Path(options.text), Path(folder), rows)
        for how, one in zip(ways, each(partial(trained, options, files, Path(folder)), ways), strict=True):
            took, rates[how], losses = one
            curves |= {Run(job, how): own for job, own in losses.items()}
            seconds[how] = round(took, 1)
    curves = {run: curves[run] for run in runs(ways)}
    found = verdict(curves, min(WINDOW, max(1, options.steps // 4)), options.times) | {
        "seconds": seconds,
        "tokens_s": rates,
        "settings": {
            "model": options.model, "weights": options.weights, "tokenizer": options.tokenizer,
            "text": Path(options.text).name, "steps": options.steps, "jobs": JOBS,
            "seq_len": options.seq_len, "way": options.way, "dtype": options.dtype, "optimizer": "AdamW",
            "at_once": options.at_once,
        },
    }  # fmt: skip
    save(Path(options.out), curves, found)
    draw(Path(options.out), curves, found["window"])
    print(json.dumps({key: found[key] for key in ("passed", "jobs", "seconds", "tokens_s")}, indent=1))
    return 0 if found["passed"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="JSONL file with the fields question and answer")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="draw its figure again and stop")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--tokenizer", help="of a model that has none of its own: a folder or a hub name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--captured", action="store_true", help="also together as CUDA graphs")
    parser.add_argument("--way", default="fused_multi_lora")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--times", type=float, default=3.0, help="of what rounding does, that a curve may be off")
    parser.add_argument("--at-once", type=int, default=1, help="of the trainings; seconds are then no times alone")
    parser.add_argument("--out", default="output/several_jobs")
    options = parser.parse_args(argv)
    if not options.redraw and not options.text:
        parser.error("expected a JSONL file, or --redraw FOLDER")
    return options


def trained(
    options: argparse.Namespace, files: Mapping[str, Path], within: Path, how: str
) -> tuple[float, float, dict[str, list[float]]]:
    """(seconds, real tokens a second in the second half, the losses of each job before each of its updates)"""
    began, folder = time.monotonic(), within / how.replace(" ", "_")
    way = options.way if how in (TOGETHER, CAPTURED) else ONE_AFTER_THE_OTHER
    changes: dict[str, Any] = {"fields": ["question", "answer"], "seq_len": options.seq_len}
    if options.tokenizer:
        changes["tokenizer"] = options.tokenizer
    machine = describe()
    dtype = "float32" if how == ALONE else machine.dtype(options.dtype)
    size = {"micro_batch_size": 1} if how == AGAIN and dtype == "float32" else {}
    jobs = [
        {
            "name": name,
            "data": {str(files[name]): changes},
            "steps": options.steps,
            "epochs": options.steps,
            **job,
            **size,
        }
        for name, job in JOBS.items()
    ]
    shared = {"model": options.model, "weights": options.weights, "dtype": dtype, "way": way, "output": folder}
    if how == CAPTURED:
        shared["ablations"] = [*PLAIN, "cuda_graph"]
    file = JobsFile.model_validate(shared | {"jobs": jobs})
    folder.mkdir()
    trainer = Setup(file, machine).trainer(toggles(file, way), lambda text: print(f"{how}: {text}", flush=True))
    halfway: list[tuple[float, int]] = []  # when, and how many tokens until then

    def show(now: Trainer) -> None:
        if now.tick == options.steps // 2:
            halfway.append((time.monotonic(), now.tokens))
        print(f"{how}: step {now.tick}", *(f"{j.name} {j.progress.loss:.4f}" for j in now.jobs), flush=True)

    trainer.run(show)
    ended = time.monotonic()
    rate = [(trainer.tokens - tokens) / (ended - when) for when, tokens in halfway]
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    for line in (folder / LOSSES).read_text().splitlines():
        row = json.loads(line)
        found[row["job"]].append(row["loss"])
    return ended - began, rate[0] if rate else 0.0, found


def verdict(curves: Mapping[Run, Sequence[float]], window: int, times: float) -> dict[str, Any]:
    """How far each job's smoothed curve is from its own in float32, and how far rounding takes that of plain PEFT."""
    smoothed = {run: smooth(own, window) for run, own in curves.items()}
    far = {run: np.abs(own - smoothed[Run(run.job, ALONE)]) for run, own in smoothed.items()}
    mean, largest = (max(float(of(far[Run(job, AGAIN)])) for job in JOBS) for of in (np.mean, np.max))
    jobs = {}
    for job in JOBS:
        rounding, alone = far[Run(job, AGAIN)], smoothed[Run(job, ALONE)]
        ours = {how: far[Run(job, how)] for how in (TOGETHER, CAPTURED) if Run(job, how) in far}
        jobs[job] = {
            "passed": all(own.mean() <= times * mean and own.max() <= times * largest for own in ours.values()),
            "mean_distance": max(float(own.mean()) for own in ours.values()),
            "largest_distance": max(float(own.max()) for own in ours.values()),
            "rounding_mean_distance": float(rounding.mean()), "rounding_largest_distance": float(rounding.max()),
            "first_loss": float(alone[0]), "last_loss": float(alone[-1]),
        }  # fmt: skip
    return {
        "passed": all(job["passed"] for job in jobs.values()),
        "criterion": f"mean and largest distance of each job's curves (moving average over {window} steps), together "
        f"to alone in float32, at most {times:g} times what plain PEFT's of any job differs by in this dtype",
        "window": window,
        "jobs": jobs,
    }


def draw(folder: Path, curves: Mapping[Run, Sequence[float]], window: int) -> None:
    """A column a job. Above, together and alone in float32; below, on a linear axis, how far from float32 each is."""
    figure = Figure(figsize=(11, 5.2), dpi=150, layout="constrained")
    axes: Any = figure.subplots(2, len(JOBS), sharex=True, height_ratios=(3, 2), squeeze=False)
    for (above, below), job in zip(axes.T, JOBS, strict=True):
        own = {run.how: smooth(curve, window) for run, curve in curves.items() if run.job == job}
        alone = own.pop(ALONE)
        steps = np.arange(window, window + len(alone))
        above.plot(steps, alone, color="black", lw=2.2, label="alone in float32, plain PEFT")
        above.set_title(job, loc="left", fontsize=10, fontweight="bold")
        below.axhline(0, color="black", lw=0.8)
        for how, curve in own.items():
            if how != AGAIN:
                above.plot(steps, curve, color=COLORS[how], lw=1.1, label=how)
            label = f"{how}{' in this dtype' if how == AGAIN else ''} - alone in float32"
            below.plot(steps, curve - alone, color=COLORS[how], lw=1.2, label=label)
        below.set_xlabel("step")
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes[0, 0].set_ylabel(f"loss, mean of {window} steps")
    axes[1, 0].set_ylabel("difference")
    handles = [*axes[0, 0].get_legend_handles_labels()[0], *axes[1, 0].get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8.5)
    write_figure(folder, "several_jobs", figure)


if __name__ == "__main__":
    raise SystemExit(main())
