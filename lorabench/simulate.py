"""How long the stages of a pipeline wait while several adapters train on one base. Simulated: it needs no GPU.

usage: python -m lorabench.simulate [key=value ...]             the same as lorabench simulate [key=value ...]

  workloads=[mixed,...]      xsum, cnn_dailymail, wikisum, mixed, heterogeneous (LoRAFusion's five; lengths approximate)
  methods=[lorafusion,...]   one job after the other, emptied behind each step: "1F1B with flush" (Megatron-LM's),
                             "GPipe with flush", "interleaved with flush"; mLoRA; and the schedules
                             {methods}
  adapters=[1,2,3,4]         how many jobs train together
  model=llama-3.1-70b stages=4      stage times from what LoRAFusion's authors measured on an H100 (or llama-3.1-8b),
                             with stages=[21,20,20,19] of so many layers each; or
  times=FILE.csv             your own: columns stage, tokens, forward_ms, backward_ms
  capacity=TOKENS            of a micro-batch, padding included; else the published one of each workload
  multiple=128               to which each adapter's rows in a micro-batch are filled up (1: not at all)
  steps=20 seeds=1           global batches a job, and draws of the lengths
  time_limit_s=0.1           of each packing's mixed-integer programme
  chunks=2                   into how many stages of its rank the interleaved pipeline cuts each stage
  transfer_ms=0 update_ms=0  from one stage to the next; of each stage's part of a job's optimizer step
  measured=FILE.csv          bubbles to stand beside: columns workload, method, adapters, bubble_pct
  output=FOLDER              bubbles.csv and bubbles.md go there

From Python, numbers in and numbers out:

    from lorabench import simulate

    jobs = [[[300, 700, 512], [64, 900, 128]], [[1200, 80], [640, 640]]]   # tokens by job, global batch, sample
    budget, times = simulate.Budget(2048), simulate.profiled("llama-3.1-70b", stages=4)
    schedule = simulate.fill(simulate.SCHEDULERS["staggered"](jobs, budget, 4), stages=4)
    bubbles = simulate.pipeline(*times.of([budget.used(held) for held in schedule]))
    print(bubbles.ratio, bubbles.by_stage, bubbles.without_ramp)

exit code: 0; 2 for bad input, an output that cannot be written included.
"""

from __future__ import annotations

from lorabench.cli import HELP, complain, entry

if __name__ == "__main__":  # as in sweep.py
    entry("simulate")

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lorabench import __version__
from lorabench.contract.names import counted, nearest
from lorabench.plan.bubbles import FEEDS, METHODS, Row, Setting, rows
from lorabench.record.words import number
from lorabench.schedule import SCHEDULERS, Budget, Sample, fill, verify
from lorabench.schedule.pipeline import Bubbles, ends_of_batches, flushed_bubble, pipeline, shared_bubble
from lorabench.schedule.stage_times import PROFILES, StageTimes, profiled

__all__ = [
    "SCHEDULERS", "Bubbles", "Budget", "Row", "Sample", "Setting", "StageTimes",
    "ends_of_batches", "fill", "flushed_bubble",
    "main", "markdown", "pipeline", "profiled", "read_measured", "read_times", "rows", "shared_bubble", "verify",
]  # fmt: skip

# The table's columns: what they are called, and what of a row stands there.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "workload": lambda r: f"{r.workload} ({r.lengths})",
    "method": lambda r: r.method,
    "adapters": lambda r: str(r.adapters),
    "bubble, simulated": lambda r: f"{r.bubble_pct:.1f} %",
    "without ramp": lambda r: f"{r.without_ramp_pct:.1f} %",
    "by stage, %": lambda r: r.by_stage_pct,
    "published": lambda r: "" if r.published_pct is None else f"{r.published_pct:.2f} %",
    "measured": lambda r: "" if r.measured_pct is None else f"{r.measured_pct:.1f} %",
    "micro-batches": lambda r: f"{r.micro_batches:.2f} + {r.empty:.2f}",
    "padding": lambda r: f"{r.padding_pct:.1f} %",
    "tokens/s": lambda r: f"{r.tokens_s:.0f}",
    "scheduling, s": lambda r: number(r.scheduling_s),
}


def cells(row: Row) -> list[str]:
    return [show(row) for show in COLUMNS.values()]


def markdown(every: Iterable[Row]) -> str:
    """The table, under one line that says what it is."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *map(cells, every)]
    said = (
        "Simulated, not measured. Micro-batches are those of a global batch, and the empty ones of the bubble lemma. "
        "Published: LoRAFusion's table, whose workload is not known to us."
    )
    return "\n".join([said, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


# -- files ------------------------------------------------------------------------------------------------------------


def _table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises ValueError for one that cannot be read or lacks a column."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}; expected a CSV file") from None
    if not found or not set(columns) <= found[0].keys():
        raise ValueError(f"{path}: expected the columns {', '.join(columns)}, and rows under them")
    return found


def _number(path: Path, row: Mapping[str, str], column: str, of: Callable[[str], Any] = float) -> Any:
    try:
        return of(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"{path}: {column}={row[column]!r}; expected a number in every row") from None


def read_times(path: Path) -> StageTimes:
    """Measured times of stages: columns stage (from 0), tokens, forward_ms, backward_ms, each stage at each number of
    tokens. Raises ValueError."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    columns = ("stage", "tokens", "forward_ms", "backward_ms")
    for row in _table(path, columns):
        stage, tokens = (_number(path, row, column, int) for column in columns[:2])
        found[stage, tokens] = (_number(path, row, columns[2]), _number(path, row, columns[3]))
    stages, tokens = (sorted({at[i] for at in found}) for i in (0, 1))
    if stages != list(range(len(stages))) or len(found) != len(stages) * len(tokens):
        raise ValueError(f"{path}: expected the stages 0, 1, …, each at every number of tokens")
    parts = ([[found[s, n][i] for n in tokens] for s in stages] for i in (0, 1))
    return StageTimes(tokens, *parts)


