"""The start and the end of Predibase's ladder train the same samples: do both learn the same?

    python benchmarks/ladder_loss.py gsm8k_train.jsonl --out results/h200/ladder_loss
    python benchmarks/ladder_loss.py FILE.jsonl --model FOLDER --weights auto --start predibase_start_cpu --steps 20
    python benchmarks/ladder_loss.py --redraw results/h200/ladder_loss        # the figure alone, from losses.csv

Both arms are those of `suite=predibase_ladder`, built as the sweep builds them, of the toggles that this machine can
have. The start takes the samples of an optimizer step one by one, the end as its own toggles lay them out. A (the
adapter's first matrix) is drawn from the seed, B is zero. The start runs a second time with the samples of each step in
another order, which is the same step but for the order of its sums: what these two differ by is what rounding does.

The end passes if its held-out loss is no further from the start's than that. Beside it stands how far two seeds of the
start are apart. FILE.jsonl: one object a line, with the fields `question` and `answer`. Writes losses.csv, summary.json
and ladder_loss.png and .svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.cell import Cell
from lorabench.contract.kind import kind
from lorabench.contract.machine import Machine
from lorabench.measure.build import laid_out, to_device
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import Request, request_of
from lorabench.measure.machine import describe
from lorabench.plan.compose import load_config, plan
from lorabench.plan.design import Known, refusal

sys.path.insert(0, str(Path(__file__).parent))
from loss_curve import LEARNING_RATE, WINDOW, read, samples, save, smooth, write_figure

START, END = "reference", "candidate"
HELD_OUT_BATCH = 4


@dataclass(frozen=True)
class Run:
    """One training run; `reordered`: the samples of each step in another order."""

    arm: str
    seed: int
    reordered: bool = False

    @property
    def name(self) -> str:
        said = {START: "start", END: "end"}[self.arm]
        return f"{said}, seed {self.seed}" + ", reordered" * self.reordered


FIRST, AGAIN, LAST, OTHER = RUNS = (Run(START, 0), Run(START, 0, reordered=True), Run(END, 0), Run(START, 1))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.redraw:
        draw(options.redraw, *read(options.redraw, RUNS))
        return 0
    machine = describe()
    cell = ends(options, machine)
    device, dtype = torch.device(machine.device), getattr(torch, machine.dtype(cell.model.dtype))
    options.weights = cell.model.weights  # as the plan has settled it: what the text is tokenized for
    train, held_out = samples(options)
    curves: dict[Run, list[float]] = {}
    evaluated: dict[Run, float] = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            request, arm = built(cell, run, dtype, device, Path(scratch))
        curves[run] = fit(request, arm, steps_of(train, run, options), run.name)
        evaluated[run] = held_out_loss(request, arm, held_out)
        print(f"\r{run.name}: {curves[run][0]:.4f} -> {curves[run][-1]:.4f}, held out {evaluated[run]:.4f}", flush=True)
        del arm
    found = verdict(evaluated) | {
        "window": min(WINDOW, max(1, options.steps // 4)),
        "held_out_loss": {run.name: loss for run, loss in evaluated.items()},
        "arms": {"start": [a.label for a in cell.reference], "end": [a.label for a in cell.candidate]},
        "settings": {
            "model": cell.model.name, "weights": options.weights, "text": Path(options.text).name,
            "steps": options.steps, "samples_a_step": options.batch, "seq_len": options.seq_len,
            "lora": cell.model.lora.model_dump(mode="json"), "learning_rate": LEARNING_RATE,
            "dtype": str(dtype).removeprefix("torch."), "held_out_samples": len(held_out),
        },
    }  # fmt: skip
    save(Path(options.out), curves, found)
    draw(Path(options.out), curves, found["window"])
    print(json.dumps({k: found[k] for k in ("passed", "criterion", "distance")}, indent=1))
    return 0 if found["passed"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="JSONL file with the fields question and answer")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="draw its figure again and stop")
    parser.add_argument("--model", default="smollm2-135m", help="a name, or a folder")
    parser.add_argument("--weights", default="smollm2-135m-instruct", help="as `weights=` of a sweep")
    parser.add_argument("--start", default="predibase_start", help="a baseline of the suite")
    parser.add_argument("--ablations", nargs="+", help="those of the suite unless given")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="samples an optimizer step")
    parser.add_argument("--seq-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--out", default="output/ladder_loss")
    options = parser.parse_args(argv)
    if not options.text and not options.redraw:
        parser.error("a text to train on is needed, or --redraw FOLDER")
    return options


def ends(options: argparse.Namespace, machine: Machine) -> Cell:
    """The ladder's last rung that this machine can have: its reference is the start, its candidate the end."""
    config = load_config(
        ["suite=predibase_ladder", f"reference={options.start}", "design=ladder", f"dtype={options.dtype}"]
    )
    feed = {"samples": options.batch, "batch_size": 1, "seq_len": options.seq_len, "fields": ["question", "answer"]}
    given: dict[str, Any] = {
        "models": [options.model], "weights": options.weights, "workload": {options.text: feed | {"train_on": "all"}},
    }  # fmt: skip
    given |= {"ablations": options.ablations} if options.ablations else {}
    refused = lambda cell: refusal(cell, machine) is not None  # noqa: E731
    made = plan(config.model_copy(update=given), machine.device, Known(refused)).cells
    standing = [cell for cell in made if cell.rung and cell.design == "ladder" and not refused(cell)]
    if not standing:
        raise SystemExit(f"no rung of the ladder over {options.start} can be had here: {refusal(made[-1], machine)}")
    return standing[-1]


