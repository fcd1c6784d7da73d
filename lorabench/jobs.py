"""Several fine-tuning jobs on one base, trained for their adapters: `lorabench jobs jobs.yaml`.

    lorabench jobs jobs.yaml output=output/mine
    lorabench jobs --help

Thin: read, choose the way, train, say what became of each job.
"""

from __future__ import annotations

import sys

from lorabench.cli import HELP, complain, entry, exit_code

if __name__ == "__main__":  # as in sweep.py
    entry("jobs")

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lorabench.contract.names import counted, nearest

if TYPE_CHECKING:  # these import torch, or what takes as long
    from lorabench.contract.ablation import Ablation
    from lorabench.plan.jobs_file import JobsFile
    from lorabench.train.setup import Setup
    from lorabench.train.trainer import Trainer

CHANGED = ("output", "way", "scheduler", "weights", "dtype")  # keys that the command line may change
EVERY_S = 2.0  # between two lines of progress
CAPTURED = "cuda_graph"  # tried with each way on a GPU, where the file leaves ablations to us
SCHEDULER = "fast_fit"  # where the file names none: it holds every job's samples to its budget, and needs no solver

USAGE = """\
lorabench jobs: trains several LoRA adapters on one base, together where that is faster.

usage: python -m lorabench.jobs FILE.yaml [key=value ...]      the same as lorabench jobs; keys: {keys}

FILE.yaml
  model: ORG/NAME            a folder, a config.json, ORG/NAME on the hub, or a named one with weights:
  weights: auto              auto (the model's own), a folder, ORG/NAME, smollm2-135m-instruct, random
  dtype: auto                auto, float32, bfloat16
  output: output/jobs        adapters/NAME (PEFT's save_pretrained), losses.jsonl, state.safetensors
  way: auto                  how the jobs are trained: auto (the fastest by published results), or one of
                             {ways}
  scheduler: auto            who shares a micro-batch: {{fast_fit: {{tokens: 4096}}}}, or another (lorabench list);
                             tokens: auto finds how many fit the memory
  ablations: [sdpa, adamw_foreach]     what else is switched on; left out, and way: auto, also cuda_graph on a GPU
  save_every: 100            steps
  seed: 0                    of a base of random weights
  jobs:
    - name: short            also the adapter's name
      data: FILE.jsonl       messages, prompt and completion, or text; ORG/DATASET; {{either: {{fields: [a, b]}}}}
      lora: {{r: 16, lora_alpha: 32, lora_dropout: 0.0}}     PEFT's names
      learning_rate: 1.0e-4
      schedule: constant     constant, linear, cosine;  warmup_steps: 0
      batch_size: 8          samples of one optimizer step;  micro_batch_size: of one pass (all)
      epochs: 1              steps: at most so many
      early_stop: {{held_out: 0.1, every: 50, patience: 3, min_delta: 0}}      none, where it is left out
      seed: 0                of its adapter and the order of its rows
      arrives_after: 0       steps that the others make before it begins

Jobs end one by one, and the others go on. A job whose loss is no number ends alone. The same command goes on where it
was stopped, also with more jobs in the file.

exit code: 0 when every job has its adapter; 1 when one has none, or writing fails; 2 for bad input.
"""


def main(arguments: list[str]) -> int:
    if HELP & set(arguments) or not arguments:
        from lorabench.plan.jobs_file import ways

        print(
            USAGE.format(keys=", ".join(CHANGED), ways=", ".join(ways())), file=sys.stdout if arguments else sys.stderr
        )
        return 0 if arguments else 2
    console = Console()
    _say(console, f"lorabench {version('lorabench')}: reading {arguments[0]}")
    from lorabench.contract.ablation import Unsupported
    from lorabench.record.store import StoreError

    try:
        return _train(_file(arguments), console)
    except (ValueError, Unsupported) as error:  # of files, names, models, weights, rows
        return complain(error)
    except (StoreError, MemoryError) as error:
        return complain(error, 1)
    except RuntimeError as error:
        from lorabench.measure.memory import out_of_memory

        if not out_of_memory(error):
            raise
        return complain(error, 1)
    except KeyboardInterrupt as stop:
        return complain("stopped; the same command continues where its state was saved last", exit_code(stop))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _file(arguments: Sequence[str]) -> JobsFile:
    """The file with the command line's changes. Raises ValueError."""
    from lorabench.plan.jobs_file import read
    from lorabench.plan.yaml_file import parsed

    changes: dict[str, Any] = {}
    for argument in arguments[1:]:
        key, equals, value = argument.partition("=")
        if key not in CHANGED:
            raise nearest("key", key, CHANGED, where=" of lorabench jobs")
        if not equals:
            raise ValueError(f"{argument!r} is not understood: expected {key}=VALUE")
        changes |= parsed(f"{key}: {value}") if key in ("way", "scheduler") else {key: value}
    return read(Path(arguments[0]), changes)


