"""What is shown instead of measuring: the toggles (list=true, doctor) and the plan (dry_run=true)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lorabench.contract.cell import Cell
from lorabench.contract.hooks import asked_requires, described
from lorabench.contract.machine import Machine
from lorabench.contract.names import NameUnknown
from lorabench.plan.design import refusal
from lorabench.plan.estimate import Estimate, by_records, computed, duration, longest
from lorabench.plan.registry import ablation_class, registered
from lorabench.record.costs import seen_on
from lorabench.record.store import RECORDS, read_records
from lorabench.run.agenda import Agenda


def show_ablations(console: Console, machine: Machine) -> None:
    """Every registered ablation, ours and others', and what it lacks here."""
    table = Table(title=f"ablations on {machine.name}", title_justify="left")
    table.add_column("ablation", no_wrap=True)  # whole, to be copied or searched for
    for column in ("slot", "what it does", "on this machine"):
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


def show_plan(console: Console, config: Any, machine: Machine) -> None:
    """The cells: which are recorded, which would be refused and why, and how long the others will take."""
    own = [config.output] if Path(config.output, RECORDS).exists() else []
    agenda = Agenda(config, [record for folder in own for record in read_records(folder)])
    agenda.plan_for(machine.device, machine)
    missing = [[c.key for c in agenda.missing(number)] for number in range(config.repeat)]
    to_measure = [c for c in agenda.cells if any(c.key in keys for keys in missing) and not agenda.refused(c)]
    estimates = _estimates(to_measure, machine, [*own, *config.estimate_from])

    table = Table(title=f"{len(agenda.cells)} cells on {machine.name}", title_justify="left")
    for column in ("model @ workload", "reference", "toggles", "estimate or reason"):
        table.add_column(column, overflow="fold")
    for cell in agenda.cells:
        table.add_row(
            escape(f"{cell.model.name} @ {cell.workload.name}"),
            escape(", ".join(a.label for a in cell.reference)),
            escape(cell.tested),
            _words(cell, machine, estimates.get(cell.key), config.timeout_s),
        )
    console.print(table)
    times = [
        (min(e.seconds, longest(cell, config.timeout_s)), e.basis)
        for cell in to_measure
        for e in [estimates[cell.key]] * sum(cell.key in keys for keys in missing)
    ]
    bases = [basis for _, basis in times]
    known = ", ".join(f"{bases.count(basis)} of {len(bases)} {basis}" for basis in dict.fromkeys(bases))
    sessions = f" in {config.repeat} sessions" if config.repeat > 1 else ""
    console.print(f"about {duration(sum(s for s, _ in times))}{sessions}" + (f" (cells: {known})" if known else ""))


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
