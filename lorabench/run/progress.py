"""What a person sees while a sweep runs: cell, phase, elapsed and expected time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorabench.contract.cell import Cell
from lorabench.record.schema import Record

STYLE = {"ok": "green", "unsupported": "dim", "not_applied": "dim", "conflict": "yellow"}


class Display:
    """A live line on a terminal; one plain line a cell elsewhere (a log, CI)."""

    def __init__(self, console: Console, todo: Sequence[Cell], refused: int) -> None:
        self.console, self.todo, self.done = console, len(todo), 0
        self.measurable = len(todo) - refused  # a cell that is refused beforehand takes no time
        self.began = time.monotonic()
        self.spent: list[float] = []  # seconds of the cells that were really measured
        self.started: dict[str, float] = {}  # of the cells that run now, by their keys: a queue may run several
        self.most = 1  # how many ran at once
        self.bar = Progress(
            TextColumn("[bold]{task.fields[cell]}"), BarColumn(bar_width=16), MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}"), TimeElapsedColumn(), TextColumn("expected {task.fields[expected]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=len(todo), cell="", phase="", expected="?")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def add(self, measurable: bool) -> None:
        """One cell more than was known of."""
        self.todo += 1
        self.measurable += measurable
        self.bar.update(self.task, total=self.todo)

    def start(self, cell: Cell) -> None:
        self.started[cell.key] = time.monotonic()
        self.most = max(self.most, len(self.started))
        title = cell.title if len(self.started) == 1 else f"{len(self.started)} cells"
        self.bar.update(self.task, cell=escape(title), phase="starting", expected=self._expected())

    def phase(self, text: str) -> None:
        self.bar.update(self.task, phase=escape(text))

    def end(self, cell: Cell, record: Record) -> None:
        self.done += 1
        now = time.monotonic()
        took = now - self.started.pop(cell.key, now)  # a cell may end that never started: nowhere was room for it
        if record.cost is not None:
            self.spent.append(took)
        self.bar.update(self.task, advance=1, expected=self._expected())
        style = STYLE.get(record.status, "red")
        outcome = _ratio(record) if record.status == "ok" else (record.reason or "").partition("\n")[0]
        elapsed = time.monotonic() - self.began
        self.console.print(
            f"\\[{self.done}/{self.todo}] {escape(cell.title)}  [{style}]{record.status}[/]  {escape(outcome)}  "
            f"({took:.1f} s, {elapsed:.0f} of about {self._expected()})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def _expected(self) -> str:
        """The whole sweep at the pace so far."""
        if not self.spent:
            return "?"
        left = max(self.measurable - len(self.spent), 0) * sum(self.spent) / len(self.spent) / self.most
        return f"{time.monotonic() - self.began + left:.0f} s"


def _ratio(record: Record) -> str:
    total = (record.phases or {}).get("total")
    if total is None or total.speedup is None:
        return ""
    return f"total {total.speedup:.3f} × [{total.low:.3f}, {total.high:.3f}]"
