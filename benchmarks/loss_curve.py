"""Loss curves with and without lorakernels: real weights, real text, the same steps.

    python benchmarks/loss_curve.py gsm8k_train.jsonl --out results/h200/loss_curve
    python benchmarks/loss_curve.py FILE.jsonl --weights FOLDER --steps 20 --batch 4 --out somewhere
    python benchmarks/loss_curve.py gsm8k_train.jsonl --fp8 --out results/h200/loss_curve_fp8
    python benchmarks/loss_curve.py --redraw results/h200/loss_curve     # the figure alone, from losses.csv

Trains LoRA on every linear with PEFT, plain and after `lorakernels.apply`, from two seeds; with --fp8 the frozen
products of the latter are in FP8. A seed decides the adapter's start and the order of the samples. Plain seed 0 runs
twice: what a run differs by from itself (atomic adds, say) is the least that anything can differ by. Then every run is
evaluated on samples that none has seen.

Their distance from PEFT at the same seed, as the mean and the largest distance of the smoothed curves (moving average
over WINDOW steps), is held against two others: that of PEFT from itself, one seed twice, and that of PEFT's two seeds.
The run passes by the second, at both seeds, because `lorakernels` round in another order than PEFT does and a run that
is repeated does not; how many times the first it is stands beside it.

FILE.jsonl: one object a line, with the fields `question` and `answer`. Weights: `smollm2-135m-instruct` (out of the
package index, or the GGUF file that LORABENCH_GGUF names), a local folder or a hub name. Writes losses.csv,
summary.json and loss_curve.png and .svg.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lorakernels
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.workload import Workload
from lorabench.measure.machine import commit, describe
from lorabench.plan.samples import draw as draw_samples
from lorabench.plan.weights import dense, source_arguments
from lorabench.record.store import write_atomically
from lorabench.report.figure import png, svg

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
    if options.redraw:
        draw(options.redraw, *read(options.redraw))
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    train, held_out = samples(options)
    with beside(options.at_once) as each:
        results = dict(zip(RUNS, each(partial(trained, options, train, held_out, dtype, device), RUNS), strict=True))
    curves = {run: result[0] for run, result in results.items()}
    evaluated = {run: result[1] for run, result in results.items()}
    sites = next(result[2] for run, result in results.items() if run.ours)
    found = {
        **verdict(curves, min(WINDOW, max(1, options.steps // 4))),
        "held_out_loss": {run.name: evaluated[run] for run in RUNS},
        "lorakernels_sites": sites,
        "settings": {
            "weights": options.weights, "text": Path(options.text).name, "steps": options.steps, "batch": options.batch,
            "seq_len": options.seq_len, "lora": LORA, "learning_rate": LEARNING_RATE, "optimizer": "AdamW, constant",
            "dtype": str(dtype).removeprefix("torch."), "fp8": options.fp8, "held_out_samples": len(held_out),
            "at_once": options.at_once,
        },
    }  # fmt: skip
    save(Path(options.out), curves, found)
    draw(Path(options.out), curves, found["window"])
    shown = ("passed", "criterion", "mean_distance", "largest_distance", "times_one_seed_twice", "times_two_seeds")
    print(json.dumps({k: found[k] for k in shown}, indent=1))
    return 0 if found["passed"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="JSONL file with the fields question and answer")
    parser.add_argument("--redraw", type=Path, metavar="FOLDER", help="draw its figure again and stop")
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="samples a step, padded to the longest of them")
    parser.add_argument("--seq-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--fp8", action="store_true", help="the frozen products of lorakernels in FP8")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other; their time is not looked at")
    parser.add_argument("--out", default="output/loss_curve")
    options = parser.parse_args(argv)
    if not options.text and not options.redraw:
        parser.error("a text to train on is needed, or --redraw FOLDER")
    return options


@contextmanager
def beside(count: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that runs so many at once, each in a process of its own; one at a time in this process."""
    if count == 1:
        yield map
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def trained(
    options: argparse.Namespace, train: list[Sample], held_out: list[Sample], dtype: torch.dtype, device: torch.device,
    run: Run,
) -> tuple[list[float], float, dict[str, int]]:  # fmt: skip
    """(loss of each step, of the samples held out, linears and more that `lorakernels` replaced)"""
    model = adapter(_read_once(options.weights, dtype, device), run.seed)
    sites = dict(lorakernels.apply(model, fp8=options.fp8).counts) if run.ours else {}
    batches = order(train, run.seed, options.steps, options.batch)
    losses = fit(model, batches, device, lambda step: print(f"{run.name}: step {step}", flush=True))
    evaluated = evaluate(model, pad(held_out, options.batch), device)
    print(f"{run.name}: {losses[0]:.4f} -> {losses[-1]:.4f}, held out {evaluated:.4f}", flush=True)
    return losses, evaluated, sites


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
    return dense(model).to(device)


_read_once = cache(load)


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