def read_measured(path: Path) -> dict[tuple[str, str, int], float]:
    """Measured bubbles in per cent, by workload, method and adapters. Raises ValueError."""
    found = {}
    for row in _table(path, ("workload", "method", "adapters", "bubble_pct")):
        key = row["workload"], row["method"], _number(path, row, "adapters", int)
        found[key] = _number(path, row, "bubble_pct")
    return found


def write(folder: Path, every: Sequence[Row]) -> None:
    """bubbles.csv and bubbles.md, each whole or not at all. Raises StoreError."""
    from lorabench.record.store import write_atomically

    made = io.StringIO()
    lines = csv.writer(made, lineterminator="\n")
    lines.writerow(Row._fields)
    lines.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in every)
    write_atomically(folder / "bubbles.csv", made.getvalue().encode())
    write_atomically(folder / "bubbles.md", markdown(every).encode())


# -- the command ------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "workloads": list(FEEDS), "methods": list(METHODS), "adapters": [1, 2, 3, 4], "model": "llama-3.1-70b", "stages": 4,
    "times": None, "capacity": None, "multiple": 128, "steps": 20, "seeds": 1, "time_limit_s": 0.1, "transfer_ms": 0.0,
    "update_ms": 0.0, "chunks": 2,
    "measured": None, "output": None,
}  # fmt: skip


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Every key with its value. Raises ValueError."""
    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"{argument!r}: expected key=value, as in steps=20")
        if key not in DEFAULTS:
            raise nearest("key", key, DEFAULTS)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = None
        given[key] = _checked(key, value if not isinstance(DEFAULTS[key], list) or isinstance(value, list) else [value])
    if "times" in given and {"model", "stages"} & set(given):
        raise ValueError("times= holds the stages; expected no model= or stages= beside it")
    return DEFAULTS | given


def _checked(key: str, value: Any) -> Any:
    if key in ("workloads", "methods"):
        good, wanted = value and all(isinstance(name, str) for name in value), "a list of names"
    elif key == "adapters" or (key == "stages" and isinstance(value, list)):
        good, wanted = value and all(_whole(n) for n in value), "a list of whole numbers above 0"
    elif key in ("model", "times", "measured", "output"):
        good, wanted = value and isinstance(value, str), "a folder" if key == "output" else "a name"
    elif key in ("time_limit_s", "transfer_ms", "update_ms"):
        good, wanted = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0, "a number from 0"
    else:
        good, wanted = _whole(value), "a whole number above 0"
    if not good:
        raise ValueError(f"{key}={value!r}: expected {wanted}")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _stage_times(asked: Mapping[str, Any]) -> StageTimes:
    if asked["times"]:
        return read_times(Path(asked["times"]))
    if asked["model"] not in PROFILES:
        raise nearest("model", asked["model"], PROFILES, or_else="times=FILE.csv")
    return profiled(asked["model"], asked["stages"])


def main(arguments: Sequence[str]) -> int:
    if HELP & set(arguments):
        print((__doc__ or "").format(methods=", ".join(SCHEDULERS)))
        return 0
    try:
        return _main(parsed(arguments))
    except (ValueError, OSError) as error:
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        return complain(where)


def _main(asked: dict[str, Any]) -> int:
    passed = ("steps", "seeds", "capacity", "multiple", "time_limit_s", "transfer_ms", "update_ms", "chunks")
    setting = Setting(_stage_times(asked), **{key: asked[key] for key in passed})
    measured = read_measured(Path(asked["measured"])) if asked["measured"] else None
    if asked["output"]:
        from lorabench.sweep import check_output  # imports what plans a sweep, which nothing else here needs

        check_output(Path(asked["output"]))  # before the minutes that the rows take
    print(f"lorabench {__version__}: simulating a pipeline of {setting.times.stages} stages …", flush=True)
    every = []
    for row in rows(setting, asked["workloads"], asked["methods"], asked["adapters"], measured):
        every.append(row)
        published = f", published {row.published_pct:.2f} %" if row.published_pct else ""
        print(
            f"{row.workload}, {row.method}, {counted(row.adapters, 'adapter')}: {row.bubble_pct:.1f} %{published}",
            flush=True,
        )
    print("\n" + markdown(every), end="")
    if asked["output"]:
        write(Path(asked["output"]), every)
        print(f"\nwritten: {asked['output']}/bubbles.csv, bubbles.md")
    return 0