def _train(file: JobsFile, console: Console) -> int:
    from lorabench.run.signals import uninterrupted
    from lorabench.sweep import check_output

    check_output(file.output)
    with uninterrupted():  # an exception in the middle of its C++ would abort the process
        import torch  # noqa: F401
    from lorabench.measure.machine import describe
    from lorabench.record.store import locked
    from lorabench.train.setup import Setup, first_that_can

    setup = Setup(file, describe())
    tries = _tries(setup)
    with locked(file.output):
        trainer, refused = first_that_can(setup, tries, lambda text: _say(console, text))
        for toggles, reason in refused.items():
            _say(console, f"not {toggles}: {reason}")
        _say(
            console,
            f"{counted(len(file.jobs), 'job')} on {setup.spec.name} in {setup.dtype}: {_way(setup, trainer.toggles)}",
        )
        if trainer.tick:
            _say(console, f"going on after step {trainer.tick}")
        trainer.run(_Progress(console))
    return _became(trainer, console)


def _tries(setup: Setup) -> list[tuple[Ablation, ...]]:
    """The lists of toggles to try, the first that the machine and the jobs can have is taken. Raises ValueError."""
    from lorabench.advice.expected import in_order, parameters
    from lorabench.plan.jobs_file import AUTO, joins, toggles, ways
    from lorabench.plan.registry import ablation

    file = setup.file
    if file.way != AUTO:
        return [_scheduled(setup, toggles(file, file.way))]
    if len(file.jobs) == 1:
        return [toggles(file, None)]
    every: list[tuple[Ablation, ...]] = [(joins(name),) for name in ways(file)]
    if setup.machine.device == "cuda" and "ablations" not in file.model_fields_set:
        every += [(ablation(CAPTURED), *way) for way in every]
    best = in_order(every, parameters(setup.spec))
    return [_scheduled(setup, (*toggles(file, way.name), *captured)) for (*captured, way) in best]


def _scheduled(setup: Setup, toggles: tuple[Ablation, ...]) -> tuple[Ablation, ...]:
    """The same with a scheduler, where the file leaves that to us and jobs train together without a budget."""
    from lorabench.contract.ablation import conflict
    from lorabench.plan.jobs_file import AUTO
    from lorabench.plan.registry import ablation

    own: Any = ablation(SCHEDULER)
    own = replace(own, tokens=max(own.tokens, setup.longest))
    has_budget = any(getattr(toggle, "tokens", None) for toggle in toggles)
    if setup.file.scheduler != AUTO or has_budget or conflict((*toggles, own)):
        return toggles
    return (*toggles, own)


def _way(setup: Setup, toggles: Sequence[Ablation]) -> str:
    """The toggles, and what is published of the way among them alone: gains of several do not multiply."""
    from lorabench.advice.expected import parameters, published
    from lorabench.plan.jobs_file import AUTO, ways

    named = " + ".join(toggle.label for toggle in toggles)
    way = next((toggle for toggle in toggles if toggle.name in ways()), None)
    row = published(way, parameters(setup.spec)) if way else {}
    if not (way and row) or setup.file.way != AUTO or setup.machine.device == "cpu":
        return named
    folders = row["from"].split(", ")
    gpus = " and ".join(sorted({folder.partition("/")[0].upper() for folder in folders}))
    return (
        f"{named} ({way.name} was on average {row['speedup']:.2f} × as fast as one job after the other, with "
        f"{row['model']} on {gpus} in results/{', results/'.join(folders)})"
    )


class _Progress:
    """A line every few seconds, and at the first tick."""

    def __init__(self, console: Console) -> None:
        self.console, self.last, self.tokens = console, 0.0, 0

    def __call__(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if self.last and now - self.last < EVERY_S:
            return
        rate = f", {(trainer.tokens - self.tokens) / (now - self.last):.0f} tokens/s" if self.last else ""
        self.last, self.tokens = now, trainer.tokens
        jobs = [f"{j.name} {j.progress.step}/{j.steps} loss {j.progress.loss:.4f}"
                for j in trainer.jobs if not j.ended and j.progress.loss is not None]  # fmt: skip
        if jobs:
            _say(self.console, f"step {trainer.tick}{rate}: " + " · ".join(jobs))


def _became(trainer: Trainer, console: Console) -> int:
    from lorabench.train.job import NAN

    table = Table("job", "steps", "loss", "held-out loss", "ended", "adapter")
    for job in trainer.jobs:
        mine = job.progress
        numbers = ["" if value is None else f"{value:.4f}" for value in (mine.loss, mine.held_out)]
        where = "" if mine.status == NAN else str(trainer.folder / "adapters" / job.name)
        table.add_row(job.name, f"{mine.step}/{job.steps}", *numbers, mine.status, where)
    console.print(table)
    return 1 if any(job.progress.status == NAN for job in trainer.jobs) else 0