def built(cell: Cell, run: Run, dtype: torch.dtype, device: torch.device, scratch: Path) -> tuple[Request, Arm]:
    """An arm of the cell, its adapter as PEFT begins it (A drawn from the seed, B zero), and what it was built from."""
    request = request_of(cell, run.arm, dtype, device, scratch)
    jobs = [replace(job, seed=run.seed, learning_rate=LEARNING_RATE) for job in request.jobs]
    request = replace(request, jobs=jobs)
    arm = kind(cell.kind).build(request)
    with torch.no_grad():
        for name, tensor in arm.adapters():
            if "lora_B" in name:
                tensor.zero_()
    return request, arm


def steps_of(train: Sequence[Sample], run: Run, options: argparse.Namespace) -> list[list[Sample]]:
    """The samples of each step, no sample twice."""
    chosen = np.random.default_rng(run.seed).permutation(len(train))[: options.steps * options.batch]
    steps = [[train[i] for i in own] for own in chosen.reshape(options.steps, options.batch)]
    return [own[::-1] for own in steps] if run.reordered else steps


def lay_out(request: Request, arm: Arm, own: Sequence[Sample]) -> list[Batch]:
    """One step's samples as the arm's toggles put them into micro-batches."""
    made = laid_out(request, Hooks(request.ablations), request.jobs[0], own, arm.sizings[0])
    return [to_device(batch, arm.device) for batch in made]


def fit(request: Request, arm: Arm, steps: Sequence[Sequence[Sample]], name: str) -> list[float]:
    """The loss of each step, over all its trained tokens, before its update."""
    step, losses = arm.step, []
    for number, own in enumerate(steps, start=1):
        step.innermost.items = sum(sample.trained for sample in own)
        total = torch.zeros((), device=arm.device)
        for batch in lay_out(request, arm, own):
            loss = step.forward(batch)
            step.backward(loss)
            total += loss.detach().float()
        step.update()
        step.clear()
        losses.append(total)
        if number % 20 == 0:
            print(f"\r{name}: step {number}", end="", flush=True)
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_out_loss(request: Request, arm: Arm, held_out: Sequence[Sample]) -> float:
    """The mean over all trained tokens, padded in either arm. The model stays in training mode, in which it has no
    dropout either: on a CPU bitsandbytes packs 4-bit weights anew for inference."""
    arm.step.innermost.items = sum(sample.trained for sample in held_out)
    hooks = Hooks(request.ablations)
    batches = (hooks.through(Ablation.collate, batch) for batch in pad(held_out, HELD_OUT_BATCH))
    return sum(float(arm.step.forward(to_device(batch, arm.device))) for batch in batches)


def verdict(held_out: dict[Run, float]) -> dict[str, Any]:
    """How far the held-out losses are apart, and whether the end is as near to the start as the start to itself."""
    apart = lambda a, b: abs(held_out[a] - held_out[b])  # noqa: E731
    distance = {
        "end and start": apart(LAST, FIRST),
        "start, twice": apart(AGAIN, FIRST),
        "start, two seeds": apart(OTHER, FIRST),
    }
    return {
        "passed": bool(distance["end and start"] <= distance["start, twice"]),
        "criterion": "held-out loss: the end no further from the start than the start, run twice, from itself",
        "distance": distance,
    }


def draw(folder: Path, curves: dict[Run, list[float]], window: int) -> None:
    """On the left both curves; on the right how far the end is from the start, and the start from itself."""
    smoothed = {run: smooth(losses, window) for run, losses in curves.items()}
    steps = np.arange(window, window + len(smoothed[FIRST]))
    figure = Figure(figsize=(9.5, 3.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, smoothed[FIRST], color="black", lw=2.2, label="start")
    left.plot(steps, smoothed[LAST], color="#E69F00", lw=1.1, label="end")
    left.set_ylabel(f"loss, mean of {window} steps")
    right.axhline(0, color="black", lw=0.8)
    right.plot(steps, smoothed[AGAIN] - smoothed[FIRST], color="#0072B2", lw=1.0, label="start again - start")
    right.plot(steps, smoothed[LAST] - smoothed[FIRST], color="#E69F00", lw=1.3, label="end - start")
    right.set_ylabel("difference")
    for ax in (left, right):
        ax.set_xlabel("step")
        ax.legend(frameon=False, fontsize=8.5)
    write_figure(folder, "ladder_loss", figure)


if __name__ == "__main__":
    raise SystemExit(main())
