"""The sweep: from one command to an honest table.

    python -m lorabench.sweep                                    # the embedded default; on a CPU about three minutes
    python -m lorabench.sweep suite=first_sweep output=results/h200/first_sweep
    python -m lorabench.sweep --help

Thin on purpose: compose, plan, run, report.
"""

from __future__ import annotations

from lorabench.cli import HELP, complain, entry, exit_code

if __name__ == "__main__":  # by the console script's way, which is short: what follows takes seconds to import
    entry("sweep")

import math
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lorabench.contract.names import NameUnknown, counted
from lorabench.listing import say_rows, show_ablations, show_plan
from lorabench.plan.compose import ConfigError, check_names, load_config, names_in, plan
from lorabench.record.store import RECORDS, RecordError, Store, StoreError
from lorabench.run import server
from lorabench.run.agenda import Agenda
from lorabench.run.journal import kept
from lorabench.run.load import disturbing, load_average
from lorabench.run.signals import uninterrupted

if TYPE_CHECKING:
    from lorabench.contract.machine import Machine
    from lorabench.run.queue import Queue

USAGE = """\
lorabench.sweep: measures LoRA fine-tuning optimizations, all of a question together, in rounds.

usage: python -m lorabench.sweep [key=value ...]        (Hydra's override grammar)

what is measured
  kind=train               what a cell is: train, op, load (weights to the device), evaluate; one model's own: load:NAME
  models=[MODEL,...]       your own: a folder, a config.json, ORG/NAME on the hub; a name; a YAML file; MODEL@WORKLOAD;
                           {{MODEL:{{r:8,...}}}} with an adapter of its own; a single linear: linear-4096x14336. Names:
                           {models}
  workload=WORKLOAD        your own: FILE.jsonl (messages, prompt and completion, or text) or ORG/DATASET;
                           BATCHxLENGTH (4x2048), auto, a name, or {{WORKLOAD:{{field:value}}}}. Names:
                           {workloads}
  weights=random           auto (your model's own), a hub name, a local folder, smollm2-135m-instruct
  lora.r=16 lora.lora_dropout=0.0 ...   PEFT's names        dtype=auto|bfloat16|float16|float32
what is compared
  ablations=[NAME,...]     NAME or {{NAME:{{parameter:value}}}}; [NAME,NAME] is one candidate; list=true shows them all;
                           where none are named, those that conf/sweep.yaml has for the kind
  reference=peft           peft (as it comes), peft_low (adapters in the compute dtype), several of them in a list,
                           or a list of ablations
  design=solo              solo, ladder, leave_one_out, pairwise, factorial; or several: design=[ladder,solo]
  suite=NAME               a whole sweep that is published: {suites}
how
  trials=30 warmup=5       on a CPU 10 and 1                 seed=0
  repeat=1                 sessions in which every cell is measured, each in an order of its own; more can be added
  part=1/2                 every second cell, from the first on: for machines that share a sweep without Ray; afterwards
                           lorabench gather INTO FROM ... puts their folders together
  isolate=false            true: each candidate alone with the reference, for toggles that nobody trusts
  budget_minutes=10        no round begins after so many minutes; the same command goes on
  timeout_s=900            for one step of a worker process: an arm's start, a turn
  world_size=1             processes of an arm with a parallel toggle (ddp), one a GPU
  queue=local              ray: as many cells at once as a Ray cluster's nodes hold; RAY_ADDRESS names it (auto: this
                           machine's), else Ray is started here for this sweep
where to
  output=output/sweep      records.jsonl, environment.json, summary.md/.csv/.tex, plots/*.png, report.html
  resume=true              true: what is missing; failed: also what crashed, hung or did not fit; false: no old records
  report=true              false: no tables, plots and page; python -m lorabench.report OUTPUT makes them on any machine
instead of measuring
  list=true                the ablations, their slots, and what they lack on this machine
  dry_run=true             the cells and how long they will take: as such cells took on this machine before, by the
                           records in output and in estimate_from=[FOLDER,...]; else computed from shapes, roughly

examples
  python -m lorabench.sweep 'models=[smollm2-135m,llama-3.1-8b]' 'ablations=[packing,adamw_fused]' design=ladder
  python -m lorabench.sweep 'ablations=[{{torch_compile:{{mode:max-autotune}}}}]' reference=peft_low trials=50

exit code: 0 when every cell has a record, whatever its status; 2 for bad input, an output that cannot be written
included; 1 when writing fails on the way, or another sweep writes there.
"""


