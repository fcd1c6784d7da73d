"""Loss curves with and without lorakernels: real weights, real text, the same steps.

    python benchmarks/loss_curve.py gsm8k_train.jsonl --out results/h200/loss_curve
    python benchmarks/loss_curve.py FILE.jsonl --weights FOLDER --steps 20 --batch 4 --out somewhere

Trains LoRA on every linear with PEFT, plain and after `lorakernels.apply`, from two seeds; a seed decides the adapter's
start and the order of the samples. Plain seed 0 runs twice: what a run differs by from itself (atomic adds, say) is the
least that anything can differ by. Then every run is evaluated on samples that none has seen.

The kernels pass if, at the same seed, their curve is nearer to PEFT's than two seeds of PEFT are to one another: the
mean and the largest distance of the smoothed curves (moving average over WINDOW steps), for both seeds.

FILE.jsonl: one object a line, with the fields `question` and `answer`. Weights: `smollm2-135m-instruct` (out of the
package index, or the GGUF file that LORABENCH_GGUF names), a local folder or a hub name. Writes losses.csv,
summary.json and loss_curve.png.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lorakernels
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.workload import Workload
from lorabench.measure.machine import commit, describe
from lorabench.plan.samples import draw as draw_samples
from lorabench.plan.weights import source_arguments
from lorabench.record.store import write_atomically

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": LINEARS}
LEARNING_RATE = 2e-4
SEEDS = (0, 1)
HELD_OUT = 64  # samples at most, and never more than an eighth of the file
WINDOW = 20  # steps of the moving average; a quarter of the run where that is less


@dataclass(frozen=True)
class Run:
    """One training run; `again` marks the repetition of a run that has been."""

    seed: int
    ours: bool
    again: bool = False

    @property
    def name(self) -> str:
        return f"{'lorakernels' if self.ours else 'peft'}, seed {self.seed}" + ", again" * self.again


RUNS = [Run(seed, ours) for ours in (False, True) for seed in SEEDS] + [Run(SEEDS[0], ours=False, again=True)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    train, held_out = samples(options)
    base = load(options.weights, dtype, device)
    curves: dict[Run, list[float]] = {}
    evaluated: dict[Run, float] = {}
    sites: dict[str, int] = {}
    for run in RUNS:
        model = adapter(base, run.seed)
        if run.ours:
            sites = dict(lorakernels.apply(model).counts)
        batches = order(train, run.seed, options.steps, options.batch)
        curves[run] = fit(model, batches, device, lambda step, n=run.name: print(f"\r{n}: step {step}", end=""))
        evaluated[run] = evaluate(model, pad(held_out, options.batch), device)
        print(f"\r{run.name}: {curves[run][0]:.4f} -> {curves[run][-1]:.4f}, held out {evaluated[run]:.4f}")
    found = {
        **verdict(curves, min(WINDOW, max(1, options.steps // 4))),
        "held_out_loss": {run.name: evaluated[run] for run in RUNS},
        "lorakernels_sites": sites,
        "settings": {
            "weights": options.weights, "text": Path(options.text).name, "steps": options.steps, "batch": options.batch,
            "seq_len": options.seq_len, "lora": LORA, "learning_rate": LEARNING_RATE, "optimizer": "AdamW, constant",
            "dtype": str(dtype).removeprefix("torch."), "held_out_samples": len(held_out),
        },
        "machine": describe().model_dump(mode="json"),
        "commit": dict(zip(("head", "dirty"), commit(), strict=True)),
    }  # fmt: skip
    write(Path(options.out), curves, found)
    print(json.dumps({k: found[k] for k in ("passed", "mean_distance", "largest_distance")}, indent=1))
    return 0 if found["passed"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="JSONL file with the fields question and answer")
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="samples a step, padded to the longest of them")
    parser.add_argument("--seq-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--out", default="output/loss_curve")
    return parser.parse_args(argv)


def samples(options: argparse.Namespace) -> tuple[list[Sample], list[Sample]]:
    """(for training, held out): the file's rows, tokenized, in an order that no run's seed touches."""
    rows = sum(bool(line.strip()) for line in Path(options.text).read_text().splitlines())
    aside = min(HELD_OUT, rows // 8)
    if rows - aside < options.steps * options.batch:
        raise SystemExit(f"{options.text} has {rows} rows; {options.steps} steps of {options.batch} need more")
    feed = Workload(
        name="text", kind="text", path=options.text, tokenizer=options.weights, samples=rows,
        batch_size=options.batch, seq_len=options.seq_len,
    )  # fmt: skip
    drawn = draw_samples(feed, vocab_size=1 << 31, seed=0)
    return drawn[aside:], drawn[:aside]


def order(train: Sequence[Sample], seed: int, steps: int, batch: int) -> list[Batch]:
    """One batch a step, no sample twice."""
    chosen = np.random.default_rng(seed).permutation(len(train))[: steps * batch]
    return pad([train[i] for i in chosen], batch)


def load(weights: str, dtype: torch.dtype, device: torch.device) -> Any:
    where, kwargs = source_arguments(weights)
    safe = {} if "gguf_file" in kwargs else {"use_safetensors": True}  # nothing is unpickled
    model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="sdpa", **kwargs, **safe)
    model.config.use_cache = False
    return model.to(device)


def adapter(base: Any, seed: int) -> Any:
    """A copy of the model with PEFT's adapter as it comes: A drawn from the seed, B zero, in float32."""
    torch.manual_seed(seed)
    return get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **LORA)).train()


