"""What is shown instead of measuring: the toggles (list=true, doctor) and the plan (dry_run=true)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked_requires, described
from lorabench.contract.machine import Machine
from lorabench.contract.names import NameUnknown, counted
from lorabench.plan.design import refusal
from lorabench.plan.estimate import Estimate, by_records, computed, duration, longest
from lorabench.plan.registry import ablation_class, registered
from lorabench.record.costs import seen_on
from lorabench.record.store import RECORDS, read_records
from lorabench.run.agenda import Agenda

NAMES = ("model @ workload", "reference", "toggles")
ROOMY, NARROW = 40, 16  # characters of a plan's last column: where names have their line, and at least
BESIDE = 3  # characters of a table's column beside its words


def show_ablations(console: Console, machine: Machine) -> None:
    """Every registered ablation, ours and others', and what it lacks here."""
    console.print(f"ablations on {machine.name}", style="italic", highlight=False)
    for name in sorted(registered()):
        slot, summary, lacks, failed = _asked(name, machine)
        here = Text(lacks or "available", style="red" if failed else "dim" if lacks else "green")
        console.print(Text(name, style="bold"), Text(slot and f"({slot})", style="cyan"), here, soft_wrap=True)
        if summary:
            console.print(Padding(Text(summary), (0, 0, 0, 4), expand=False))


def show_lacking(console: Console, machine: Machine) -> None:
    """How many of the registered ablations this machine can have, and the others by what they lack."""
    lacking: dict[str, list[str]] = {}
    for name in sorted(registered()):
        _, _, lacks, _ = _asked(name, machine)
        if lacks:
            lacking.setdefault(lacks, []).append(name)
    every, missing = len(registered()), sum(map(len, lacking.values()))
    console.print(f"{every - missing} of {every} ablations are available here (lorabench list shows each)")
    for words, names in sorted(lacking.items(), key=lambda item: -len(item[1])):
        console.print(Text(f"  {', '.join(names)}: {words}", style="dim"))


def _asked(name: str, machine: Machine) -> tuple[str, str, str | None, bool]:
    """An ablation's slot and summary; what it needs and this machine has not, or why it cannot be had at all (None:
    nothing is wrong); and whether it is the latter."""
    slot = summary = ""
    try:
        cls = ablation_class(name)
        slot, summary = cls.slot, cls.summary
        return slot, summary, asked_requires(cls, machine), False
    except Exception as error:  # a third party's class may fail in any way
        return slot, summary, str(error) if isinstance(error, NameUnknown) else described(error), True


def say_rows(console: Console, cells: Iterable[Cell]) -> None:
    """Which rows of a text are measured, and how like the text they are."""
    drawn = {job.workload.name: job.workload.drawn for cell in cells for job in cell.jobs if job.workload.drawn}
    for name, found in drawn.items():
        console.print(f"{name}: {found.words}", highlight=False, markup=False, soft_wrap=True)


def show_plan(console: Console, config: Any, machine: Machine) -> None:
    """The cells: which are recorded, which would be refused and why, and how long the others will take."""
    own = [config.output] if Path(config.output, RECORDS).exists() else []
    agenda = Agenda(config, [record for folder in own for record in read_records(folder)])
    agenda.plan_for(machine.device, machine)
    missing = [[c.key for c in agenda.missing(number)] for number in range(config.repeat)]
    to_measure = [c for c in agenda.cells if any(c.key in keys for keys in missing) and not agenda.refused(c)]
    estimates = _estimates(to_measure, machine, [*own, *config.estimate_from])

    rows, lacking = list[tuple[str, ...]](), dict[str, list[tuple[str, ...]]]()
    for cell in agenda.cells:
        words = _words(cell, machine, estimates.get(cell.key), config.timeout_s)
        names = f"{cell.model.name} @ {cell.workload.name}", ", ".join(a.label for a in cell.reference), cell.tested
        rows.append((*map(escape, names), words))
        last = f" {cell.toggles[-1].name} " if cell.toggles else ""
        if last and cell.key not in estimates and last in words:  # what this toggle lacks, others may lack as well
            lacking.setdefault(words.replace(last, " ", 1), []).append(rows[-1])
    together = {words: refused for words, refused in lacking.items() if len(refused) > 1}
    apart = [row for refused in together.values() for row in refused]
    title = f"{counted(len(agenda.cells), 'cell')} on {machine.name}"
    console.print(_table(title, [row for row in rows if row not in apart], console.width), crop=False)
    say_rows(console, agenda.cells)
    for words, refused in together.items():
        console.print(f"{words}: {', '.join(dict.fromkeys(tested for *_, tested, _ in refused))}", highlight=False)
    times = [
        (min(e.seconds, longest(cell, config.timeout_s)), e.basis)
        for cell in to_measure
        for e in [estimates[cell.key]] * sum(cell.key in keys for keys in missing)
    ]
    bases = [basis for _, basis in times]
    known = ", ".join(f"{bases.count(basis)} of {len(bases)} {basis}" for basis in dict.fromkeys(bases))
    sessions = f" in {config.repeat} sessions" if config.repeat > 1 else ""
    console.print(f"about {duration(sum(s for s, _ in times))}{sessions}" + (f" (cells: {known})" if known else ""))


def _table(title: str, rows: list[tuple[str, ...]], width: int) -> Table:
    """The plan's table. A name is whole, to be copied or searched for: what does not fit so is wider than `width`."""
    table = Table(title=title, title_justify="left")
    lines, words = (
        [max((len(part) for row in rows for part in split(row[place])), default=0) for place in range(len(NAMES))]
        for split in (lambda text: [text], str.split)
    )
    rest = [width - 1 - BESIDE - sum(own + BESIDE for own in widths) for widths in (lines, words)]
    widths, last = (lines, rest[0]) if rest[0] >= ROOMY else (words, max(rest[1], NARROW))
    for column, own in zip((*NAMES, "estimate or reason"), (*widths, last), strict=True):
        table.add_column(column, overflow="fold", width=own)
    table.width = 1 + sum(own + BESIDE for own in (*widths, last))
    for row in rows:
        table.add_row(*row)
    return table


def _estimates(cells: list[Cell], machine: Machine, folders: list[Path]) -> dict[str, Estimate]:
    """By the keys of the cells. The machine's rates are measured only where records do not say."""
    seen = list(seen_on(machine, folders))
    found = {cell.key: by_records(cell, seen) for cell in cells}
    if None in found.values():
        import torch

        from lorabench.measure.roofline import ceilings

        rates = ceilings(torch.device(machine.device), getattr(torch, machine.dtype("auto")))
        return {cell.key: found[cell.key] or computed(cell, rates) for cell in cells}
    return {key: estimate for key, estimate in found.items() if estimate}


def _words(cell: Cell, machine: Machine, estimate: Estimate | None, timeout_s: float) -> str:
    if estimate is None:
        refused = refusal(cell, machine)
        return f"[dim]{refused[0]}: {escape(refused[1])}" if refused else "[green]recorded already"
    words = f"about {duration(estimate.seconds)} ({estimate.basis})"
    if estimate.seconds > longest(cell, timeout_s):
        words += f"; [yellow]ends at timeout_s={timeout_s:g} with the status timeout"
    return words