def help_text() -> str:
    return USAGE.format(
        models=", ".join(names_in("model")),
        workloads=", ".join(names_in("workloads")),
        suites=", ".join(names_in("suite")),
    )


def main(arguments: list[str]) -> int:
    if HELP & set(arguments):
        print(help_text())
        return 0
    return in_one_line(lambda: _main(arguments, Console()))


def in_one_line(command: Callable[[], int]) -> int:
    """The exit code of a command that measures; whatever stops it costs one line."""
    try:
        return command()
    except (ConfigError, NameUnknown, RecordError) as error:
        return complain(error)
    except StoreError as error:
        return complain(error, 1)
    except OSError as error:
        return complain(f"{error.filename or 'the output'} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt as stop:
        return complain("stopped; the same command continues where it stopped", exit_code(stop))


def _main(arguments: list[str], console: Console) -> int:
    config = load_config(arguments)
    if config.list:  # without a plan, which needs transformers, and without torch: it is there at once
        from lorabench.measure.glance import glance

        show_ablations(console, glance())
        return 0
    prepare(config, console)
    if config.dry_run:
        from lorabench.measure.machine import describe

        show_plan(console, config, describe())
        return 0
    return run(config, arguments, console)


def prepare(config: Any, console: Console) -> None:
    """Before a plan: what can be said without torch, and then torch, which the server of workers imports meanwhile.
    Raises ConfigError and NameUnknown."""
    check_output(config.output)
    say(console, f"lorabench {version('lorabench')}: planning")
    check_names(config)
    if config.queue == "local" and not config.dry_run:
        server.set_up()
        server.start()
    with uninterrupted():  # an exception in the middle of its C++ would abort the process
        import torch  # noqa: F401


def check_output(folder: Path) -> None:
    """Raises ConfigError where nothing can be written. It leaves nothing behind: a dry run asks, too."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        TemporaryFile(dir=there).close()
        if (records := folder / RECORDS).exists():
            open(records, "ab").close()
    except OSError as error:
        raise ConfigError(f"output {folder} cannot be written: {error.strerror}; name another folder") from None


def say(console: Console, doing: str) -> None:
    """What takes the next seconds, before it begins: nobody should wait in front of an empty screen."""
    console.print(f"{doing} …", highlight=False, style="dim", soft_wrap=True)


def run(config: Any, arguments: list[str], console: Console) -> int:
    """Measure what is missing in `output`, then write the report."""
    from lorabench.run.process import ProbeError
    from lorabench.run.queue import QueueError

    plan(config, "cpu")  # names first: a wrong one must cost neither a probe nor a folder
    try:
        chosen = _queue(config)
        with Store(config.output) as store, chosen as queue:
            _measure(store, queue, config, arguments, console)
            return _report(config, console) if config.report else _left_out(config, console)
    except (ProbeError, QueueError) as error:
        raise ConfigError(str(error)) from None


def _queue(config: Any) -> Queue:
    """Raises QueueError where the wanted one cannot be used here at all. Ray is imported for queue=ray alone."""
    if config.queue == "ray":
        if config.budget_minutes is not None:
            raise ConfigError(
                "budget_minutes= ends what is measured on this machine; a cluster's nodes do not know of it"
            )
        from lorabench.run.ray_cluster import RayCluster
        from lorabench.run.ray_queue import RayQueue

        return RayQueue(RayCluster(), config.dtype, config.timeout_s)
    from lorabench.run.local_queue import LocalQueue

    stop_at = math.inf if config.budget_minutes is None else time.monotonic() + 60 * config.budget_minutes
    return LocalQueue(config.dtype, config.timeout_s, config.output, stop_at=stop_at)


def _measure(store: Store, queue: Queue, config: Any, arguments: list[str], console: Console) -> None:
    """Measure what is missing, and store it."""
    from lorabench.record.stats import MIN_TRIALS_FOR_VERDICT

    if (rounds := kept(store)) is not None:
        console.print(
            f"[yellow]the last sweep was ended after {rounds} rounds of a family; they are kept, and it goes on"
        )
    agenda = Agenda(config, store.records())
    if agenda.recorded and config.resume is False:
        raise ConfigError(
            f"{config.output} already holds {counted(len(agenda.recorded), 'record')}; resume=true, or another output="
        )
    sessions = range(config.repeat)
    # A look at the machine takes seconds, of its GPU too: not where a machine like the last session's left nothing.
    device = store.last_device() if agenda.recorded else None
    command = ["python", "-m", "lorabench.sweep", *arguments]
    if device:
        agenda.plan_for(device)
    looked = not device or any(map(agenda.missing, sessions))
    if looked:
        load = load_average()
        machine = _look(queue, command, agenda, console)
        if config.queue == "local":  # a cluster's nodes have loads of their own
            warn_of_load(console, load, machine)
    left = sum(len(agenda.missing(number)) for number in sessions)
    each = f" in each of {config.repeat} sessions" if config.repeat > 1 else ""
    console.print(
        f"lorabench {version('lorabench')}{f' on {queue.where}' if looked else ''}: "
        f"{counted(len(agenda.cells), 'cell')}{each}, "
        f"{len(agenda.cells) * config.repeat - left} already recorded in {config.output}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    say_rows(console, agenda.cells)
    if left and 0 < (fewest := min((cell.trials for cell in agenda.cells), default=0)) < MIN_TRIALS_FOR_VERDICT:
        said = f"trials={fewest}: no ratio will be a figure, which needs {MIN_TRIALS_FOR_VERDICT} trials"
        console.print(f"[yellow]{said}", highlight=False, soft_wrap=True)
    for number in sessions:
        if not agenda.missing(number):
            continue
        if config.repeat > 1:
            console.print(f"session {number + 1} of {config.repeat}", highlight=False)
        if not looked:
            _look(queue, command, agenda, console)  # a session of its own, with the ceilings of now
        _drain(queue, agenda, store, console, number)
        looked = False


def _look(queue: Queue, command: list[str], agenda: Agenda, console: Console) -> Machine:
    say(console, "starting workers and looking at the machine")
    machine = queue.look(command)
    agenda.plan_for(machine.device, machine)
    return machine


def warn_of_load(console: Console, load: float, machine: Machine) -> None:
    """load: from before the first worker."""
    if words := disturbing(load, machine):
        console.print(f"[yellow]{words}", highlight=False, soft_wrap=True)


def _drain(queue: Queue, agenda: Agenda, store: Store, console: Console, replicate: int = 0) -> None:
    """Every record of a session into the store, and before it the machine's entry that it names."""
    from lorabench.record.pairs import pairs
    from lorabench.run.entries import NO_TIME, UNLIMITED
    from lorabench.run.progress import Display

    began, before = time.monotonic(), {s["id"] for s in store.sessions()}
    stored: dict[str, dict[str, Any]] = {}

    def store_sessions() -> None:
        for name, session in queue.sessions.items():
            if name not in before and stored.get(name) is not session:  # it is new, or more is known of it
                store.add_session(session)
                stored[name] = session

    store_sessions()
    todo = agenda.families(replicate)
    for _ in range(1 + len(agenda.cells)):  # again only where one more did not apply, whatever the records' keys
        if not todo:
            break
        stopped = False
        with Display(console, todo) as display:
            for family, found in queue.run(todo, display, agenda.replan):
                store_sessions()
                records = [record for record in found if record.reason != NO_TIME]
                stopped |= len(records) < len(found)
                for record in records:
                    record.replicate = replicate
                    store.append(record)
                shown = pairs(records)
                for pair in shown:
                    agenda.take(pair)
                display.end(family, shown)
        if stopped := stopped or time.monotonic() >= getattr(queue, "limits", UNLIMITED).stop_at:
            console.print("the budget is spent; the same command goes on", highlight=False, soft_wrap=True)
        todo = [] if stopped else agenda.families(replicate)
        if todo:
            say(console, "going on without what did not apply")
    for name in stored:
        store.add_session({**queue.sessions[name], "wall_s": round(time.monotonic() - began, 1)})


def _left_out(config: Any, console: Console) -> int:
    console.print(
        f"tables, plots and page: python -m lorabench.report {config.output}", highlight=False, soft_wrap=True
    )
    return 0


def _report(config: Any, console: Console) -> int:
    from lorabench.report.write import Report

    report = Report.of(config.output)
    written = report.write()
    report.show(console)
    pictures = [p for p in written if p.name in ("speedup.png", "report.html")]
    console.print("look at " + " and ".join(map(str, pictures or written)), highlight=False, soft_wrap=True)
    return 0
