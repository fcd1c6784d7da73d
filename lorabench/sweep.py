"""The sweep: from one command to an honest table.

    python -m lorabench.sweep                                    # the embedded default; on a CPU about three minutes
    python -m lorabench.sweep suite=first_sweep output=results/h200/first_sweep
    python -m lorabench.sweep --help

Thin on purpose: compose, plan, run, report.
"""

from __future__ import annotations

import random
import sys

if __name__ == "__main__":  # by the console script's way, which is short: what follows takes seconds to import
    from lorabench.cli import main as entry

    raise SystemExit(entry(["sweep", *sys.argv[1:]]))

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorabench.cli import exit_code
from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked_requires, described
from lorabench.contract.names import NameUnknown
from lorabench.plan.compose import ConfigError, Plan, load_config, names_in, plan
from lorabench.plan.design import refusal
from lorabench.plan.registry import ablation_class, registered
from lorabench.record.store import RecordError, Store, StoreError
from lorabench.run.session import new_session as new_session  # log_command takes it from here

if TYPE_CHECKING:
    from lorabench.run.queue import Queue

Recorded = dict[tuple[str, int], str]  # key and number of the session → status of the last record

HELP = """\
lorabench.sweep: measures LoRA fine-tuning optimizations, each against its reference, in pairs.

usage: python -m lorabench.sweep [key=value ...]        (Hydra's override grammar)

what is measured
  kind=train               what a cell is: train, op, load (weights to the device), evaluate; one model's own: load:NAME
  models=[NAME,...]        NAME, NAME@WORKLOAD, a YAML file, or {{NAME:{{r:8,...}}}} with an adapter of its own; also
                           a single linear: linear-4096x14336. Known:
                           {models}
  workload=NAME            BATCHxLENGTH (4x2048), auto, a name, or {{NAME:{{field:value}}}}
                           {workloads}
  weights=random           or a hub name, a local folder, smollm2-135m-instruct
  lora.r=16 lora.lora_dropout=0.0 ...   PEFT's names        dtype=auto|bfloat16|float16|float32
what is compared
  ablations=[NAME,...]     NAME or {{NAME:{{parameter:value}}}}; [NAME,NAME] is one candidate; list=true shows them all;
                           where none are named, those that conf/sweep.yaml has for the kind
  reference=peft           peft (as it comes), peft_low (adapters in the compute dtype), several of them in a list,
                           or a list of ablations
  design=solo              solo, ladder, leave_one_out, pairwise, factorial
  suite=NAME               a whole sweep that is published: {suites}
how
  trials=30 warmup=5       on a CPU 10 and 1                 seed=0
  repeat=1                 sessions in which every cell is measured, each in an order of its own; more can be added
  timeout_s=900            for one worker process
  world_size=1             processes of an arm with a parallel toggle (ddp), one a GPU
  queue=local              ray: as many cells at once as a Ray cluster's nodes hold; RAY_ADDRESS names it (auto: this
                           machine's), else Ray is started here for this sweep
where to
  output=output/sweep      records.jsonl, environment.json, summary.md/.csv/.tex, plots/*.png, report.html
  resume=true              true: what is missing; failed: also what crashed, hung or did not fit; false: no old records
instead of measuring
  list=true                the ablations, their slots, and what they lack on this machine
  dry_run=true             the cells and a time estimate

examples
  python -m lorabench.sweep 'models=[smollm2-135m,llama-3.1-8b]' 'ablations=[packing,adamw_fused]' design=ladder
  python -m lorabench.sweep 'ablations=[{{torch_compile:{{mode:max-autotune}}}}]' reference=peft_low trials=50

exit code: 0 when every cell has a record, whatever its status; 2 for bad input; 1 when the output cannot be written.
"""