def fit(model: Any, batches: Sequence[Batch], device: torch.device, tell: Callable[[int], None]) -> list[float]:
    """The loss of each step, before its update."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    for step, batch in enumerate(batches, start=1):
        loss = model(**_to(batch, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 20 == 0:
            tell(step)
    return torch.stack(losses).float().tolist()


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[Batch], device: torch.device) -> float:
    """The mean over all trained tokens."""
    model.eval()
    total = sum(float(model(**_to(b, device)).loss) * b.trained for b in batches)
    return total / sum(b.trained for b in batches)


def _to(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.inputs.items()}


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def verdict(curves: dict[Run, list[float]], window: int) -> dict[str, Any]:
    """The distances between the smoothed curves, and whether ours lie within two seeds' spread."""
    plain, ours = (
        {r.seed: smooth(c, window) for r, c in curves.items() if r.ours == o and not r.again} for o in (0, 1)
    )
    again = smooth(next(c for r, c in curves.items() if r.again), window)
    first, second = SEEDS
    pairs = {f"lorakernels and peft, seed {s}": np.abs(ours[s] - plain[s]) for s in SEEDS}
    pairs["peft, two seeds"] = spread = np.abs(plain[first] - plain[second])
    pairs[f"peft, seed {first}, twice"] = np.abs(plain[first] - again)
    inside = [d.mean() <= spread.mean() and d.max() <= spread.max() for n, d in pairs.items() if "lorakernels" in n]
    return {
        "passed": bool(all(inside)),
        "criterion": f"mean and largest distance of the curves (moving average over {window} steps), lorakernels to "
        "PEFT at one seed, not above that of PEFT's two seeds, for both seeds",
        "window": window,
        "mean_distance": {n: float(d.mean()) for n, d in pairs.items()},
        "largest_distance": {n: float(d.max()) for n, d in pairs.items()},
    }


def write(folder: Path, curves: dict[Run, list[float]], found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "losses.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *(run.name for run in curves)])
        for step, losses in enumerate(zip(*curves.values(), strict=True), start=1):
            table.writerow([step, *(f"{loss:.9g}" for loss in losses)])
    write_atomically(folder / "summary.json", (json.dumps(found, indent=1) + "\n").encode())
    draw(folder / "loss_curve.png", curves, found["window"])


def draw(path: Path, curves: dict[Run, list[float]], window: int) -> None:
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), layout="constrained")
    smoothed = {run: smooth(losses, window) for run, losses in curves.items()}
    steps = np.arange(window, window + len(next(iter(smoothed.values()))))
    for run, curve in smoothed.items():
        if not run.again:
            style = {"color": f"C{run.seed}", "linestyle": "--" if run.ours else "-", "linewidth": 2.5 - run.ours}
            above.plot(steps, curve, label=run.name, **style)
    by = {(r.seed, r.ours, r.again): c for r, c in smoothed.items()}
    first, second = SEEDS
    differences = {
        "peft: seed 0 and 1": (by[first, False, False] - by[second, False, False], "0.6"),
        "peft: seed 0 twice": (by[first, False, False] - by[first, False, True], "0.3"),
        **{f"lorakernels and peft: seed {s}": (by[s, True, False] - by[s, False, False], f"C{s}") for s in SEEDS},
    }
    for name, (difference, color) in differences.items():
        below.plot(steps, np.maximum(np.abs(difference), 1e-7), label=name, color=color)
    above.set_ylabel(f"loss, mean of {window} steps")
    below.set(yscale="log", xlabel="step", ylabel="distance of two curves")
    for axes in (above, below):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