def slices(text: Path, folder: Path, counts: Mapping[str, int]) -> dict[str, Path]:
    """A file for each job with so many rows of its own."""
    rows, files, first = text.read_text(encoding="utf-8").splitlines(keepends=True), {}, 0
    if len(rows) < sum(counts.values()):
        raise SystemExit(f"{text} has {len(rows)} rows; the steps of all jobs need {sum(counts.values())}")
    for name, count in counts.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(rows[first : first + count]), encoding="utf-8")
        first += count
    return files


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def verdict(curves: dict[Run, list[float]], window: int) -> dict[str, Any]:
    """The distances between the smoothed curves, ours over either of PEFT's own (null where that is none), and whether
    ours lie within two seeds' spread."""
    plain, ours = (
        {r.seed: smooth(c, window) for r, c in curves.items() if r.ours == o and not r.again} for o in (0, 1)
    )
    again = smooth(next(c for r, c in curves.items() if r.again), window)
    first, second = SEEDS
    pairs = {f"lorakernels and peft, seed {s}": np.abs(ours[s] - plain[s]) for s in SEEDS}
    pairs["peft, two seeds"] = spread = np.abs(plain[first] - plain[second])
    pairs[f"peft, seed {first}, twice"] = np.abs(plain[first] - again)
    ours_from_peft = {n: d for n, d in pairs.items() if "lorakernels" in n}
    inside = [d.mean() <= spread.mean() and d.max() <= spread.max() for d in ours_from_peft.values()]

    def times(other: np.ndarray) -> dict[str, dict[str, float | None]]:
        return {
            n: {"mean": _over(d.mean(), other.mean()), "largest": _over(d.max(), other.max())}
            for n, d in ours_from_peft.items()
        }

    return {
        "passed": bool(all(inside)),
        "criterion": f"mean and largest distance of the curves (moving average over {window} steps), lorakernels to "
        "PEFT at one seed, not above that of PEFT's two seeds, for both seeds; how far PEFT's one seed is from itself "
        "when it runs twice is reported and decides nothing",
        "window": window,
        "mean_distance": {n: float(d.mean()) for n, d in pairs.items()},
        "largest_distance": {n: float(d.max()) for n, d in pairs.items()},
        "times_one_seed_twice": times(pairs[f"peft, seed {first}, twice"]),
        "times_two_seeds": times(spread),
    }


def _over(ours: float, other: float) -> float | None:
    return float(ours / other) if other else None


def save(folder: Path, curves: Mapping[Any, Sequence[float]], found: dict[str, Any]) -> None:
    """losses.csv, a column a run by its name, and summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame({run.name: losses for run, losses in curves.items()})
    table.index += 1
    table.to_csv(folder / "losses.csv", index_label="step", float_format="%.9g")
    write_found(folder / "summary.json", found)


def write_found(file: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, as JSON, with the machine and the commit, which what it returns has too."""
    whole = {**found, "machine": describe().model_dump(mode="json")}
    whole["commit"] = dict(zip(("head", "dirty"), commit(), strict=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(whole, indent=1) + "\n").encode())
    return whole


def read(folder: Path, runs: Sequence[Any] = RUNS) -> tuple[dict[Any, list[float]], int]:
    """The curves of a folder that `save` has written, and the window."""
    table = pd.read_csv(folder / "losses.csv")
    curves = {run: table[run.name].tolist() for run in runs}
    return curves, json.loads((folder / "summary.json").read_text())["window"]


def draw(folder: Path, curves: dict[Run, list[float]], window: int) -> None:
    """A column a seed. Above, both curves. Below, on a linear axis, how far ours is from PEFT's; the band reaches as
    far either way as two seeds of PEFT differ."""
    smoothed = {(r.seed, r.ours, r.again): smooth(c, window) for r, c in curves.items()}
    first, second = SEEDS
    spread = np.abs(smoothed[first, False, False] - smoothed[second, False, False])
    steps = np.arange(window, window + len(spread))
    figure = Figure(figsize=(9.5, 6), dpi=150, layout="constrained")
    axes: Any = figure.subplots(2, len(SEEDS), sharex=True, sharey="row", height_ratios=(3, 2))
    for (above, below), seed in zip(axes.T, SEEDS, strict=True):
        plain, ours = smoothed[seed, False, False], smoothed[seed, True, False]
        above.plot(steps, plain, color="black", lw=2.2, label="PEFT")
        above.plot(steps, ours, color="#E69F00", lw=1.1, label="lorakernels")
        above.set_title(f"seed {seed}", loc="left", fontsize=10, fontweight="bold")
        below.fill_between(steps, -spread, spread, color="#dddddd", lw=0, label="PEFT's two seeds differ by")
        below.axhline(0, color="black", lw=0.8)
        below.plot(steps, ours - plain, color="#E69F00", lw=1.3, label="lorakernels - PEFT")
        if seed == first:
            again = smoothed[seed, False, True] - plain
            below.plot(steps, again, color="#0072B2", lw=1.0, label="PEFT again - PEFT")
        below.set_xlabel("step")
    axes[0, 0].set_ylabel(f"loss, mean of {window} steps")
    axes[1, 0].set_ylabel("difference of the two")
    handles = [*axes[0, 0].get_legend_handles_labels()[0], *axes[1, 0].get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8.5)
    write_figure(folder, "loss_curve", figure)


def write_figure(folder: Path, name: str, figure: Figure) -> None:
    """As PNG and SVG, with a grid behind the curves and open to the top and the right."""
    for ax in figure.axes:
        ax.grid(color="#e6e6e6", lw=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    write_atomically(folder / f"{name}.png", png(figure))
    write_atomically(folder / f"{name}.svg", svg(figure, name))


if __name__ == "__main__":
    raise SystemExit(main())
