"""The recommendation: which few toggles to switch on for a model and a workload on this machine.

    lorabench recommend 'models=[smollm2-135m]' workload=gsm8k budget_minutes=10
    python -m lorabench.recommend --help

Thin, as the sweep: compose, plan, run families, recommend, report. Records go into the same kind of folder.
"""

from __future__ import annotations

from lorabench.cli import HELP, entry

if __name__ == "__main__":  # as in sweep.py
    entry("recommend")

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from lorabench.contract.cell import Cell
from lorabench.contract.names import NameUnknown, counted
from lorabench.listing import say_rows, show_plan
from lorabench.plan.compose import (
    OF_A_SWEEP,
    ConfigError,
    RecommendConfig,
    load_config,
    load_recommend_config,
    names_in,
    plan,
)
from lorabench.plan.registry import ablation_class, registered
from lorabench.record.store import Store, write_atomically
from lorabench.run.agenda import AGAIN
from lorabench.run.load import load_average
from lorabench.sweep import in_one_line, prepare, say, warn_of_load

if TYPE_CHECKING:  # these import torch
    from lorabench.advice.known import Known, Question
    from lorabench.contract.family import Family
    from lorabench.contract.machine import Machine
    from lorabench.record.schema import ArmRecord
    from lorabench.run.local_queue import LocalQueue

# What `recommend` decides itself; `dry_run` is the same in both.
NOT_OURS = {*OF_A_SWEEP, "suite"} - {"dry_run"}

USAGE = """\
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

It measures all toggles together in rounds, each alone, those first that brought most in published results. Then it puts
the best of each slot together, and measures every stack, and the whole without each of its parts, in rounds too.

exit code: 0 when there is an answer, also that nothing helps; 2 for bad input, an output that cannot be written
included; 1 when writing fails on the way, or a sweep writes there.
"""


def main(arguments: list[str]) -> int:
    if HELP & set(arguments):
        print(USAGE.format(models=", ".join(names_in("model")), workloads=", ".join(names_in("workloads"))))
        return 0
    return in_one_line(lambda: _main(arguments, Console()))


def _main(arguments: list[str], console: Console) -> int:
    config = composed(arguments)
    prepare(config, console)
    given = _keys(arguments)
    if standing := [f"{key}={getattr(config, key)}" for key in ("models", "workload") if key not in given]:
        said = f"not given, and so not yours but the default: {', '.join(standing)}"
        console.print(f"[yellow]{escape(said)}", highlight=False, soft_wrap=True)
    if config.dry_run:
        _show(config, console)
        return 0
    return _run(config, arguments, console)


def composed(arguments: Sequence[str]) -> RecommendConfig:
    """The configuration, before anything heavy is imported: a wrong key is refused at once. Raises ConfigError."""
    keys = _keys(arguments)
    if wrong := next((key for key in keys if key in NOT_OURS), None):
        raise ConfigError(f"{wrong} is a key of lorabench sweep and not of recommend, which decides that itself")
    dry = [argument for argument, key in zip(arguments, keys, strict=True) if key == "dry_run"]
    config = load_recommend_config([argument for argument in arguments if argument not in dry])
    return config.model_copy(update={"dry_run": load_config(dry).dry_run})


def _keys(arguments: Sequence[str]) -> list[str]:
    return [argument.lstrip("+~").partition("=")[0].partition(".")[0] for argument in arguments]


