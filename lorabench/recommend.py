"""The recommendation: which few toggles to switch on for a model and a workload on this machine.

    lorabench recommend 'models=[smollm2-135m]' workload=gsm8k budget_minutes=10
    python -m lorabench.recommend --help

Thin, as the sweep: compose, plan, run rounds of cells, recommend, report. Records go into the same kind of folder.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # as in sweep.py
    from lorabench.cli import main as entry

    raise SystemExit(entry(["recommend", *sys.argv[1:]]))

import shlex
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from lorabench.contract.ablation import Ablation
from lorabench.contract.cell import Cell
from lorabench.contract.names import NameUnknown
from lorabench.listing import show_plan
from lorabench.plan.compose import (
    OF_A_SWEEP,
    ConfigError,
    RecommendConfig,
    load_config,
    load_recommend_config,
    names_in,
    plan,
)
from lorabench.plan.design import refusal
from lorabench.plan.registry import ablation_class, registered
from lorabench.record.store import Store, write_atomically
from lorabench.run.agenda import AGAIN
from lorabench.run.load import load_average
from lorabench.run.signals import uninterrupted
from lorabench.sweep import check_output, in_one_line, warn_of_load

if TYPE_CHECKING:  # these import torch
    from lorabench.advice.budget import StoppedInTime
    from lorabench.advice.search import Search
    from lorabench.run.local_queue import LocalQueue

# What `recommend` decides itself; `dry_run` is the same in both.
NOT_OURS = {*OF_A_SWEEP, "suite"} - {"dry_run"}

HELP = """\
lorabench.recommend: which few optimizations to switch on for a model and a workload, on this machine.

usage: python -m lorabench.recommend [key=value ...]        (Hydra's override grammar, the sweep's keys)

  models=[MODEL]           your model: a folder, a config.json, ORG/NAME on the hub; or a YAML file, or a name:
                           {models}
                           {{MODEL:{{r:8,...}}}} has an adapter of its own
  workload=DATA            your data: FILE.jsonl (chats, prompt and completion, text), ORG/DATASET on the hub; or
                           BATCHxLENGTH (4x2048), auto, {{DATA:{{field:value}}}}, or a name:
                           {workloads}
  weights=random           auto (your model's own), a hub name, a local folder, smollm2-135m-instruct
  lora.r=16 lora.lora_dropout=0.0 ...   PEFT's names        dtype=auto|bfloat16|float16|float32
  reference=peft           what is switched on already: peft, peft_low, peft_nf4, or a list of ablations
  ablations=[NAME,...]     what to try; where none are named, every toggle that says it is worth trying
  budget_minutes=10        for how long to measure; the same command goes on where it stopped
  output=output/recommend  recommendation.md and .json, and all that a sweep writes
  trials= warmup= seed= timeout_s= resume=true|failed|false     as in a sweep
  dry_run=true             what it would try and how long that would take; nothing is measured

It measures each toggle alone, then puts the best of each slot together one by one, each on top of what helped so far,
and at last the whole against the reference. A toggle stays where it is clearly faster and passed the numerics gate.

exit code: 0 when there is an answer, also that nothing helps; 2 for bad input, an output that cannot be written
included; 1 when writing fails on the way, or a sweep writes there.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "help"} & set(arguments):
        print(HELP.format(models=", ".join(names_in("model")), workloads=", ".join(names_in("workloads"))))
        return 0
    return in_one_line(lambda: _main(arguments, Console()))


def _main(arguments: list[str], console: Console) -> int:
    config = composed(arguments)
    check_output(config.output)
    _say(console, f"lorabench {version('lorabench')}: planning")
    with uninterrupted():  # as in a sweep
        import torch  # noqa: F401
    if config.dry_run:
        _show(config, console)
        return 0
    return _run(config, arguments, console)


