"""Four jobs on one base, trained together: does each learn what it learns alone? Real weights, real text.

    python benchmarks/several_jobs.py gsm8k_train.jsonl --out results/h200/several_jobs
    python benchmarks/several_jobs.py FILE.jsonl --way batched_packed --steps 20 --out somewhere
    python benchmarks/several_jobs.py --redraw results/cpu/several_jobs     # the figure alone, from losses.csv

The jobs differ in rank, alpha, learning rate, schedule, batch and seed, and each has a slice of the file of its own.
They are trained three times, as `lorabench jobs` trains them: together by --way; one after the other by plain PEFT in
float32, which is what each should learn; and so again in --dtype. What these last two differ by is what rounding does
to plain PEFT. Where --dtype is float32, too, each step's samples are in micro-batches of one the second time, which is
the same step but for the order of its sums.

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
from lorabench.plan.jobs_file import JobsFile, toggles
from lorabench.train.setup import Setup
from lorabench.train.state import LOSSES

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import WINDOW, beside, read, save, slices, smooth, write_figure

JOBS: dict[str, dict[str, Any]] = {
    "small": {"lora": {"r": 4, "lora_alpha": 8}, "learning_rate": 5e-4, "batch_size": 2, "seed": 1},
    "usual": {"lora": {"r": 16, "lora_alpha": 32}, "learning_rate": 2e-4, "batch_size": 2, "seed": 2},
    "large": {"lora": {"r": 64, "lora_alpha": 64}, "learning_rate": 1e-4, "batch_size": 2, "schedule": "cosine"},
    "odd": {"lora": {"r": 7, "lora_alpha": 20}, "learning_rate": 3e-4, "batch_size": 3, "schedule": "linear"},
}
TOGETHER, ALONE, AGAIN = HOW = "together", "alone in float32", "alone"
ONE_AFTER_THE_OTHER = "sequential"


@dataclass(frozen=True)
class Run:
    """The curve of one job in one of the three trainings."""

    job: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.job}, {self.how}"


RUNS = [Run(job, how) for job in JOBS for how in (TOGETHER, ALONE, AGAIN)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.redraw:
        draw(options.redraw, *read(options.redraw, RUNS))
        return 0
    curves: dict[Run, list[float]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, beside(options.at_once) as each:
        rows = {name: options.steps * job["batch_size"] for name, job in JOBS.items()}
        files = slices(Path(options.text), Path(folder), rows)
        for how, (took, losses) in zip(HOW, each(partial(trained, options, files, Path(folder)), HOW), strict=True):
            curves |= {Run(job, how): own for job, own in losses.items()}
            seconds[how] = round(took, 1)
    curves = {run: curves[run] for run in RUNS}
    found = verdict(curves, min(WINDOW, max(1, options.steps // 4)), options.times) | {
        "seconds": seconds,
        "settings": {
            "weights": options.weights, "text": Path(options.text).name, "steps": options.steps, "jobs": JOBS,
            "seq_len": options.seq_len, "way": options.way, "dtype": options.dtype, "optimizer": "AdamW",
            "at_once": options.at_once,
        },
    }  # fmt: skip
    save(Path(options.out), curves, found)
    draw(Path(options.out), curves, found["window"])
    print(json.dumps({key: found[key] for key in ("passed", "jobs", "seconds")}, indent=1))
    return 0 if found["passed"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="JSONL file with the fields question and answer")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="draw its figure again and stop")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--way", default="fused_multi_lora")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--times", type=float, default=3.0, help="of what rounding does, that a curve may be off")
    parser.add_argument(
        "--at-once", type=int, default=1, help="of the three trainings; seconds are then no times alone"
    )
    parser.add_argument("--out", default="output/several_jobs")
    options = parser.parse_args(argv)
    if not options.redraw and not options.text:
        parser.error("expected a JSONL file, or --redraw FOLDER")
    return options


def trained(
    options: argparse.Namespace, files: Mapping[str, Path], within: Path, how: str
) -> tuple[float, dict[str, list[float]]]:
    """(seconds, the losses of each job before each of its updates)"""
    began, folder, way = time.monotonic(), within / how, options.way if how == TOGETHER else ONE_AFTER_THE_OTHER
    changes = {"fields": ["question", "answer"], "seq_len": options.seq_len}
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
    file = JobsFile.model_validate(shared | {"jobs": jobs})
    folder.mkdir()
    trainer = Setup(file, machine).trainer(toggles(file, way), lambda text: print(f"{how}: {text}", flush=True))
    trainer.run(
        lambda now: print(f"{how}: step {now.tick}", *(f"{j.name} {j.progress.loss:.4f}" for j in now.jobs), flush=True)
    )
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    for line in (folder / LOSSES).read_text().splitlines():
        row = json.loads(line)
        found[row["job"]].append(row["loss"])
    return time.monotonic() - began, found


def verdict(curves: Mapping[Run, Sequence[float]], window: int, times: float) -> dict[str, Any]:
    """How far each job's smoothed curve is from its own in float32, and how far rounding takes that of plain PEFT."""
    smoothed = {run: smooth(own, window) for run, own in curves.items()}
    far = {run: np.abs(own - smoothed[Run(run.job, ALONE)]) for run, own in smoothed.items()}
    mean, largest = (max(float(of(far[Run(job, AGAIN)])) for job in JOBS) for of in (np.mean, np.max))
    jobs = {}
    for job in JOBS:
        ours, rounding, alone = far[Run(job, TOGETHER)], far[Run(job, AGAIN)], smoothed[Run(job, ALONE)]
        jobs[job] = {
            "passed": bool(ours.mean() <= times * mean and ours.max() <= times * largest),
            "mean_distance": float(ours.mean()), "largest_distance": float(ours.max()),
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
        together, alone, again = (smooth(curves[Run(job, how)], window) for how in (TOGETHER, ALONE, AGAIN))
        steps = np.arange(window, window + len(alone))
        above.plot(steps, alone, color="black", lw=2.2, label="alone in float32, plain PEFT")
        above.plot(steps, together, color="#E69F00", lw=1.1, label="together")
        above.set_title(job, loc="left", fontsize=10, fontweight="bold")
        below.axhline(0, color="black", lw=0.8)
        below.plot(steps, together - alone, color="#E69F00", lw=1.3, label="together - alone in float32")
        below.plot(steps, again - alone, color="#0072B2", lw=1.0, label="alone in this dtype - alone in float32")
        below.set_xlabel("step")
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes[0, 0].set_ylabel(f"loss, mean of {window} steps")
    axes[1, 0].set_ylabel("difference")
    handles = [*axes[0, 0].get_legend_handles_labels()[0], *axes[1, 0].get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8.5)
    write_figure(folder, "several_jobs", figure)


if __name__ == "__main__":
    raise SystemExit(main())