def _show(config: RecommendConfig, console: Console) -> None:
    """What is tried first, as a sweep shows its cells: what comes then depends on what becomes of these."""
    from lorabench.measure.machine import describe

    machine = describe()
    question = _question(config, machine, console)
    tried = [t.name for toggles in question.contenders if toggles not in question.in_need for t in toggles]
    shown = tried if config.ablations is None else config.ablations
    show_plan(console, config.model_copy(update={"ablations": shown, "budget_minutes": None}), machine)
    console.print(
        "all of these in one family, as far as there is time; then the best of each slot are put together; no round "
        f"begins after budget_minutes={config.budget_minutes:g}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if question.in_need:
        names = ", ".join(t.name for toggles in question.in_need for t in toggles)
        console.print(f"tried only where memory asks for it: {names}", highlight=False, soft_wrap=True)


def _question(config: RecommendConfig, machine: Machine, console: Console | None = None) -> Question:
    """What is to be answered on this machine. Nothing that the user names waits for a need of memory."""
    from lorabench.advice.expected import in_order, parameters
    from lorabench.advice.known import Question

    itself, *solos = planned(config, machine.device, console)
    size = parameters(itself.model)
    contenders = in_order([cell.toggles for cell in solos], size)
    named = config.ablations is not None
    in_need = [c for c in contenders if not named and any(t.worth_trying == "memory" for t in c)]
    return Question(itself, contenders, machine, size, in_need, config.trials or Question.rounds)


def _run(config: RecommendConfig, arguments: list[str], console: Console) -> int:
    from lorabench.run.local_queue import LocalQueue
    from lorabench.run.process import ProbeError

    planned(config, "cpu", console)  # names first, as in a sweep
    try:
        with Store(config.output) as store, LocalQueue(config.dtype, config.timeout_s, config.output) as queue:
            _recommend(config, arguments, store, queue, console)
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
    config: RecommendConfig, arguments: list[str], store: Store, queue: LocalQueue, console: Console
) -> None:
    from lorabench.advice.result import recommendation
    from lorabench.report import recommendation as page
    from lorabench.report.write import Report

    command = ["python", "-m", "lorabench.recommend", *arguments]
    if (arms := store.arms()) and config.resume is False:
        raise ConfigError(
            f"{config.output} already holds {counted(len(arms), 'record')}; resume=true, or another output="
        )
    load = load_average()
    say(console, "starting workers and looking at the machine")
    warn_of_load(console, load, queue.look(command))
    known, spent = _measure(config, store, queue, console)
    found = recommendation(known, config, queue.where, spent, shlex.join(command))
    write_atomically(store.folder / page.FILE, found.model_dump_json(indent=1).encode())
    written = write_atomically(store.folder / "recommendation.md", page.markdown(found).encode())
    Report.of(store.folder).write()
    console.print(Panel(escape(found.paragraph), title=escape(found.title), title_align="left"))
    for title, _, text in found.code[:1]:
        console.print(f"[bold]{title}[/]\n\n{escape(text)}", highlight=False, soft_wrap=True)
    others = [*(title for title, _, _ in found.code[1:]), "what was tried"]
    console.print(f"{', '.join(others)}: {written}", highlight=False, soft_wrap=True)


def _measure(config: RecommendConfig, store: Store, queue: LocalQueue, console: Console) -> tuple[Known, float]:
    """(all that is known afterwards, the seconds it took): one family after the other, as the search asks for them."""
    from lorabench.advice.known import Known
    from lorabench.advice.search import following, seat_seconds
    from lorabench.record.pairs import pairs
    from lorabench.run.entries import NO_TIME, Limits
    from lorabench.run.journal import kept
    from lorabench.run.progress import Display

    kept(store, without=["timeout"])  # of a run that was killed
    question = _question(config, queue.machine, console)
    say_rows(console, [question.itself])
    lost: dict[Any, str] = {}
    budget, began = 60 * config.budget_minutes, time.monotonic()
    again = AGAIN if config.resume == "failed" else ()
    old = [arm for arm in store.arms() if arm.status not in again]
    now: list[ArmRecord] = []

    def known() -> Known:
        return Known(question, [*old, *now], store.sessions(), lost)

    def left() -> float:
        return began + budget - time.monotonic()

    def asked_for() -> Iterator[Family]:
        first = True
        while step := following(replace(known(), seated=queue.seated), left(), first):
            limits = Limits(began + budget, time.monotonic() + step.seat_by, seat_seconds(budget, left()))
            rounds = partial(lambda rounds, one: rounds(left(), one), step.rounds)
            queue.limits = limits._replace(rounds=rounds, stays=True)
            display.arms += len(step.family.cells)
            yield step.family
            first = False

    console.print(
        f"{question.itself.model.name} @ {question.itself.workload.name} on {queue.where}: up to "
        f"{config.budget_minutes:g} minutes, {len(old)} arms already recorded in {store.folder}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    store.add_session(queue.session)
    with Display(console, []) as display:
        for family, records in queue.run(asked_for(), display):
            for record in records:
                if record.status == "timeout" and (record.reason == NO_TIME or queue.limits.seat_s < config.timeout_s):
                    if record.reason != NO_TIME:
                        lost[frozenset(record.toggles)] = str(record.reason).partition(" (raise ")[0]
                    continue  # it says nothing of the arm: the same command goes on with it
                store.append(record)
                now.append(record)
            display.end(family, pairs(records))
    store.add_session({**queue.session, "wall_s": round(time.monotonic() - began, 1)})
    return known(), time.monotonic() - began