def composed(arguments: Sequence[str]) -> RecommendConfig:
    """The configuration, before anything heavy is imported: a wrong key is refused at once. Raises ConfigError."""
    keys = [argument.lstrip("+~").partition("=")[0].partition(".")[0] for argument in arguments]
    if wrong := next((key for key in keys if key in NOT_OURS), None):
        raise ConfigError(f"{wrong} is a key of lorabench sweep and not of recommend, which decides that itself")
    dry = [argument for argument, key in zip(arguments, keys, strict=True) if key == "dry_run"]
    config = load_recommend_config([argument for argument in arguments if argument not in dry])
    return config.model_copy(update={"dry_run": load_config(dry).dry_run})


def _say(console: Console, doing: str) -> None:
    """As a sweep says it."""
    console.print(f"{doing} …", highlight=False, style="dim", soft_wrap=True)


def _show(config: RecommendConfig, console: Console) -> None:
    """What is tried first, as a sweep shows its cells: what comes then depends on what becomes of these."""
    from lorabench.measure.machine import describe

    machine = describe()
    cells = planned(config, machine.device, console)
    in_need, tried = _in_need(config, cells), config.ablations
    if tried is None:
        tried = [t.name for cell in cells if cell.toggles not in in_need for t in cell.toggles]
    show_plan(console, config.model_copy(update={"ablations": tried}), machine)
    console.print(
        "then the best of each slot are put together, each in a cell of its own; measuring ends after "
        f"budget_minutes={config.budget_minutes:g}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if in_need:
        names = ", ".join(t.name for toggles in in_need for t in toggles)
        console.print(f"tried only where the reference does not fit: {names}", highlight=False, soft_wrap=True)


def _in_need(config: RecommendConfig, cells: Sequence[Cell]) -> list[tuple[Ablation, ...]]:
    """What is tried only where the reference does not fit; nothing that the user names."""
    if config.ablations is not None:
        return []
    return [cell.toggles for cell in cells if any(t.worth_trying == "memory" for t in cell.toggles)]


def _run(config: RecommendConfig, arguments: list[str], console: Console) -> int:
    from lorabench.advice.budget import StoppedInTime
    from lorabench.run.local_queue import LocalQueue
    from lorabench.run.process import ProbeError

    planned(config, "cpu", console)  # names first, as in a sweep
    workers = StoppedInTime()
    try:
        with (
            Store(config.output) as store,
            LocalQueue(config.dtype, config.timeout_s, config.output, workers) as queue,
        ):
            _recommend(config, arguments, store, queue, workers, console)
            return 0
    except ProbeError as error:
        raise ConfigError(str(error)) from None


def planned(config: RecommendConfig, device: str, console: Console | None = None) -> list[Cell]:
    """The reference against itself, then each contender alone. Raises ConfigError. `console`: who is told of toggles
    that do not load."""
    if len(config.models) != 1:
        raise ConfigError(f"recommend takes one model, for which it answers; models= has {len(config.models)}")
    tried = config.ablations
    if tried is None:
        (itself,) = _one_reference(plan(config.model_copy(update={"ablations": []}), device).cells)
        tried = worth_trying(itself.kind, console)
    cells = plan(config.model_copy(update={"ablations": tried}), device).cells
    _one_reference([cell for cell in cells if not cell.toggles])
    if len(cells[0].jobs) > 1:
        raise ConfigError(f"recommend answers for one job; the workload {cells[0].workload.name} has several")
    return cells


def _one_reference(cells: Sequence[Cell]) -> Sequence[Cell]:
    if len(cells) != 1:
        raise ConfigError(f"recommend takes one reference, on which it puts others; reference= has {len(cells)}")
    return cells


def worth_trying(kind: str, console: Console | None = None) -> list[str]:
    """The names of the toggles, ours and others', that say so of themselves and know the kind."""
    found = []
    for name in sorted(registered()):
        try:
            cls = ablation_class(name)
        except NameUnknown as error:
            if console:
                console.print(f"[yellow]{escape(str(error))}", soft_wrap=True)
            continue
        if cls.worth_trying and kind in cls.kinds:
            found.append(name)
    return found


def _recommend(
    config: RecommendConfig,
    arguments: list[str],
    store: Store,
    queue: LocalQueue,
    workers: StoppedInTime,
    console: Console,
) -> None:
    from lorabench.advice.result import recommendation
    from lorabench.report import recommendation as page
    from lorabench.report.write import Report

    command = ["python", "-m", "lorabench.recommend", *arguments]
    if store.repaired:
        console.print(f"[yellow]{escape(store.repaired)}")
    load = load_average()
    _say(console, "starting workers and looking at the machine")
    warn_of_load(console, load, queue.look(command))
    search = _search(config, store, queue)
    _measure(search, store, queue, workers, console)
    dtype = search.machine.dtype(search.itself.model.dtype)
    found = recommendation(search, search.machine.name, dtype, shlex.join(command))
    write_atomically(store.folder / page.FILE, found.model_dump_json(indent=1).encode())
    written = write_atomically(store.folder / "recommendation.md", page.markdown(found).encode())
    Report.of(store.folder).write()
    console.print(Panel(escape(found.paragraph), title=escape(found.title), title_align="left"))
    for title, _, text in found.code[:1]:
        console.print(f"[bold]{title}[/]\n\n{escape(text)}", highlight=False, soft_wrap=True)
    others = [*(title for title, _, _ in found.code[1:]), "what was tried"]
    console.print(f"{', '.join(others)}: {written}", highlight=False, soft_wrap=True)


def _search(config: RecommendConfig, store: Store, queue: LocalQueue) -> Search:
    from lorabench.advice.budget import Budget
    from lorabench.advice.search import Search
    from lorabench.plan.estimate import computed
    from lorabench.report.analysis import Analysis

    again = AGAIN if config.resume == "failed" else ()
    records = {r.key: r for r in store.records() if r.status not in again}
    if records and config.resume is False:
        raise ConfigError(f"{config.output} already holds {len(records)} records; resume=true, or another output=")
    machine = queue.machine
    cells = planned(config, machine.device)
    search = Search(
        cells, machine, Budget(config.budget_minutes, lambda cell: computed(cell, queue.ceilings).seconds),
        look=lambda: Analysis.read(store.folder), records=records,
        in_need=_in_need(config, cells),
    )  # fmt: skip
    for cell in cells:
        if cell.key in records:
            search.budget.learn(cell, records[cell.key])
    return search


def _measure(search: Search, store: Store, queue: LocalQueue, workers: StoppedInTime, console: Console) -> None:
    """Every record into the store, as the search asks for its cell."""
    from lorabench.run.progress import Display

    ((_, session),) = queue.sessions.items()
    todo = [c for c in search.planned if c.key not in search.records and c.toggles not in search.in_need]
    console.print(
        f"{search.itself.model.name} @ {search.itself.workload.name} on {queue.where}: up to "
        f"{search.budget.seconds / 60:g} minutes, {len(search.records)} cells already recorded in {store.folder}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    display = Display(console, todo, sum(refusal(cell, search.machine) is not None for cell in todo))

    def asked_for() -> Iterator[Cell]:
        for cell in search.cells():
            if cell not in todo:
                display.add(measurable=refusal(cell, search.machine) is None)
            workers.deadline = time.monotonic() + search.budget.limit(cell)
            yield cell

    known = False
    with display:
        for cell, record in queue.run(asked_for(), display):
            display.end(cell, record)
            if workers.stopped(record):
                search.leave_out(cell, "it was stopped, as it took too much of the budget")
                continue
            if not known:
                store.add_session(session)
            known = True
            store.append(record)
            search.learn(cell, record)
    if known:
        store.add_session({**session, "wall_s": round(search.budget.spent, 1)})
