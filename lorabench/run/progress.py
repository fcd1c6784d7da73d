"""What a person sees while a sweep runs: family, what is done in it, elapsed and expected time; then a line an arm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorabench.contract.family import Family
from lorabench.record.contrast import contrast_of
from lorabench.record.schema import TOTAL, Record

# What is done, of which a log has a line; a round each is too much for it.
TOLD = ("preparing", "left: ", "no room", "another block", "again in parts", "once more", "round 1 of", "certifying")
STYLE = {"ok": "green", "unsupported": "dim", "not_applied": "dim", "conflict": "yellow"}


class Display:
    """A live line on a terminal; one plain line an arm elsewhere (a log, CI)."""

    def __init__(self, console: Console, todo: Sequence[Family]) -> None:
        self.console = console
        self.arms, self.done = sum(len(family.cells) for family in todo), 0
        self.began = time.monotonic()
        self.spent: list[tuple[float, int]] = []  # seconds and arms of the families that were measured
        self.started: dict[str, float] = {}  # of the families that run now, by title: a queue may run several
        self.bar = Progress(
            TextColumn("[bold]{task.fields[family]}"), BarColumn(bar_width=16), MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}"), TimeElapsedColumn(), TextColumn("expected {task.fields[expected]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=self.arms, family="", phase="", expected="?")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def start(self, family: Family) -> None:
        self.started[family.title] = time.monotonic()
        title = family.title if len(self.started) == 1 else f"{len(self.started)} families"
        many = f"{len(family.cells)} arms" if len(family.cells) > 1 else next(c.tested for c in family.cells)
        if not self.console.is_terminal:
            self.console.print(f"{escape(family.title)}: {escape(many)} …", highlight=False, style="dim")
        self.bar.update(self.task, family=escape(title), phase="starting", expected=self._expected())

    def phase(self, text: str) -> None:
        if not self.console.is_terminal and text.startswith(TOLD):
            seconds = time.monotonic() - self.began
            self.console.print(f"{seconds:6.1f} s: {escape(text)}", highlight=False, style="dim", soft_wrap=True)
        self.bar.update(self.task, phase=escape(text))

    def end(self, family: Family, shown: Sequence[Record]) -> None:
        """A line for each contrast of the family."""
        now = time.monotonic()
        took = now - self.started.pop(family.title, now)  # one may end that never started: nowhere was room for it
        self.spent.append((took, len(shown)))
        for record in shown:
            self.done += 1
            style = STYLE.get(record.status, "red")
            outcome = _ratio(record) if record.status == "ok" else (record.reason or "").partition("\n")[0]
            self.console.print(
                f"\\[{self.done}/{max(self.arms, self.done)}] {escape(family.title)}: {escape(_named(record))}  "
                f"[{style}]{record.status}[/]  {escape(outcome)}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        elapsed = now - self.began
        self.bar.update(self.task, completed=self.done, total=max(self.arms, self.done), expected=self._expected())
        self.console.print(
            f"{escape(family.title)}: {len(shown)} arms in {took:.1f} s ({elapsed:.0f} of about {self._expected()})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def _expected(self) -> str:
        """The whole sweep at the pace so far."""
        if not self.spent:
            return "?"
        pace = sum(s for s, _ in self.spent) / max(1, sum(n for _, n in self.spent))
        return f"{time.monotonic() - self.began + max(self.arms - self.done, 0) * pace:.0f} s"


def _named(record: Record) -> str:
    return " + ".join(record.ablations) or "reference again"


def _ratio(record: Record) -> str:
    found = contrast_of(record, (TOTAL,))
    return f"total {found.centre:.3f} × [{found.low:.3f}, {found.high:.3f}]" if found else ""