def help_text() -> str:
    return HELP.format(
        models=", ".join(names_in("model")),
        workloads=", ".join(names_in("workloads")),
        suites=", ".join(names_in("suite")),
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console()
    if {"-h", "--help", "help"} & set(arguments):
        print(help_text())
        return 0
    return in_one_line(lambda: _main(arguments, console))


def in_one_line(command: Callable[[], int]) -> int:
    """The exit code of a command that measures; whatever stops it costs one line."""
    try:
        return command()
    except (ConfigError, NameUnknown, RecordError) as error:
        return _complain(error, 2)
    except StoreError as error:
        return _complain(error, 1)
    except OSError as error:
        return _complain(f"{error.filename or 'the output'} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt as stop:
        return _complain("stopped; the same command continues where it stopped", exit_code(stop))


def _complain(error: object, code: int) -> int:
    print(f"lorabench: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _main(arguments: list[str], console: Console) -> int:
    config = load_config(arguments)
    if config.list or config.dry_run:
        from lorabench.measure.machine import describe

        machine = describe()
        planned = plan(config, machine.device)
        if config.list:
            show_ablations(console, machine)
        else:
            show_plan(console, planned, machine)
        return 0
    return run(config, arguments, console)


def show_ablations(console: Console, machine: Any) -> None:
    """list=true: every registered ablation, ours and others', and what it lacks here."""
    table = Table(title=f"ablations on {machine.name}", title_justify="left")
    for column in ("ablation", "slot", "what it does", "on this machine"):
        table.add_column(column, overflow="fold")
    for name in sorted(registered()):
        try:
            cls = ablation_class(name)
            unmet = asked_requires(cls, machine)
        except Exception as error:  # a third party's class may fail in any way
            words = str(error) if isinstance(error, NameUnknown) else described(error)
            table.add_row(name, "", "", f"[red]{escape(words)}")
            continue
        table.add_row(name, cls.slot, escape(cls.summary), f"[dim]{escape(unmet)}" if unmet else "[green]available")
    console.print(table)


def show_plan(console: Console, planned: Plan, machine: Any) -> None:
    """dry_run=true: the cells, those that would be refused with the reason, and a time estimate."""
    import torch

    from lorabench.measure.roofline import ceilings
    from lorabench.plan.estimate import seconds

    table = Table(title=f"{len(planned.cells)} cells on {machine.name}", title_justify="left")
    for column in ("model @ workload", "reference", "toggles", "estimate or reason"):
        table.add_column(column, overflow="fold")
    rates, total = ceilings(torch.device(machine.device), getattr(torch, machine.dtype("auto"))), 0.0
    for cell in planned.cells:
        refused = refusal(cell, machine)
        estimate = 0.0 if refused else seconds(cell, rates)
        total += estimate
        table.add_row(
            escape(f"{cell.model.name} @ {cell.workload.name}"),
            escape(", ".join(a.label for a in cell.reference)),
            escape(" + ".join(t.label for t in cell.toggles)) or "reference against itself",
            f"[dim]{refused[0]}: {escape(refused[1])}" if refused else f"about {estimate:.0f} s",
        )
    console.print(table)
    tflops = next(iter(rates["gemm_tflops"].values()))
    repeat = planned.config.repeat
    sessions = f" in each of {repeat} sessions" if repeat > 1 else ""
    console.print(
        f"about {total / 60:.1f} minutes{sessions} at {tflops:.2g} TFLOP/s (a rough estimate, measured just now)"
    )


def run(config: Any, arguments: list[str], console: Console) -> int:
    """Measure what is missing in `output`, then write the report."""
    from lorabench.run.process import ProbeError
    from lorabench.run.queue import QueueError

    plan(config, "cpu")  # names first: a wrong one must cost neither a probe nor a folder
    try:
        chosen = _queue(config)
        with Store(config.output) as store, chosen as queue:
            _measure(store, queue, config, arguments, console)
            return _report(config, console)
    except (ProbeError, QueueError) as error:
        raise ConfigError(str(error)) from None


def _queue(config: Any) -> Queue:
    """Raises QueueError where the wanted one cannot be used here at all. Ray is imported for queue=ray alone."""
    if config.queue == "ray":
        from lorabench.run.ray_cluster import RayCluster
        from lorabench.run.ray_queue import RayQueue

        return RayQueue(RayCluster(), config.dtype, config.timeout_s)
    from lorabench.run.local_queue import LocalQueue

    return LocalQueue(config.dtype, config.timeout_s, config.output)


def _missing(config: Any, device: str, recorded: Recorded) -> tuple[list[Cell], dict[int, list[Cell]]]:
    """All cells that the sweep has on such a device, and by session those that are to be measured, in their order.

    Of several sessions each has an order of its own: what a cell owes to those before it is no part of its ratio.
    """
    again = ("crash", "timeout", "oom") if config.resume == "failed" else ()
    cells = plan(config, device).cells
    todo = {}
    for replicate in range(config.repeat):
        found = [c for c in cells if recorded.get((c.key, replicate)) in (None, *again)]
        if config.repeat > 1:
            random.Random(f"{config.seed} {replicate}").shuffle(found)
        if found:
            todo[replicate] = found
    return cells, todo


def _measure(store: Store, queue: Queue, config: Any, arguments: list[str], console: Console) -> None:
    """Measure what is missing, and store it."""
    if store.repaired:
        console.print(f"[yellow]{escape(store.repaired)}")
    recorded: Recorded = {(r.key, r.replicate): r.status for r in store.records()}
    if recorded and config.resume is False:
        raise ConfigError(f"{config.output} already holds {len(recorded)} records; resume=true, or another output=")
    # A look at the machine takes seconds, of its GPU too: not where a machine like the last session's left nothing.
    device = store.last_device() if recorded else None
    command = ["python", "-m", "lorabench.sweep", *arguments]
    cells, todo = _missing(config, device, recorded) if device else ([], {})
    machine = None
    if todo or not device:
        machine = queue.look(command)
        cells, todo = _missing(config, machine.device, recorded)
    sessions = f" in each of {config.repeat} sessions" if config.repeat > 1 else ""
    left = sum(map(len, todo.values()))
    console.print(
        f"lorabench {version('lorabench')}{f' on {queue.where}' if machine else ''}: {len(cells)} cells{sessions}, "
        f"{len(cells) * config.repeat - left} already recorded in {config.output}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for number, (replicate, missing) in enumerate(todo.items()):
        if config.repeat > 1:
            console.print(f"session {replicate + 1} of {config.repeat}", highlight=False)
        if number or machine is None:
            machine = queue.look(command)  # a session of its own, with the ceilings of now
        _drain(queue, missing, store, console, sum(refusal(c, machine) is not None for c in missing), replicate)


def _drain(queue: Queue, todo: list[Cell], store: Store, console: Console, refused: int, replicate: int = 0) -> None:
    """Every record into the store, and before it the session that it names."""
    from lorabench.run.progress import Display

    began, before, stored = time.monotonic(), {s["id"] for s in store.sessions()}, list[str]()

    def store_sessions() -> None:
        for name in [n for n in queue.sessions if n not in before and n not in stored]:
            store.add_session(queue.sessions[name])
            stored.append(name)

    store_sessions()
    with Display(console, todo, refused) as display:
        for cell, record in queue.run(todo, display):
            store_sessions()
            record.replicate = replicate
            store.append(record)
            display.end(cell, record)
    for name in stored:
        store.add_session({**queue.sessions[name], "wall_s": round(time.monotonic() - began, 1)})


def _report(config: Any, console: Console) -> int:
    from lorabench.report.write import Report

    report = Report.of(config.output)
    written = report.write()
    console.print(report.terminal(console.width))
    pictures = [p for p in written if p.name in ("speedup.png", "report.html")]
    console.print("look at " + " and ".join(map(str, pictures or written)), highlight=False, soft_wrap=True)
    return 0
